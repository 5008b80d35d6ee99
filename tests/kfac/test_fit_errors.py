"""Bad options, arguments, frames and losses of a fit raise clear errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from boxcov import BoxcovError, BoxcovWarning, FitOptions, fit
from boxcov.data import shapes
from boxcov.detectors.tiny import TinyCenter
from boxcov.kfac.checkpoint import Checkpoint
from helpers.nets import NetDetector, random_item, two_convolutions


@pytest.fixture
def detector() -> NetDetector:
    return two_convolutions()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"form": "dense"}, "form must be one of eigen, paper, got 'dense'"),
        ({"fraction": 0.0}, "fraction must be above 0 and at most 1, got 0.0"),
        ({"fraction": "0.5"}, "fraction must be a number, got '0.5'"),
        ({"fraction": True}, "fraction must be a number, got True"),
        ({"jitter": None}, "jitter must be a number, got None"),
        ({"ekfac": "no"}, "ekfac must be True or False, got 'no'"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    with pytest.raises(BoxcovError, match=message):
        FitOptions(**options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"options": {"ekfac": True}}, "options must be a FitOptions, got {.*}: see boxcov"),
        ({"fisher": "true"}, "fisher must be one of empirical, mc, identity, got 'true'"),
        ({"prior_precision": -1.0}, "prior_precision must lie between .*, got -1.0"),
        (
            {"prior_precision": float("nan")},
            "prior_precision must lie between .*, got nan",
        ),
        ({"n_data": 0}, "n_data must be above 0 and at most 1e15, got 0"),
        ({"prior_precision": 0.0}, "prior_precision must lie between .*, got 0.0"),
        ({"options": FitOptions(form="paper", jitter=0.0)}, "jitter must be above 0, got 0.0"),
    ],
)
def test_bad_arguments(detector: NetDetector, arguments: dict, message: str) -> None:
    with pytest.raises(BoxcovError, match=message):
        fit(detector, [(torch.randn(1, 2, 2, 2), torch.randn(1, 2, 4))], **arguments)


@pytest.mark.parametrize("arguments", [{"n_data": -5}, {"prior_precision": -1.0}])
def test_bad_numbers_are_refused_before_a_frame_is_read(
    detector: NetDetector, arguments: dict, tmp_path: Path
) -> None:
    class Unread(list):
        def __getitem__(self, index: int) -> None:
            raise AssertionError("a frame was read")

        __iter__ = __getitem__

    with pytest.raises(BoxcovError):
        fit(detector, Unread([1]), checkpoint=Checkpoint(tmp_path / "c"), **arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([], "the data set is empty"),
        ([torch.randn(1, 2, 5, 5)], "item 0 is a Tensor"),
        (
            [random_item(), (torch.full((1, 2, 5, 5), float("nan")), torch.randn(1, 2, 25))],
            "inputs of item 1 holds 50 NaN or infinite values of 50",
        ),
        (
            [(torch.randn(1, 2, 5, 5), torch.randn(1, 2, 7))],
            "the targets of item 0 do not fit the detector: RuntimeError",
        ),
        (
            [(torch.randn(1, 2, 5, 5), None)],
            "the targets of item 0 do not fit the detector: TypeError",
        ),
    ],
    ids=["empty", "no pair", "nan", "shape", "none"],
)
def test_bad_frames(detector: NetDetector, frames: list, message: str) -> None:
    with pytest.raises(BoxcovError, match=message):
        fit(detector, frames)


def test_targets_for_another_number_of_frames() -> None:
    inputs, targets = shapes.frames(count=1)[0]
    with pytest.raises(BoxcovError, match="1 frame in the batch, but targets for 2"):
        fit(TinyCenter(), [(inputs, targets * 2)])


def test_nan_weights_are_named(detector: NetDetector) -> None:
    detector.net[2].weight.data[0, 0] = float("inf")
    with pytest.raises(BoxcovError, match=r"net\.2\.weight \(1 of 6 values\)"):
        fit(detector, [random_item()])


class Mean(NetDetector):
    def loss(self, raw: dict[str, Tensor], targets: Tensor) -> Tensor:
        return super().loss(raw, targets).mean()


class Detached(NetDetector):
    def loss(self, raw: dict[str, Tensor], targets: Tensor) -> Tensor:
        return super().loss({"map": raw["map"].detach()}, targets)


class FirstChannel(NetDetector):
    def loss(self, raw: dict[str, Tensor], targets: Tensor) -> Tensor:
        return 0 * raw["map"].sum((1, 2)) + 0 * targets.sum((1, 2))


def test_losses_without_gradient_are_reported() -> None:
    net = nn.Conv2d(2, 2, 1)
    with pytest.raises(BoxcovError, match=r"one value per frame, shape \(B,\), got \(\)"):
        fit(Mean(net), [random_item()])
    with pytest.raises(BoxcovError, match="no gradient for any chosen layer"):
        fit(Detached(net), [random_item()])
    with pytest.warns(
        BoxcovWarning, match=r"zero gradient for net\.weight: the posterior there is the prior"
    ) as warned:
        fit(FirstChannel(net), [random_item()])
    assert warned[0].filename == __file__


class _FromDict(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        out: Tensor = self.net(inputs["image"])
        return out


class PerLocation(NetDetector):
    """Forgets to sum over the locations of a frame."""

    def loss(self, raw: dict[str, Tensor], targets: Tensor) -> Tensor:
        return (raw["map"] - targets).square().sum(1).flatten()


@pytest.mark.parametrize("in_dict", [False, True])
def test_a_loss_of_more_values_than_frames_is_refused(detector: NetDetector, in_dict: bool) -> None:
    inputs, targets = random_item(3)
    frames = [({"image": inputs}, targets) if in_dict else (inputs, targets)]
    wrong = PerLocation(_FromDict(detector.net) if in_dict else detector.net)
    with pytest.raises(
        BoxcovError,
        match=r"loss\(\) returned 75 values for item 0, which has 3 frames: "
        "return one value per frame",
    ):
        fit(wrong, frames)


class OneMean(NetDetector):
    """A mean over the batch that looks like the loss of one frame."""

    def loss(self, raw: dict[str, Tensor], targets: Tensor) -> Tensor:
        return super().loss(raw, targets).mean()[None]


def test_a_mean_loss_with_a_dimension_is_refused(detector: NetDetector) -> None:
    wrong = OneMean(detector.net)
    with pytest.raises(BoxcovError, match="returned 1 value for item 0, which has 3 frames"):
        fit(wrong, [random_item(3)])
