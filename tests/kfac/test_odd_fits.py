"""Fits of unusual detectors and frames: the correct posterior or a clear error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from boxcov import BoxcovError, Checkpoint, FitOptions, Posterior, fit
from boxcov.data import batched
from helpers.nets import NetDetector
from helpers.odd_nets import double, item
from oracles.dense import relative


@pytest.fixture
def detector() -> NetDetector:
    return double(
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 2, 1))
    )


def same(a: Posterior, b: Posterior, tolerance: float = 1e-12) -> bool:
    assert a.blocks.keys() == b.blocks.keys()
    pairs = [(a.blocks[name], b.blocks[name]) for name in a.blocks]
    return all(
        relative(x.H.matrix, y.H.matrix) < tolerance
        and relative(x.Q.matrix, y.Q.matrix) < tolerance
        for x, y in pairs
    )


# grad modes


class Gated(nn.Module):
    """Enables gradients around one layer, in any outer grad mode."""

    def __init__(self, mode: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.a, self.b, self.mode = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 2, 1), mode

    def forward(self, x: Tensor) -> Tensor:
        with self.mode():
            x = self.a(x)
        return self.b(x.tanh())


class GatedTwice(Gated):
    """Calls the layer again without gradients; training treats that result as a constant."""

    def forward(self, x: Tensor) -> Tensor:
        with self.mode():
            y = self.a(x)
        with torch.no_grad():
            gate = self.a(x).sigmoid()
        return self.b((y * gate).tanh())


MODES = [
    pytest.param(torch.enable_grad, id="enable_grad"),
    pytest.param(partial(torch.set_grad_enabled, True), id="set_grad_enabled"),
]


@pytest.mark.parametrize("kind", [Gated, GatedTwice])
@pytest.mark.parametrize("mode", MODES)
def test_grad_modes_inside_forward_count_alike_in_every_batch(
    mode: Callable[[], Any], kind: type[Gated]
) -> None:
    detector = double(lambda: kind(mode))
    x, y = item(6)
    whole = fit(detector, [(x, y)])
    split = fit(detector, list(zip(x.split(2), y.split(2))))
    assert same(split, whole)


def test_a_gate_without_gradients_is_a_constant_as_in_training() -> None:
    detector = double(lambda: GatedTwice(torch.enable_grad))
    x, y = item(3)
    H = torch.zeros(3, 3, dtype=torch.float64)
    for i in range(3):  # the gradient per frame at the output of the call with gradients
        out = detector.net.a(x[i : i + 1]).detach().requires_grad_()
        raw = detector.net.b((out * out.detach().sigmoid()).tanh())
        detector.loss({"map": raw.flatten(2)}, y[i : i + 1]).sum().backward()
        d = out.grad.flatten(2)[0]
        H += d @ d.T / 3
    for frames in ([(x, y)], list(zip(x.split(1), y.split(1)))):
        assert relative(fit(detector, frames).blocks["net.a"].H.matrix[0], H) < 1e-12


@pytest.mark.parametrize("fisher", ["identity", "empirical"])
@pytest.mark.parametrize("enabled", [False, True])
def test_fit_leaves_the_grad_mode_as_it_was(
    detector: NetDetector, fisher: str, enabled: bool
) -> None:
    with torch.set_grad_enabled(enabled):
        fit(detector, [item()], fisher=fisher)
        assert torch.is_grad_enabled() == enabled


@pytest.mark.parametrize("fisher", ["identity", "empirical"])
def test_fit_inside_inference_mode_is_the_plain_fit(detector: NetDetector, fisher: str) -> None:
    plain = fit(detector, [item(), item(seed=1)], fisher=fisher)
    with torch.inference_mode():
        # the frames are inference tensors, too
        inside = fit(detector, [item(), item(seed=1)], fisher=fisher)
        assert torch.is_inference_mode_enabled()
    assert same(inside, plain)
    assert inside.loss == plain.loss
    block = inside.blocks["net.0"]
    assert not block.Q.vectors.is_inference()
    assert not block.H.values.is_inference()
    with torch.inference_mode():
        made = [item()]
    assert same(fit(detector, made), fit(detector, [item()]))


def test_second_pass_and_resumed_fit_inside_inference_mode(detector: NetDetector, tmp_path) -> None:
    frames, twice = [item(), item(seed=1)], FitOptions(ekfac=True)
    path = tmp_path / "fit"

    def stop(done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(detector, frames, options=twice, checkpoint=Checkpoint(path, 0), progress=stop)
    with torch.inference_mode():
        kept = Checkpoint(path, resume=True)
        inside = fit(detector, frames, options=twice, checkpoint=kept)
    eigenvalues = inside.blocks["net.0"].ekfac_eigenvalues
    plain = fit(detector, frames, options=twice).blocks["net.0"].ekfac_eigenvalues
    assert torch.equal(eigenvalues, plain)


# biases


class Scaled(nn.Module):
    """A bias that is also used as a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.d = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.d((self.c(x) * self.c.bias[:, None, None]).tanh())


class OneBias(Scaled):
    """A bias shared by two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.d.bias = self.c.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(x).tanh())


@pytest.mark.parametrize(
    ("kind", "depth"),
    [
        pytest.param(Scaled, "head", id="used elsewhere"),
        pytest.param(OneBias, ["net.c"], id="shared with a later layer outside"),
        pytest.param(OneBias, ["net.d"], id="shared with an earlier layer outside"),
    ],
)
def test_a_bias_with_another_use_is_refused(kind: type[nn.Module], depth: Any) -> None:
    with pytest.raises(BoxcovError, match=r"cannot be in a posterior: .*net\.[cd]\.bias"):
        fit(double(kind), [item()], depth=depth)


# number of frames


def test_identity_on_batches_counts_frames(detector: NetDetector) -> None:
    frames = [(item(1, seed)[0], None) for seed in range(40)]
    assert fit(detector, frames, fisher="identity").n_data == 40
    assert fit(detector, batched(frames, 8), fisher="identity").n_data == 40
    assert fit(detector, batched(frames[:37], 8), fisher="identity").n_data == 37


@pytest.mark.parametrize("seed", range(5))
def test_a_fraction_of_ragged_batches_keeps_the_number_of_frames(
    detector: NetDetector, seed: int
) -> None:
    """Nine frames in batches of 4, 4 and 1: any drawn batches represent nine frames."""
    posterior = fit(
        detector,
        batched([item(1, i) for i in range(9)], 4),
        options=FitOptions(fraction=0.34, seed=seed),
    )
    assert posterior.n_data == 9
    assert posterior.frames in (1, 4)


class InParts(NetDetector):
    """The inputs of a frame are an image and something else."""

    def forward(self, inputs: Any) -> dict[str, Tensor]:
        return super().forward(inputs["image"] if isinstance(inputs, dict) else inputs[0])


@pytest.mark.parametrize("fisher", ["identity", "empirical"])
def test_parts_of_an_input_are_not_frames(fisher: str) -> None:
    detector, (x, y) = double(nn.Conv2d(2, 2, 1), InParts), item(count=2)
    for inputs in ((x, x, x), {"camera": torch.eye(5), "image": x}):
        assert fit(detector, [(inputs, y)] * 4, fisher=fisher).n_data == 8


def test_identity_on_a_stream_needs_n_data(detector: NetDetector) -> None:
    def stream() -> Iterator[Any]:
        return ((item(1, seed)[0], None) for seed in range(3))

    with pytest.raises(BoxcovError, match="n_data"):
        fit(detector, stream(), fisher="identity")
    assert fit(detector, stream(), fisher="identity", n_data=3).n_data == 3


# non-finite numbers, and memory


@pytest.mark.parametrize("bad", [0, 1])
def test_an_infinite_pixel_names_its_batch(detector: NetDetector, bad: int) -> None:
    frames = [item(1, 0), item(1, 1), item(1, 2)]
    frames[bad][0][0, 0, 2, 2] = inf  # tanh maps it to 1
    raw = detector(frames[bad][0])
    assert bool(detector.loss(raw, frames[bad][1]).isfinite().all())
    with pytest.raises(BoxcovError, match=rf"item {bad}\b"):
        fit(detector, frames)


class Exploding(nn.Module):
    """Overflows inside for a large finite input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 3, 1), nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x.exp()).tanh())


@pytest.mark.parametrize("bad", [0, 1])
def test_an_infinite_activation_names_its_batch_and_layer(bad: int) -> None:
    detector = double(Exploding)
    frames = [item(1, 0), item(1, 1), item(1, 2)]
    frames[bad][0][0, 0, 2, 2] = 1e4
    assert bool(detector.loss(detector(frames[bad][0]), frames[bad][1]).isfinite().all())
    with pytest.raises(BoxcovError, match=rf"item {bad}\b.*net\.first"):
        fit(detector, frames)


class OutOfMemory(NetDetector):
    def loss(self, raw: dict[str, Tensor], targets: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")


def test_running_out_of_memory_is_not_taken_for_bad_targets() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 20 GiB"):
        fit(double(lambda: nn.Conv2d(2, 2, 1), OutOfMemory), [item()])


class Normalising(NetDetector):
    """Normalises its input in place."""

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        return super().forward(inputs.sub_(0.7).div_(0.5))


def test_an_in_place_forward_leaves_the_frames_unchanged() -> None:
    detector, frames = (
        double(lambda: nn.Conv2d(2, 2, 3, padding=1), Normalising),
        [item(), item(seed=1)],
    )
    before = [x.clone() for x, _ in frames]
    first = fit(detector, frames)
    assert all(torch.equal(x, y) for (x, _), y in zip(frames, before))
    assert same(fit(detector, frames), first)


# choice of layers


class NormedConv(nn.Conv2d):
    """Not a norm layer, despite its name."""


def test_a_convolution_with_norm_in_its_name_is_in_the_posterior() -> None:
    net = nn.Sequential(
        nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), NormedConv(3, 2, 1), nn.GroupNorm(1, 2)
    )
    assert set(fit(double(net), [item()]).blocks) == {"net.0", "net.2"}


# layers without locations


class Proposals(NetDetector):
    """A second stage on the cells above a threshold: a frame may have none."""

    threshold = 1.0

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        features = self.net["conv"](inputs)
        frame, row, column = (inputs[:, 0] > self.threshold).nonzero(as_tuple=True)
        return {
            "map": features.flatten(2),
            "frame": frame,
            "second": self.second(features, frame, row, column),
        }

    def second(self, features: Tensor, frame: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return self.net["second"](features[frame, :, row, column])

    def loss(self, raw: dict[str, Tensor], targets: Tensor) -> Tensor:
        first = super().loss(raw, targets)
        return first.index_add(0, raw["frame"], raw["second"].square().sum(1))


class ConvolvedProposals(Proposals):
    """The second stage is a convolution over the crop of each proposal."""

    def second(self, features: Tensor, frame: Tensor, row: Tensor, column: Tensor) -> Tensor:
        # (B, C, h, w, 3, 3)
        crops = nn.functional.pad(features, (1, 1, 1, 1)).unfold(2, 3, 1).unfold(3, 3, 1)
        return self.net["second"](crops[frame, :, row, column]).flatten(1)


SECOND = {Proposals: lambda: nn.Linear(2, 2), ConvolvedProposals: lambda: nn.Conv2d(2, 2, 3)}


def proposals(kind: type[Proposals]) -> NetDetector:
    return double(
        lambda: nn.ModuleDict({"conv": nn.Conv2d(2, 2, 3, padding=1), "second": SECOND[kind]()}),
        kind,
    )


@pytest.mark.parametrize(
    "order", [[0, 1, 2], [1, 0, 2], [1, 2, 0]], ids=["first", "second", "last"]
)
@pytest.mark.parametrize("kind", SECOND)
def test_a_batch_without_proposals_counts_as_a_batch(
    kind: type[Proposals], order: list[int]
) -> None:
    detector = proposals(kind)
    frames = [item(1, seed) for seed in range(3)]
    frames[0] = (frames[0][0].clamp(max=0.9), frames[0][1])
    assert [len(detector(x)["frame"]) > 0 for x, _ in frames] == [False, True, True]
    whole = fit(detector, [tuple(torch.cat(part) for part in zip(*frames))])
    split = fit(detector, [frames[i] for i in order])
    assert same(split, whole)
    assert split.n_data == 3


@pytest.mark.parametrize("kind", SECOND)
def test_a_layer_that_never_sees_a_location_is_named(kind: type[Proposals]) -> None:
    detector = proposals(kind)
    frames = [(x.clamp(max=0.9), y) for x, y in (item(1), item(1, 1))]
    with pytest.raises(BoxcovError, match=r"net\.second"):
        fit(detector, frames)
    assert set(fit(detector, frames, options=FitOptions(exclude=["net.second"])).blocks) == {
        "net.conv"
    }
