"""Detectors that change tensors in place get correct covariances, or a clear error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from boxcov import MCI, BoxcovError, Selection, fit
from helpers.nets import NetDetector
from helpers.odd import METHODS, check, double, frames, posterior_of, two_layers


class SelectInPlace(NetDetector):
    def select(self, raw: dict[str, Tensor]) -> Selection:
        raw["map"].sigmoid_()
        return super().select(raw)


class DecodeInPlace(NetDetector):
    def decode(self, raw: dict[str, Tensor], selection: Selection) -> Tensor:
        raw["map"].sigmoid_()
        return super().decode(raw, selection)


@pytest.mark.parametrize("method", [*METHODS, "mci"])
@pytest.mark.parametrize(("kind", "name"), [(SelectInPlace, "select"), (DecodeInPlace, "decode")])
def test_select_and_decode_that_change_raw_in_place_are_refused(
    kind: type[NetDetector], name: str, method: str
) -> None:
    detector = double(two_layers, kind)
    make = METHODS.get(method, lambda detector, posterior: MCI(detector, posterior))
    model = make(detector, posterior_of(detector))
    with pytest.raises(BoxcovError, match=rf"(?s)\b{name}\b.*in place"):
        model(frames()[0][:1])


class Normalising(nn.Module):
    """Normalises its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x.sub_(0.7).div_(0.5)
        return self.head(self.body(x).tanh())


class NormalisingResidual(Normalising):
    """Also adds to the output of its frozen part in place."""

    def forward(self, x: Tensor) -> Tensor:
        x.sub_(0.7).div_(0.5)
        y = self.body(x)
        y += 1
        return self.head(y.tanh())


@pytest.mark.parametrize("depth", ["head", ["net.head"]], ids=["all layers", "last layer"])
@pytest.mark.parametrize("kind", [Normalising, NormalisingResidual])
def test_a_forward_that_changes_its_input_gets_fresh_copies(
    kind: type[nn.Module], depth: Any
) -> None:
    detector = double(kind)
    posterior, inputs = posterior_of(detector, depth), frames()[0][:1]
    before = inputs.clone()
    check(detector, posterior, inputs)
    assert torch.equal(inputs, before)


class NormalisingIfNeeded(Normalising):
    """Accepts bytes or numbers between 0 and 1."""

    def forward(self, x: Tensor) -> Tensor:
        if x.max() > 1:
            x.div_(255)
        return self.head(self.body(x).tanh())


def test_a_forward_that_changes_only_some_inputs_is_noticed() -> None:
    detector = double(NormalisingIfNeeded)
    small = frames()[0][:1].sigmoid()
    large = 255 * small.flip(2)
    before = large.clone()
    check(detector, posterior_of(detector, ["net.head"], (small, frames(1)[1])), small, large)
    assert torch.equal(large, before)


class NormalisingEntry(NetDetector):
    """Takes a dict as input, and replaces one of its entries."""

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        inputs["x"] = (inputs["x"] - 0.7) / 0.5
        return super().forward(inputs["x"])


def test_a_forward_that_replaces_an_entry_gets_fresh_copies() -> None:
    detector = double(two_layers, NormalisingEntry)
    x, targets = frames()
    posterior = fit(detector, [({"x": x.clone()}, targets)], n_data=50, prior_precision=0.3)
    inputs = {"x": x[:1]}
    check(detector, posterior, inputs)
    assert inputs["x"].data_ptr() == x.data_ptr()
    assert torch.equal(x, frames()[0])
