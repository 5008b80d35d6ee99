from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from boxcov import BoxcovError, BoxcovWarning, FitOptions, fit
from boxcov.data import batched, shapes
from boxcov.detectors.tiny import TinyCenter
from helpers.nets import NetDetector
from oracles.dense import relative


@pytest.fixture
def detector() -> NetDetector:
    torch.manual_seed(0)
    return NetDetector(nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 2, 1)))


def item(count: int = 2) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 2, 5, 5), torch.randn(count, 2, 25)


# what is in the posterior


def test_depth_names_parts_or_modules() -> None:
    detector, frames = TinyCenter(), shapes.frames(count=2)
    head, neck, backbone = (
        set(fit(detector, frames, depth=depth).blocks) for depth in ("head", "neck", "backbone")
    )
    assert head < neck < backbone
    assert neck - head == {"lateral.0", "up.0"}
    assert set(fit(detector, frames, depth=["up", "head.shared"]).blocks) == {
        "up.0",
        "head.shared.0",
    }


def test_unknown_depth_and_modules_are_named() -> None:
    with pytest.raises(
        BoxcovError, match="'tail' is not a part of this detector: it has head, neck, backbone"
    ):
        fit(TinyCenter(), shapes.frames(count=1), depth="tail")
    with pytest.raises(BoxcovError, match=r"module 'head\.share'.*did you mean head"):
        fit(TinyCenter(), shapes.frames(count=1), depth=["head.share"])


def test_layers_that_read_the_same_tensor_share_one_factor() -> None:
    posterior = fit(TinyCenter(), shapes.frames(count=2))
    first = [
        posterior.blocks[f"head.branches.{name}.0"].Q
        for name in ("heatmap", "offset", "size", "rot")
    ]
    assert all(Q is first[0] for Q in first)


class Unfactored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.scale, self.norm = (
            nn.Conv2d(2, 2, 3, padding=1),
            nn.Parameter(torch.ones(2, 1, 1)),
            nn.BatchNorm2d(2),
        )
        self.act = nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(x)) * self.scale)


def test_what_cannot_be_factored_is_named_in_one_error_with_the_way_out() -> None:
    detector = NetDetector(Unfactored())
    with pytest.raises(
        BoxcovError,
        match=r"cannot be factored: net\.scale, net\.act\.weight .*exclude=\['net', 'net\.act'\]",
    ):
        fit(detector, [item()])
    assert set(fit(detector, [item()], depth=["net.conv"]).blocks) == {"net.conv"}


def test_fixed_modules_are_constants() -> None:
    detector = NetDetector(nn.Sequential(nn.Conv2d(2, 2, 1), nn.PReLU(), nn.Conv2d(2, 2, 1)))
    assert set(fit(detector, [item()], options=FitOptions(exclude=["net.1"])).blocks) == {
        "net.0",
        "net.2",
    }


class Embedding(nn.Module):
    """A weight that is used as a matrix, and in another way as well, as a tied embedding is."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x + self.conv.weight.sum())


def test_a_weight_with_a_hidden_use_is_refused() -> None:
    detector = NetDetector(Embedding())
    with pytest.raises(BoxcovError, match=r"cannot be factored: net\.conv\.weight"):
        fit(detector, [item()])
    detector.requires_grad_(False)  # a frozen detector hides it no better
    with pytest.raises(BoxcovError, match=r"cannot be factored: net\.conv\.weight"):
        fit(detector, [item()])


class Weighed(NetDetector):
    """Its loss weighs the outputs: the gradient of a bias is the sum of the weights."""

    def loss(self, raw: dict[str, Tensor], targets: Tensor) -> Tensor:
        return (raw["map"] * targets).sum((1, 2))


@pytest.mark.parametrize("seed", range(8))
def test_gradients_that_cancel_are_no_hidden_use(seed) -> None:
    """Of a sum that is zero but for rounding, two ways of summing agree in nothing."""
    torch.manual_seed(seed)
    targets = torch.randn(2, 2, 25)
    targets[1] = 0.3 - targets[0].flip(1)
    targets -= targets.sum((0, 2), keepdim=True) / 50
    fit(Weighed(nn.Conv2d(2, 2, 3, padding=1)), [(torch.rand(2, 2, 5, 5), targets)])


class TwoBiases(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)).transpose(1, 2)


def test_one_weight_with_two_biases_is_refused() -> None:
    with pytest.raises(
        BoxcovError,
        match=r"net\.a\.weight is used with the bias net\.a\.bias and with the bias net\.b\.bias",
    ):
        fit(NetDetector(TwoBiases()), [(torch.randn(1, 3, 2), torch.randn(1, 2, 3))])


def test_a_frozen_detector_gives_the_same_posterior(detector: NetDetector) -> None:
    data = item()
    before = fit(detector, [data])
    detector.requires_grad_(False)
    after = fit(detector, [data])
    assert all(
        torch.equal(after.blocks[name].H.values, block.H.values)
        for name, block in before.blocks.items()
    )
    assert not any(p.requires_grad for p in detector.parameters())


# kinds of Fisher


class Drawn(NetDetector):
    """Squared error, a unit Gaussian likelihood: the Fisher's expectation over targets is known."""

    def loss(self, raw: dict[str, Tensor], targets: Tensor) -> Tensor:
        return 0.5 * (raw["map"] - targets).square().flatten(1).sum(1)

    def sample_targets(self, raw: dict[str, Tensor], generator: torch.Generator) -> Tensor:
        return raw["map"] + torch.randn(
            raw["map"].shape, generator=generator, dtype=raw["map"].dtype
        )


def test_mc_fisher_draws_targets_and_needs_no_labels() -> None:
    torch.manual_seed(0)
    detector = Drawn(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))).double()
    x = torch.randn(4000, 3, dtype=torch.float64)
    posterior = fit(detector, [(x, None)], options=FitOptions(seed=3), fisher="mc")
    upper = detector.net[1].weight.detach()
    assert relative(posterior.blocks["net.1"].H.matrix[0], torch.eye(2, dtype=torch.float64)) < 0.06
    assert relative(posterior.blocks["net.0"].H.matrix[0], upper.T @ upper) < 0.06
    again = fit(detector, [(x, None)], options=FitOptions(seed=3), fisher="mc")
    other = fit(detector, [(x, None)], options=FitOptions(seed=4), fisher="mc")
    assert torch.equal(again.blocks["net.0"].H.values, posterior.blocks["net.0"].H.values)
    assert not torch.equal(other.blocks["net.0"].H.values, posterior.blocks["net.0"].H.values)


def test_mc_fisher_of_the_reference_detector(tiny: TinyCenter, train_frames: list) -> None:
    posterior = fit(tiny, [(inputs, None) for inputs, _ in train_frames[:10]], fisher="mc")
    assert all(bool(block.H.values.sum() > 0) for block in posterior.blocks.values())


def test_mc_fisher_of_a_detector_that_does_not_say_how(detector: NetDetector) -> None:
    with pytest.raises(BoxcovError, match="NetDetector has no method sample_targets"):
        fit(detector, [(item()[0], None)], fisher="mc")


def test_identity_fisher_needs_no_loss(detector: NetDetector) -> None:
    posterior = fit(detector, [(item()[0], None)] * 7, fisher="identity", prior_precision=3.0)
    assert posterior.n_data == 14  # seven items of two frames
    for name in posterior.blocks:
        assert torch.allclose(posterior.variances(name), torch.tensor(1 / 17.0))


# a share of the data


def test_fraction_takes_a_seeded_share_and_keeps_n(detector: NetDetector) -> None:
    read = []

    class Frames(list):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    frames = Frames(item(1) for _ in range(40))
    posterior = fit(detector, frames, options=FitOptions(fraction=0.1, seed=1))
    assert (posterior.frames, posterior.n_data) == (4, 40)
    assert len(read) == 4  # the others are never read
    first, read[:] = list(read), []
    fit(detector, frames, options=FitOptions(fraction=0.1, seed=1))
    assert read == first
    read.clear()
    fit(detector, frames, options=FitOptions(fraction=0.1, seed=2))
    assert read != first


def test_fraction_of_a_stream(detector: NetDetector) -> None:
    posterior = fit(detector, (item(1) for _ in range(40)), options=FitOptions(fraction=0.25))
    assert (posterior.frames, posterior.n_data) == (10, 40)


def test_progress_is_told(detector: NetDetector) -> None:
    told = []
    fit(detector, [item(), item()], progress=lambda done, total: told.append((done, total)))
    fit(detector, iter([item()]), progress=lambda done, total: told.append((done, total)))
    assert told == [(1, 2), (2, 2), (1, None)]


# bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"form": "dense"}, "form must be one of eigen, paper, got 'dense'"),
        ({"fraction": 0.0}, "fraction must be above 0 and at most 1, got 0.0"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    with pytest.raises(BoxcovError, match=message):
        FitOptions(**options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fisher": "true"}, "fisher must be one of empirical, mc, identity, got 'true'"),
        ({"prior_precision": -1.0}, "prior_precision must be at least 0 and finite, got -1.0"),
        (
            {"prior_precision": float("nan")},
            "prior_precision must be at least 0 and finite, got nan",
        ),
        ({"n_data": 0}, "n_data must be above 0 and finite, got 0"),
        (
            {"prior_precision": 0.0},
            r"rank-deficient \(net\.0: Q has rank \d+ of 19.*prior_precision above 0",
        ),
        (
            {"options": FitOptions(form="paper", jitter=0.0)},
            "a jitter of 0.0 does not change that",
        ),
    ],
)
def test_bad_arguments(detector: NetDetector, arguments: dict, message: str) -> None:
    with pytest.raises(BoxcovError, match=message):
        fit(detector, [(torch.randn(1, 2, 2, 2), torch.randn(1, 2, 4))], **arguments)


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([], "the data set is empty"),
        ([torch.randn(1, 2, 5, 5)], "item 0 is a Tensor"),
        (
            [item(), (torch.full((1, 2, 5, 5), float("nan")), torch.randn(1, 2, 25))],
            "inputs of batch 1 holds 50 NaN or infinite values of 50",
        ),
        (
            [(torch.randn(1, 2, 5, 5), torch.randn(1, 2, 7))],
            "the targets of batch 0 do not fit the detector: RuntimeError",
        ),
        (
            [(torch.randn(1, 2, 5, 5), None)],
            "the targets of batch 0 do not fit the detector: TypeError",
        ),
    ],
    ids=["empty", "no pair", "nan", "shape", "none"],
)
def test_bad_frames(detector: NetDetector, frames: list, message: str) -> None:
    with pytest.raises(BoxcovError, match=message):
        fit(detector, frames)


def test_targets_for_another_number_of_frames() -> None:
    inputs, targets = shapes.frames(count=1)[0]
    with pytest.raises(BoxcovError, match="1 frames in the batch, but targets for 2"):
        fit(TinyCenter(), [(inputs, targets * 2)])


def test_nan_weights_are_named(detector: NetDetector) -> None:
    detector.net[2].weight.data[0, 0] = float("inf")
    with pytest.raises(BoxcovError, match=r"net\.2\.weight \(1 of 6 values\)"):
        fit(detector, [item()])


class Mean(NetDetector):
    def loss(self, raw: dict[str, Tensor], targets: Tensor) -> Tensor:
        return super().loss(raw, targets).mean()


class Detached(NetDetector):
    def loss(self, raw: dict[str, Tensor], targets: Tensor) -> Tensor:
        return super().loss({"map": raw["map"].detach()}, targets)


class FirstChannel(NetDetector):
    def loss(self, raw: dict[str, Tensor], targets: Tensor) -> Tensor:
        return 0 * raw["map"].sum((1, 2)) + 0 * targets.sum((1, 2))


def test_losses_that_teach_nothing() -> None:
    net = nn.Conv2d(2, 2, 1)
    with pytest.raises(BoxcovError, match=r"one value per frame, shape \(B,\), got \(\)"):
        fit(Mean(net), [item()])
    with pytest.raises(BoxcovError, match="no gradient for any chosen layer"):
        fit(Detached(net), [item()])
    with pytest.warns(
        BoxcovWarning, match=r"zero gradient for net\.weight: the posterior there is the prior"
    ):
        fit(FirstChannel(net), [item()])


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        self.idle(x)
        return self.used(x)


def test_a_layer_that_the_loss_does_not_reach_is_named() -> None:
    with pytest.raises(
        BoxcovError, match=r"no gradient for net\.idle\.weight.*exclude=\['net\.idle'\]"
    ):
        fit(NetDetector(Unused()), [item()])
    assert set(
        fit(NetDetector(Unused()), [item()], options=FitOptions(exclude=["net.idle"])).blocks
    ) == {"net.used"}


def test_half_precision_is_factored_in_float32() -> None:
    torch.manual_seed(0)
    detector = NetDetector(
        nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 2, 1))
    )
    x, y = item(8)
    full = fit(detector, [(x, y)])
    half = fit(detector.bfloat16(), [(x.bfloat16(), y.bfloat16())])
    for name, block in half.blocks.items():
        assert block.H.values.dtype == torch.float32
        assert relative(block.H.matrix, full.blocks[name].H.matrix) < 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_sums_of_a_half_precision_detector_are_not_rounded_to_it(dtype) -> None:
    """Against the same squares in float64, of inputs and gradients that are the detector's own."""
    torch.manual_seed(0)
    detector = NetDetector(nn.Conv2d(2, 3, 1, bias=False)).to(dtype)
    x, y = torch.randn(8, 2, 5, 5).to(dtype), torch.randn(8, 3, 25).to(dtype)
    block = fit(detector, [(x, y)]).blocks["net"]
    raw = detector(x)
    (d,) = torch.autograd.grad(detector.loss(raw, y).sum(), raw["map"])
    a, d = x.flatten(2).double(), d.double()
    assert relative(block.Q.matrix[0].double(), torch.einsum("bit,bjt->ij", a, a) / (8 * 25)) < 1e-5
    assert relative(block.H.matrix[0].double(), torch.einsum("bit,bjt->ij", d, d) / 8) < 1e-5


def test_memory_does_not_grow_with_the_number_of_frames(detector: NetDetector) -> None:
    from boxcov.kfac.accumulate import Accumulator
    from boxcov.kfac.losses import FrameLosses
    from boxcov.kfac.subset import select_parameters

    class Tap(nn.Module):
        """Sees the tensors that pass without holding them."""

        def forward(self, x: Tensor) -> Tensor:
            seen.append(weakref.ref(x))
            return x

    seen: list[weakref.ref[Tensor]] = []
    detector.net = nn.Sequential(
        Tap(), detector.net[0], Tap(), detector.net[1], Tap(), detector.net[2], Tap()
    )
    accumulator = Accumulator(FrameLosses(detector, select_parameters(detector, "head")))
    for batch in range(3):
        accumulator.add(*item(), batch)
        gc.collect()
        assert len(seen) == 4 * (batch + 1)
        assert not [number for number, tensor in enumerate(seen) if tensor() is not None]
    held = [sums.Q.numel() + sums.H.numel() for sums in accumulator.sums.values()]
    assert held == [19**2 + 3**2, 4**2 + 2**2]


def test_empty_frames_count() -> None:
    """A frame without objects has a loss, too: it teaches where there is nothing."""
    frames = batched(shapes.frames(count=4, objects=0), 2)
    with pytest.warns(BoxcovWarning, match="zero gradient"):
        posterior = fit(TinyCenter(), frames)
    assert posterior.frames == 4


class PerLocation(NetDetector):
    """Forgets to sum over the locations of a frame."""

    def loss(self, raw: dict[str, Tensor], targets: Tensor) -> Tensor:
        return (raw["map"] - targets).square().sum(1).flatten()


@pytest.mark.parametrize("in_dict", [False, True])
def test_a_loss_of_more_values_than_frames_is_refused(detector: NetDetector, in_dict: bool) -> None:
    inputs, targets = item(3)
    frames = [({"image": inputs}, targets) if in_dict else (inputs, targets)]
    wrong = PerLocation(_FromDict(detector.net) if in_dict else detector.net)
    with pytest.raises(
        BoxcovError,
        match=r"loss\(\) returned 75 values for batch 0, which has 3 frames: return the sum over each frame",
    ):
        fit(wrong, frames)


class _FromDict(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        out: Tensor = self.net(inputs["image"])
        return out
