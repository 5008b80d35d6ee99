"""Weights of the losses of frames."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from boxcov import BoxcovError, fit
from boxcov.kfac.losses import most_frames
from helpers.nets import NetDetector, random_item, two_convolutions


def test_frames_are_counted_where_the_inputs_tell() -> None:
    images, cloud_, other = torch.zeros(4, 3, 8, 8), torch.zeros(900, 5), torch.zeros(4, 2)
    assert most_frames(images, None) == 4
    assert most_frames([cloud_], [{}]) == 1
    assert most_frames([images, other], None) is None  # parts of one input, or frames


@pytest.mark.parametrize(
    "repeated", [lambda mean: mean.expand(3), lambda mean: torch.stack([mean] * 3)]
)
def test_a_mean_repeated_for_each_frame_is_refused(
    monkeypatch: pytest.MonkeyPatch, repeated: Callable[[Tensor], Tensor]
) -> None:
    loss = NetDetector.loss
    monkeypatch.setattr(
        NetDetector, "loss", lambda self, raw, targets: repeated(loss(self, raw, targets).mean())
    )
    with pytest.raises(BoxcovError, match="the same value for all 3 frames of item 0"):
        fit(two_convolutions(), [random_item(3)])


def test_equal_losses_of_equal_frames_are_right() -> None:
    inputs, targets = (torch.cat([t, t]) for t in random_item(1))
    assert fit(two_convolutions(), [(inputs, targets)]).frames == 2


@pytest.mark.parametrize("form", ["per frame", "rows of all frames", "of another kind"])
def test_equal_losses_need_no_raw_output_of_one_row_per_frame(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames without objects often have the same loss, and two frames may have two boxes each."""
    forward, loss = NetDetector.forward, NetDetector.loss

    def other(self: NetDetector, inputs: Tensor) -> dict[str, Any]:
        made = forward(self, inputs)["map"]
        if form == "per frame":
            return {"map": list(made)}
        return {"map": made.flatten(0, 1) if form == "rows of all frames" else Opaque(made)}

    def equal(self: NetDetector, raw: dict[str, Any], targets: Tensor) -> Tensor:
        made = raw["map"].made if isinstance(raw["map"], Opaque) else raw["map"]
        made = torch.stack(made) if isinstance(made, list) else made.reshape(2, 2, -1)
        return loss(self, {"map": made}, targets)

    monkeypatch.setattr(NetDetector, "forward", other)
    monkeypatch.setattr(NetDetector, "loss", equal)
    inputs, targets = (torch.cat([t, t]) for t in random_item(1))
    assert fit(two_convolutions(), [(inputs, targets)]).frames == 2


class Opaque:
    """Raw outputs that torch does not look into."""

    def __init__(self, made: Tensor) -> None:
        self.made = made
