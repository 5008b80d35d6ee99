from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from boxcov import GLM, MCGLM, BoxcovError, Detector, ExactGLM, Selection, fit
from boxcov.detectors.tiny import TinyCenter
from boxcov.posterior import kronecker_block as contract
from boxcov.predict.route import instances
from oracles.dense import relative


def test_equals_glm_in_float32(tiny, posterior, image) -> None:
    assert (
        relative(
            ExactGLM(tiny, posterior)(image).covariance, GLM(tiny, posterior)(image).covariance
        )
        < 1e-5
    )


def test_equals_glm_under_the_papers_posterior(tiny, posterior, image) -> None:
    paper = posterior.paper(jitter=1e-3)
    assert (
        relative(ExactGLM(tiny, paper)(image).covariance, GLM(tiny, paper)(image).covariance) < 1e-4
    )


@pytest.mark.parametrize("boxes", [1, 50, 500])
def test_any_number_of_boxes(tiny, posterior, image, boxes: int) -> None:
    tiny = _reporting(tiny, boxes)
    found = ExactGLM(tiny, posterior)(image)
    assert len(found) == boxes
    reference = (
        GLM(tiny, posterior)(image) if boxes < 100 else MCGLM(tiny, posterior, samples=500)(image)
    )
    assert relative(found.covariance, reference.covariance) < (1e-5 if boxes < 100 else 0.2)
    eigenvalues = torch.linalg.eigvalsh(found.covariance.double())
    assert bool((eigenvalues >= -1e-6 * eigenvalues.amax(1, keepdim=True)).all())


class Many(TinyCenter):
    """Reports the best cells whatever their score, so any number of boxes."""

    count: int

    def select(self, raw: dict[str, Tensor]) -> Selection:
        heat = raw["heatmap"].sigmoid().amax(1)
        scores, cells = heat.flatten(1).topk(self.count)
        frame = torch.arange(len(heat)).repeat_interleave(self.count)
        cells = cells.flatten()
        where = (frame, cells // heat.shape[2], cells % heat.shape[2])
        return Selection(frame, scores.flatten(), torch.zeros_like(frame), where)


def _reporting(tiny: TinyCenter, count: int) -> Many:
    detector = Many()
    detector.load_state_dict(tiny.state_dict())
    detector.count = count
    return detector.eval()


def test_a_batch_of_frames_equals_single_frames(tiny, posterior, train_frames) -> None:
    images = [train_frames[i][0] for i in range(3)]
    model = ExactGLM(tiny, posterior)
    together = model(torch.cat(images)).frames(3)
    for found, image in zip(together, images):
        alone = model(image)
        assert relative(found.covariance, alone.covariance) < 1e-4
        assert torch.allclose(found.boxes, alone.boxes, atol=1e-4)


# exact head, Monte-Carlo rest


@pytest.fixture(scope="module")
def deep(tiny, train_frames):
    return fit(tiny, train_frames[:40], depth="backbone", n_data=2000, prior_precision=1.0)


def test_exact_head_and_sampled_rest_have_less_noise(tiny, deep, image) -> None:
    exact = ExactGLM(tiny, deep)(image).covariance
    errors = {"mixed": [], "all": []}
    for seed in range(6):
        errors["mixed"].append(
            relative(ExactGLM(tiny, deep, samples=10, seed=seed)(image).covariance, exact)
        )
        errors["all"].append(
            relative(MCGLM(tiny, deep, samples=10, seed=seed)(image).covariance, exact)
        )
    mixed, everything = (
        torch.tensor(errors[name]).square().mean().sqrt() for name in ("mixed", "all")
    )
    assert mixed < everything
    mean = torch.stack(
        [ExactGLM(tiny, deep, samples=100, seed=s)(image).covariance for s in range(5)]
    ).mean(0)
    assert relative(mean, exact) < 0.1


def test_deep_exact_equals_glm(tiny, deep, image) -> None:
    assert (
        relative(ExactGLM(tiny, deep)(image).covariance, GLM(tiny, deep)(image).covariance) < 1e-4
    )


def test_the_first_frame_takes_two_gradients(tiny, posterior, image, monkeypatch) -> None:
    """Of decode() and of instances(): one for each raw output took longer than the rest."""
    taken: list[Tensor] = []
    gradients = instances._gradients
    monkeypatch.setattr(
        instances, "_gradients", lambda *values: taken.append(values[0]) or gradients(*values)
    )
    assert len(ExactGLM(tiny, posterior)(image)) > 0
    assert len(taken) == 2


# detectors whose instances() is wrong, or absent


class SmallCrop(TinyCenter):
    def instances(self, raw, selection, with_logit=False):
        features = raw["features"]
        blurred = {**raw, "features": nn.functional.avg_pool2d(features, 3, 1, 1)}
        return super().instances(blurred, selection, with_logit)


class Detour(TinyCenter):
    """The right boxes, but gradients that miss part of the receptive field."""

    def instances(self, raw, selection, with_logit=False):
        (index, run), *_ = super().instances(raw, selection, with_logit)
        decoded = self.decode(raw, selection).detach()

        def other() -> Tensor:
            return decoded + 0.5 * (run() - decoded)

        return [(index, other)]


class Incomplete(TinyCenter):
    def instances(self, raw, selection, with_logit=False):
        (index, run), *_ = super().instances(raw, selection, with_logit)
        return [(index[1:], lambda: run()[1:])]


class Mixed(TinyCenter):
    """Runs two items of the batch per instance."""

    def instances(self, raw, selection, with_logit=False):
        (index, _), *_ = super().instances(raw, selection, with_logit)
        twice = Selection(
            *(torch.cat([t, t]) for t in (selection.frame, selection.scores, selection.labels)),
            tuple(torch.cat([t, t]) for t in selection.where),
        )
        (_, run), *_ = super().instances(raw, twice, with_logit)
        return [(index, lambda: run()[: len(index)])]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (SmallCrop, r"SmallCrop\.instances\(\) gives box \d+ as"),
        (Detour, r"Detour\.instances\(\) gives other gradients than decode\(\) for head\.shared"),
        (Incomplete, r"must give each of the \d+ instances once"),
        (Mixed, r"items for \d+ instances: every layer must see each instance as one item"),
    ],
)
def test_instances_that_contradict_decode_are_refused(
    tiny, posterior, image, kind: type[TinyCenter], message: str
) -> None:
    wrong = kind()
    wrong.load_state_dict(tiny.state_dict())
    with pytest.raises(BoxcovError, match=message):
        ExactGLM(wrong.eval(), posterior)(image)


class Without(TinyCenter):
    def instances(self, raw, selection, with_logit=False):
        return None


def test_a_detector_without_instances_is_supported(tiny, posterior, image) -> None:
    other = Without()
    other.load_state_dict(tiny.state_dict())
    assert (
        relative(
            ExactGLM(other.eval(), posterior)(image).covariance,
            ExactGLM(tiny, posterior)(image).covariance,
        )
        < 1e-5
    )


class Queries(Detector):
    """Queries as instances: a linear head on tokens, in two groups by class."""

    box_fields = ("x", "y")
    classes = ("a", "b")

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(3, 4), nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        tokens = self.body(inputs).tanh()
        return {
            "tokens": tokens,
            "boxes": torch.stack([head(tokens) for head in self.heads], 2),
        }  # (B, T, 2, 2)

    def select(self, raw: dict[str, Tensor]) -> Selection:
        frame, token = torch.ones(raw["tokens"].shape[:2]).nonzero(as_tuple=True)
        return Selection(frame, torch.ones(len(frame)), token % 2, (frame, token))

    def decode(self, raw: dict[str, Tensor], selection: Selection) -> Tensor:
        frame, token = selection.where
        return raw["boxes"][frame, token, selection.labels].exp()

    def instances(self, raw: dict[str, Tensor], selection: Selection, with_logit: bool = False):
        frame, token = selection.where
        for label, head in enumerate(self.heads):
            index = (selection.labels == label).nonzero()[:, 0]
            yield (
                index,
                lambda head=head, index=index: head(
                    raw["tokens"][frame[index], token[index]]
                ).exp(),
            )

    def loss(self, raw: dict[str, Tensor], targets: Tensor) -> Tensor:
        return (raw["boxes"] - targets).square().flatten(1).sum(1)

    def parts(self):
        return {"head": self.heads, "backbone": self.body}


@pytest.mark.parametrize("depth", ["head", "backbone"])
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(batch=st.integers(1, 3), tokens=st.integers(1, 6))
def test_groups_of_instances(depth: str, batch: int, tokens: int) -> None:
    torch.manual_seed(0)
    detector = Queries().double()
    x, y = torch.randn(6, 5, 3, dtype=torch.float64), torch.randn(6, 5, 2, 2, dtype=torch.float64)
    posterior = fit(detector, [(x, y)], depth=depth, prior_precision=1.0)
    inputs = torch.randn(batch, tokens, 3, dtype=torch.float64)
    exact, glm = ExactGLM(detector, posterior)(inputs), GLM(detector, posterior)(inputs)
    assert len(exact) == batch * tokens
    assert relative(exact.covariance, glm.covariance) < 1e-10


# the contraction


@settings(max_examples=40, deadline=None)
@given(
    g=st.integers(1, 4),
    groups=st.integers(1, 3),
    n_in=st.integers(1, 6),
    n_out=st.integers(1, 4),
    D=st.integers(1, 5),
    T=st.integers(1, 12),
)
def test_both_contractions_equal_the_sum_of_the_definition(
    g: int, groups: int, n_in: int, n_out: int, D: int, T: int
) -> None:
    torch.manual_seed(0)
    alpha = torch.randn(g, groups, n_in, T, dtype=torch.float64)
    delta = torch.randn(D, g, groups, n_out, T, dtype=torch.float64)
    v = torch.rand(groups, n_out, n_in, dtype=torch.float64)
    G = torch.einsum("jngpt,ngqt->jngpq", delta, alpha)
    expected = torch.einsum("gpq,jngpq,kngpq->njk", v, G, G)
    assert torch.allclose(contract._by_gradients(alpha, delta, v), expected)
    assert torch.allclose(contract._by_pairs(alpha, delta, v), expected)


def test_memory_is_bounded_by_chunks(tiny, posterior, image, monkeypatch) -> None:
    whole = ExactGLM(tiny, posterior)(image).covariance
    seen = []
    for name in ("_by_gradients", "_by_pairs"):
        original = getattr(contract, name)
        monkeypatch.setattr(
            contract, name, lambda a, d, v, f=original: seen.append(len(a)) or f(a, d, v)
        )
    monkeypatch.setattr(contract, "CACHE", 1)
    assert relative(ExactGLM(tiny, posterior)(image).covariance, whole) < 1e-5
    assert set(seen) == {1}
