"""z(theta): the boxes of one input as a function of the posterior's weights, at the frozen selection, the trunk run once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from boxcov.curvature.calls import Call, Watch
from boxcov.detections import Detections
from boxcov.detector import Detector, Selection
from boxcov.frozen import shadow
from boxcov.predict.trunk import Trunk

Weights = Mapping[str, Tensor]
"""Tensors by parameter name, in the place of the trained ones; those not named stay."""


class Linearised:
    """A detector at its trained weights, ready to be asked what other weights would give. It is a shadow: the detector is not touched."""

    def __init__(self, detector: Detector, names: Iterable[str]) -> None:
        known = dict(detector.named_parameters())
        self.weights = {name: known[name] for name in names}
        self.shadow = shadow(detector)
        self.names = {id(p): name for name, p in self.weights.items()}
        self.trunk = Trunk(self.shadow, set(self.names))

    def at(self, inputs: Any) -> Point:
        """The plain detector, once: what it returns bit for bit, and the trunk's outputs remembered."""
        with torch.no_grad():
            raw = self._recorded(inputs)
            if not self.trunk.intact():
                raw = self._recorded(inputs)
            selection = self.shadow.select(raw)
            return Point(self, inputs, raw, selection, self.shadow.decode(raw, selection))

    def _recorded(self, inputs: Any) -> Any:
        def run(name: str, call: Call) -> Tensor:
            self.trunk.over()
            return call()

        with self.trunk.recording(), Watch(self.names, run):
            return self.shadow(inputs)

    def run(self, inputs: Any, on_call: Callable[[str, Call], Tensor]) -> Any:
        """Raw outputs of another pass over the same inputs: the trunk from memory, every use of a weight answered by ``on_call``."""

        def run(name: str, call: Call) -> Tensor:
            self.trunk.over()
            return on_call(name, call)

        with self.trunk.replaying(), Watch(self.names, run):
            return self.shadow(inputs)

    def exchanged(self, weights: Weights) -> Callable[[str, Call], Tensor]:
        """Answers a call with ``weights`` in the place of the trained ones."""

        def run(name: str, call: Call) -> Tensor:
            bias = None if call.bias is None else self.names.get(id(call.bias))
            return call(weight=weights.get(name), bias=weights.get(bias) if bias is not None else None)

        return run

    def theta(self) -> dict[str, Tensor]:
        """The trained weights, detached: where derivatives are taken."""
        return {name: p.detach() for name, p in self.weights.items()}


@dataclass(frozen=True)
class Point:
    """The plain detector's answer to one input."""

    linearised: Linearised
    inputs: Any
    raw: Any
    selection: Selection
    boxes: Tensor  # (m, D)

    def boxes_at(self, weights: Weights) -> Tensor:
        """z(theta) (m, D): the same instances under other weights; differentiable in them."""
        detector = self.linearised.shadow
        raw = self.linearised.run(self.inputs, self.linearised.exchanged(weights))
        return detector.decode(raw, self.selection)

    def difference(self, boxes: Tensor) -> Tensor:
        """``boxes`` minus the plain ones, the short way round in fields that wrap."""
        detector = self.linearised.shadow
        delta = boxes - self.boxes
        for name, period in detector.periods.items():
            if name in detector.box_fields:
                column = detector.box_fields.index(name)
                wrapped = torch.remainder(delta[:, column] + period / 2, period) - period / 2
                # only where it did go round: adding half a turn and taking it away again costs small differences their digits
                delta[:, column] = torch.where(delta[:, column].abs() > period / 2, wrapped, delta[:, column])
        return delta

    def detections(self, **extra: Any) -> Detections:
        return replace(self.linearised.shadow.detections(self.selection, self.boxes), **extra)
