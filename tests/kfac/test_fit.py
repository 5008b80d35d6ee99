"""Kinds of Fisher, fractions of the data, precision and memory of a fit."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from boxcov import BoxcovError, BoxcovWarning, FitOptions, Posterior, fit
from boxcov.data import batched, shapes
from boxcov.detectors.tiny import TinyCenter
from helpers.nets import NetDetector, random_item, two_convolutions
from oracles.dense import relative


@pytest.fixture
def detector() -> NetDetector:
    return two_convolutions()


# kinds of Fisher


class Gaussian(NetDetector):
    """Squared error, the likelihood of a unit Gaussian, whose Fisher is known."""

    def loss(self, raw: dict[str, Tensor], targets: Tensor) -> Tensor:
        return 0.5 * (raw["map"] - targets).square().flatten(1).sum(1)

    def sample_targets(self, raw: dict[str, Tensor], generator: torch.Generator) -> Tensor:
        return raw["map"] + torch.randn(
            raw["map"].shape, generator=generator, dtype=raw["map"].dtype
        )


def test_mc_fisher_draws_targets_and_needs_no_labels() -> None:
    torch.manual_seed(0)
    detector = Gaussian(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))).double()
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


def test_mc_fisher_needs_sample_targets(detector: NetDetector) -> None:
    with pytest.raises(BoxcovError, match="NetDetector has no method sample_targets"):
        fit(detector, [(random_item()[0], None)], fisher="mc")


def test_identity_fisher_needs_no_loss(detector: NetDetector) -> None:
    posterior = fit(
        detector, [(random_item()[0], None)] * 7, fisher="identity", prior_precision=3.0
    )
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

    frames = Frames(random_item(1) for _ in range(40))
    posterior = fit(detector, frames, options=FitOptions(fraction=0.1, seed=1))
    assert (posterior.frames, posterior.n_data) == (4, 40)
    assert len(read) == 4  # the other frames are never read
    first, read[:] = list(read), []
    fit(detector, frames, options=FitOptions(fraction=0.1, seed=1))
    assert read == first
    read.clear()
    fit(detector, frames, options=FitOptions(fraction=0.1, seed=2))
    assert read != first


def test_fraction_of_a_stream(detector: NetDetector) -> None:
    posterior = fit(
        detector, (random_item(1) for _ in range(40)), options=FitOptions(fraction=0.25)
    )
    assert (posterior.frames, posterior.n_data) == (10, 40)


def test_default_device_does_not_matter(detector: NetDetector, tmp_path: Path) -> None:
    half, frames = FitOptions(fraction=0.5), [random_item(1) for _ in range(6)]
    expected = fit(detector, frames, options=half)
    expected.save(tmp_path / "p")
    with torch.device("meta"):  # stands for a GPU
        found = fit(detector, frames, options=half)
        loaded = Posterior.load(tmp_path / "p", detector)
    assert found.loss == loaded.loss == expected.loss


class Loader:
    """Has a length, but no indices, as torch's DataLoader."""

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[Any]:
        return (random_item(1) for _ in range(10))


def test_progress_ends_at_the_total_of_a_fraction(detector: NetDetector) -> None:
    reported: list[tuple[int, int | None]] = []
    fit(
        detector,
        Loader(),
        options=FitOptions(fraction=0.25),
        progress=lambda done, total: reported.append((done, total)),
    )
    assert reported == [(1, 3), (2, 3), (3, 3)]


def test_progress_is_reported(detector: NetDetector) -> None:
    reported = []
    fit(
        detector,
        [random_item(), random_item()],
        progress=lambda done, total: reported.append((done, total)),
    )
    fit(
        detector, iter([random_item()]), progress=lambda done, total: reported.append((done, total))
    )
    assert reported == [(1, 2), (2, 2), (1, None)]


# precision and memory


def test_half_precision_is_factored_in_float32(detector: NetDetector) -> None:
    x, y = random_item(8)
    full = fit(detector, [(x, y)])
    half = fit(detector.bfloat16(), [(x.bfloat16(), y.bfloat16())])
    for name, block in half.blocks.items():
        assert block.H.values.dtype == torch.float32
        assert relative(block.H.matrix, full.blocks[name].H.matrix) < 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_half_precision_detectors_are_not_in_half(dtype) -> None:
    """Compare with float64 sums over the same half precision inputs and gradients."""
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
    from boxcov.kfac.losses import FrameLosses, select_parameters

    class Tap(nn.Module):
        """Records the tensors without keeping them alive."""

        def forward(self, x: Tensor) -> Tensor:
            seen.append(weakref.ref(x))
            return x

    seen: list[weakref.ref[Tensor]] = []
    detector.net = nn.Sequential(
        Tap(), detector.net[0], Tap(), detector.net[1], Tap(), detector.net[2], Tap()
    )
    accumulator = Accumulator(FrameLosses(detector, select_parameters(detector, "head")))
    for batch in range(3):
        accumulator.add(accumulator.terms(*random_item(), batch))
        gc.collect()
        assert len(seen) == 4 * (batch + 1)
        assert not [number for number, tensor in enumerate(seen) if tensor() is not None]
    held = [sums.Q.numel() + sums.H.numel() for sums in accumulator.sums.values()]
    assert held == [19**2 + 3**2, 4**2 + 2**2]


def test_empty_frames_count() -> None:
    """A frame without objects has a loss, too."""
    frames = batched(shapes.frames(count=4, objects=0), 2)
    with pytest.warns(BoxcovWarning, match="zero gradient"):
        posterior = fit(TinyCenter(), frames)
    assert posterior.frames == 4
