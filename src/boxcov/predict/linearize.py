"""z(theta): the boxes of one input as a function of the posterior's weights, at the frozen selection, the trunk run once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from boxcov._torch.fingerprint import check_buffers, versions
from boxcov._torch.inputs import fresh
from boxcov._torch.layer_calls import LayerCall, LayerCallMode
from boxcov._torch.shadow import shadow
from boxcov.detections import Detections
from boxcov.detector import Detector, Selection
from boxcov.errors import BoxcovError
from boxcov.predict.cuda.dense_graph import Dense
from boxcov.predict.forward_mode.tangents import Tangents
from boxcov.predict.trunk_cache import Trunk

Weights = Mapping[str, Tensor]
"""Tensors by parameter name, in the place of the trained ones; those not named stay."""


class LinearizedDetector:
    """A detector at its trained weights, ready to be asked what other weights would give. It is a shadow: the detector is not touched.

    graphs: on a GPU, keep passes after which nothing will be asked as CUDA graphs.
    """

    def __init__(self, detector: Detector, names: Iterable[str], graphs: bool = False) -> None:
        self.graphs = graphs
        known = dict(detector.named_parameters())
        self.weights = {name: known[name] for name in names}
        self._dense = Dense(detector, self.weights.values()) if graphs else None
        self.shadow = shadow(detector)
        self.names = {id(p): name for name, p in self.weights.items()}
        self.trunk = Trunk(self.shadow, set(self.names))
        # torch takes a faster way through attention while nothing watches, with other rounding: the plain pass must take it, too
        self._watched = not any(
            isinstance(m, (nn.MultiheadAttention, nn.TransformerEncoderLayer))
            for m in self.shadow.modules()
        )
        self._buffers_checked = False

    def at(
        self, inputs: Any, remember: bool = True, along: Tangents | None = None
    ) -> LinearizationPoint:
        """The plain detector, once: what it returns bit for bit, and the trunk's outputs remembered, if other weights will be asked about.

        along: derivatives to carry beside it.
        """
        with torch.no_grad():
            raw = self.recorded(inputs, along) if remember else self._kept(inputs, along)
            before = versions(raw)
            selection = self.shadow.select(raw)
            self._check_unchanged(before, "select()")
            boxes = self.shadow.decode(raw, selection)
            self._check_unchanged(before, "decode()")
            if self._dense is not None:
                own = self._dense.own
                boxes = own(boxes)
                selection = replace(
                    selection,
                    frame=own(selection.frame),
                    scores=own(selection.scores),
                    labels=own(selection.labels),
                )
            return LinearizationPoint(self, inputs, raw, selection, boxes, remember, tangents=along)

    def again(self, point: LinearizationPoint, along: Tangents) -> LinearizationPoint:
        """The same point once more, with derivatives carried beside; the trunk from memory."""
        with torch.no_grad():
            raw = self.run(point.inputs, lambda _, call: call(), lambda raw: raw, along)
        return replace(point, raw=raw, tangents=along)

    def _kept(self, inputs: Any, along: Tangents | None) -> Any:
        raw = None if self._dense is None else self._dense(inputs, along)
        return self._passed(inputs, along) if raw is None else raw

    def _passed(self, inputs: Any, along: Tangents | None) -> Any:
        with nullcontext() if along is None else along:
            return self.shadow(fresh(inputs))

    def recorded(self, inputs: Any, along: Tangents | None = None) -> Any:
        """The raw outputs of a plain pass that remembers what the trunk gave."""
        raw = self._recorded(inputs, along)
        return raw if self.trunk.intact() else self._recorded(inputs, along)

    def _recorded(self, inputs: Any, along: Tangents | None) -> Any:
        def run(name: str, call: LayerCall) -> Tensor:
            self.trunk.over()
            return call()

        buffers = [] if self._buffers_checked else versions(list(self.shadow.buffers()))
        with (
            self.trunk.recording(),
            LayerCallMode(self.names, run) if self._watched else nullcontext(),
        ):
            raw = self._passed(inputs, along)
        check_buffers(buffers)
        self._buffers_checked = True
        return raw

    def _check_unchanged(self, before: list[tuple[Tensor, int]], who: str) -> None:
        if any(t._version != version for t, version in before):
            raise BoxcovError(
                f"{type(self.shadow).__name__}.{who} changes raw outputs in place (sigmoid_() and the like): let it work on copies"
            )

    def run(
        self,
        inputs: Any,
        on_call: Callable[[str, LayerCall], Tensor],
        then: Callable[[Any], Any],
        along: Tangents | None = None,
    ) -> Any:
        """``then(raw)`` of another pass over the same inputs: the trunk from memory, every use of a weight answered by ``on_call``."""

        def run(name: str, call: LayerCall) -> Tensor:
            self.trunk.over()
            return on_call(name, call)

        with self.trunk.replaying(), LayerCallMode(self.names, run):
            return then(self._passed(inputs, along))

    def exchanged(self, weights: Weights) -> Callable[[str, LayerCall], Tensor]:
        """Answers a call with ``weights`` in the place of the trained ones."""

        def run(name: str, call: LayerCall) -> Tensor:
            bias = None if call.bias is None else self.names.get(id(call.bias))
            return call(
                weight=weights.get(name), bias=weights.get(bias) if bias is not None else None
            )

        return run

    def theta(self) -> dict[str, Tensor]:
        """The trained weights, detached: where derivatives are taken."""
        return {name: p.detach() for name, p in self.weights.items()}


@dataclass(frozen=True)
class LinearizationPoint:
    """The plain detector's answer to one input."""

    linearized: LinearizedDetector
    inputs: Any
    raw: Any
    selection: Selection
    boxes: Tensor  # (m, D)
    remembered: bool = (
        True  # whether the trunk can be played back: without, other weights cannot be asked about
    )
    logits: Tensor | None = (
        None  # (m,) of the scores, if asked about them too: z then has D + 1 numbers, the logit last
    )
    tangents: Tangents | None = None  # derivatives that were carried beside the pass

    def scored(self) -> LinearizationPoint:
        """The same point with the logits of the scores among what is asked about."""
        logits = self.linearized.shadow.logits(self.raw, self.selection)
        if logits is None or logits.shape != self.selection.scores.shape:
            found = "None" if logits is None else f"shape {tuple(logits.shape)}"
            raise BoxcovError(
                f"{type(self.linearized.shadow).__name__}.logits() must give one logit for each of {len(self.selection)} scores, it gave {found}"
            )
        return replace(self, logits=logits)

    @property
    def z(self) -> Tensor:
        """The plain boxes (m, D), and their logits behind them (m, D + 1) if asked about."""
        return self.boxes if self.logits is None else _joined(self.boxes, self.logits)

    def z_of(self, raw: Any) -> Tensor:
        """The same numbers from other raw outputs, differentiable in them."""
        boxes = self.linearized.shadow.decode(raw, self.selection)
        if self.logits is None:
            return boxes
        logits = self.linearized.shadow.logits(raw, self.selection)
        assert logits is not None
        return _joined(boxes, logits)

    def z_at(self, weights: Weights) -> Tensor:
        """z(theta) (m, D): the same instances under other weights; differentiable in them."""
        return self.z_by(self.linearized.exchanged(weights))

    def z_by(self, on_call: Callable[[str, LayerCall], Tensor]) -> Tensor:
        """The same instances (m, D) with every use of a weight answered by ``on_call``, in decode() too."""
        z: Tensor = self.linearized.run(self.inputs, on_call, self.z_of)
        return z

    def difference(self, z: Tensor) -> Tensor:
        """``z`` minus the plain one, the short way round in fields that wrap."""
        return short_way(z - self.z, self.linearized.shadow)

    def detections(self, **extra: Any) -> Detections:
        return replace(self.linearized.shadow.detections(self.selection, self.boxes), **extra)


def _joined(boxes: Tensor, logits: Tensor) -> Tensor:
    return torch.cat([boxes, logits.unsqueeze(1).to(boxes.dtype)], 1)


def short_way(delta: Tensor, detector: Detector) -> Tensor:
    """Differences of boxes (m, D) with the fields that wrap around taken the short way; works in place.

    >>> from boxcov.detectors.tiny import TinyCenter
    >>> short_way(torch.tensor([[0.0, 0.0, 0.0, 0.0, 6.0]]), TinyCenter())[0, 4]
    tensor(-0.2832)
    """
    for name, period in detector.periods.items():
        if name in detector.box_fields:
            column = detector.box_fields.index(name)
            wrapped = torch.remainder(delta[:, column] + period / 2, period) - period / 2
            # only where it did go round: adding half a turn and taking it away again costs small differences their digits
            delta[:, column] = torch.where(
                delta[:, column].abs() > period / 2, wrapped, delta[:, column]
            )
    return delta
