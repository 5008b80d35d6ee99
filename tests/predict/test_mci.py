from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from boxcov import MCGLM, MCI, BoxcovError, Detector, ExactGLM, Selection, fit
from boxcov.predict.mci import drop
from helpers.nets import NetDetector
from oracles.dense import relative


@pytest.fixture(scope="module")
def tight(tiny, train_frames):
    """So much data that weights hardly vary: sampling and linearising agree."""
    return fit(tiny, train_frames[:20], n_data=1e10, prior_precision=1e6)


def test_samples_of_a_tight_posterior_agree_with_exact(tiny, tight, image) -> None:
    exact = ExactGLM(tiny, tight)(image)
    found = MCI(tiny, tight, samples=400)(image)
    assert relative(found.covariance, exact.covariance) < 0.2
    assert torch.allclose(found.boxes, exact.boxes, atol=0.01)
    assert torch.equal(found.scores, exact.scores)


def test_laplace_samples_are_full_passes_with_other_weights(tiny, tight, image) -> None:
    import copy

    etas = tight.sample(3, torch.Generator().manual_seed(0))
    boxes = []
    for i in range(3):
        other = copy.deepcopy(tiny)
        named = dict(other.named_parameters())
        with torch.no_grad():
            for name, eta in etas.items():
                named[name].add_(eta[i])
            boxes.append(other.decode(other(image), tiny.select(tiny(image))))
    stack = torch.stack(boxes)
    found = MCI(tiny, tight, samples=3)(image)
    assert torch.allclose(found.boxes, stack.mean(0), atol=1e-5)
    spread = stack - stack.mean(0)
    assert relative(found.covariance, torch.einsum("kmi,kmj->mij", spread, spread) / 2) < 1e-2


def test_dropout_varies_and_follows_its_seed(tiny, image) -> None:
    first, again, other = (MCI(tiny, dropout=0.1, seed=seed)(image) for seed in (0, 0, 1))
    assert torch.equal(first.covariance, again.covariance)
    assert not torch.equal(first.covariance, other.covariance)
    assert bool((first.uncertainty > 0).all())
    assert not torch.equal(
        first.boxes, tiny.detect(image).boxes
    )  # Bayesian averaging is not post hoc
    assert float(MCI(tiny, dropout=0.5)(image).uncertainty.mean()) > float(first.uncertainty.mean())


def test_equal_frames_get_equal_numbers_whatever_came_before(tiny, image) -> None:
    model = MCI(tiny, dropout=0.1)
    first = model(image)
    model(image.flip(3))
    assert torch.equal(model(image).covariance, first.covariance)


def test_dropout_on_reparametrised_layers_is_refused() -> None:
    """Weight normalisation computes the weight in every pass, so no parameter can be dropped."""
    torch.manual_seed(0)
    last = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 2, 1))
    detector, x = (
        NetDetector(nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), last)).eval(),
        torch.randn(1, 2, 5, 5),
    )
    with pytest.raises(BoxcovError, match="nothing would be dropped"):
        MCI(detector, dropout=0.1, depth=["net.2"])(x)
    assert bool((MCI(detector, dropout=0.1)(x).uncertainty > 0).all())  # the first layer is one


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.1])
def test_bad_rates(tiny, rate: float) -> None:
    with pytest.raises(BoxcovError, match=f"dropout must lie between 0 and 1, got {rate}"):
        MCI(tiny, dropout=rate)


def test_drop_keeps_the_mean() -> None:
    x = drop(torch.ones(100_000), 0.3, torch.Generator().manual_seed(0))
    assert float(x.mean()) == pytest.approx(1, abs=0.01)
    assert float((x == 0).float().mean()) == pytest.approx(0.3, abs=0.01)


class Turning(NetDetector):
    """Reports a heading next to the cut at pi, so that samples fall on both sides."""

    box_fields = ("p", "yaw")

    def decode(self, raw: dict[str, Tensor], selection: Selection) -> Tensor:
        v = raw["map"][selection.where[0], :, selection.where[1]]
        return torch.stack([v[:, 0], torch.atan2(0.01 * v[:, 0], v[:, 1] * 0 - 1)], 1)


def test_headings_across_the_cut_have_small_variance() -> None:
    torch.manual_seed(0)
    detector = Turning(nn.Conv2d(2, 2, 3, padding=1))
    x = torch.randn(1, 2, 5, 5)
    boxes = detector.detect(x).boxes
    assert float(boxes[:, 1].abs().min()) > 3
    found = MCI(detector, dropout=0.5, samples=50)(x)
    assert float(found.std("yaw").max()) < 0.1
    assert bool(((found.field("yaw") - boxes[:, 1]).abs() < math.pi).all())


def test_finite_differences_wrap_headings() -> None:
    """The heading is at the cut: half of the steps cross it."""
    torch.manual_seed(0)
    detector = Turning(nn.Conv2d(2, 2, 3, padding=1)).double()
    with torch.no_grad():
        detector.net.weight[0], detector.net.bias[0] = 0, 0
    x = torch.randn(2, 2, 5, 5, dtype=torch.float64)
    assert torch.equal(
        detector.detect(x).boxes[:, 1].abs(), torch.full((8,), math.pi, dtype=torch.float64)
    )
    posterior = fit(
        detector, [(x, torch.randn(2, 2, 25, dtype=torch.float64))], n_data=50, prior_precision=1.0
    )
    found = MCGLM(detector, posterior, derivative="fd", epsilon=1e-6)(x)
    assert relative(found.covariance, MCGLM(detector, posterior)(x).covariance) < 1e-4
    assert bool((found.std("yaw") > 0).all())


def test_a_posterior_too_wide_for_averaging_warns(tiny, posterior, image) -> None:
    wide = posterior.with_prior(1e-6)
    with pytest.raises(BoxcovError, match=r"the covariance of .* boxes is not finite"):
        MCI(tiny, wide)(image)


def both_ways(make, image):
    """By instance, and over the whole map."""
    fast, whole = make(), make()
    fast(image)
    whole.router.instances_check.refuse()
    assert fast.router.route.head == "instances"
    assert not fast.router.needs_trunk()
    return fast(image), whole(image)


@pytest.mark.parametrize("score", [False, True])
def test_posterior_weights_by_instance_equal_the_whole_map(tiny, tight, image, score: bool) -> None:
    found, expected = both_ways(lambda: MCI(tiny, tight, samples=4, with_logit=score), image)
    assert torch.allclose(found.boxes, expected.boxes, atol=1e-4)
    assert relative(found.covariance, expected.covariance) < 1e-2
    if score:
        assert relative(found.score_variance, expected.score_variance) < 1e-2


def test_dropout_by_instance_has_the_same_moments(tiny, image) -> None:
    """With separate masks per box, mean and variance over many samples stay the same."""
    k = 150
    found, expected = both_ways(lambda: MCI(tiny, dropout=0.1, samples=k), image)
    std = [d.covariance.diagonal(dim1=1, dim2=2).sqrt() for d in (found, expected)]
    assert (
        float(((found.boxes - expected.boxes) / (std[1] * (2 / k) ** 0.5)).abs().max()) < 4.5
    )  # in standard errors of the difference
    assert float((std[0] / std[1]).log().abs().max()) < 0.4  # five standard errors
    assert (
        float((std[0] / std[1]).log().mean().abs()) < 0.1
    )  # none is shrunk: no pixel lost its mask, none has two


def test_dropout_below_the_head_runs_the_whole_map(tiny, image) -> None:
    model = MCI(tiny, dropout=0.1, samples=2, depth="backbone")
    model(image)
    assert model.router.route.head == "the whole network"
    assert model.router.needs_trunk()


class TwoLevels(Detector):
    """Boxes read the features of one of two levels, according to their input."""

    box_fields, classes = ("x", "y"), ("thing",)

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def parts(self):
        return {"head": self.head, "neck": (self.near, self.far)}

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        near, far = self.near(x).tanh(), self.far(x).tanh()
        return {"x": x, "near": near, "far": far, "boxes": self.head(near + far)}

    def select(self, raw: dict[str, Tensor]) -> Selection:
        zeros = torch.zeros(raw["x"].shape[1], dtype=torch.long)
        return Selection(zeros, zeros + 1.0, zeros, raw["x"][0, :, 0] > 0)

    def decode(self, raw: dict[str, Tensor], selection: Selection) -> Tensor:
        return self.head(torch.where(selection.where[:, None], raw["far"][0], raw["near"][0]))

    def instances(self, raw: dict[str, Tensor], selection: Selection):
        far = selection.where
        groups = [("near", (~far).nonzero()[:, 0]), ("far", far.nonzero()[:, 0])]
        return [(rows, lambda n=n, rows=rows: self.head(raw[n][0, rows])) for n, rows in groups]

    def loss(self, raw: dict[str, Tensor], targets: None) -> Tensor:
        return raw["boxes"].square().sum((1, 2))


def test_a_level_that_appears_later_counts() -> None:
    """Its features depend on chosen weights, those of the first frame's boxes do not."""
    torch.manual_seed(0)
    detector = TwoLevels().eval()
    near, far = (sign * torch.rand(1, 9, 4) for sign in (-1, 1))
    posterior = fit(detector, [(near, None), (far, None)], depth=["far", "head"])
    expected = MCI(detector, posterior)(far).covariance
    model = MCI(detector, posterior)
    model(near)
    assert model.router.route.head == "instances"
    assert torch.equal(model(far).covariance, expected)
    assert model.router.route.head == "the whole network"
