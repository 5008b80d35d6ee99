"""z(theta): the boxes of one input as a function of the posterior's weights.

The selection is fixed at the trained weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_map_only

from boxcov._torch.layers import LayerCall
from boxcov._torch.modules import LayerCallMode, check_buffers, fresh, has_writes, shadow, versions
from boxcov.detections import Detections
from boxcov.detector import Detector, Selection, check_selection
from boxcov.errors import BoxcovError
from boxcov.predict.forward_mode.tangents import Tangents
from boxcov.predict.trunk_cache import TrunkCache

Weights = Mapping[str, Tensor]
"""Tensors by parameter name that replace the trained ones."""

OnCall = Callable[[str, LayerCall], Tensor]
"""Computes a layer call, given the name of its weight."""


class LinearizedDetector:
    """A detector at its trained weights that can be re-run with other weights.

    It works on a shadow: the detector itself is not touched. names: the posterior's parameters.
    """

    def __init__(self, detector: Detector, names: Iterable[str]) -> None:
        self.detector = detector
        parameters = dict(detector.named_parameters())
        self.weights = {name: parameters[name] for name in names}
        self.shadow = shadow(detector)
        self.names = {id(p): name for name, p in self.weights.items()}
        self.trunk = TrunkCache(self.shadow, set(self.names))
        # torch uses a faster attention with other rounding while no mode is active: so must the
        # plain pass, which then is not observed
        self._is_observable = not any(
            isinstance(m, (nn.MultiheadAttention, nn.TransformerEncoderLayer))
            for m in self.shadow.modules()
        )
        self._buffers_checked = False

    def at(
        self, inputs: Any, cache_trunk: bool = True, tangents: Tangents | None = None
    ) -> LinearizationPoint:
        """Run the plain detector once; its boxes are bit for bit the detector's.

        cache_trunk: keep the trunk's outputs, so that the network can be re-run with other weights.
        tangents: propagated through the same pass.
        """
        with torch.no_grad():
            forward = self.recorded if cache_trunk else self._forward
            return self.at_raw(inputs, forward(inputs, tangents), cache_trunk, tangents)

    def at_raw(
        self, inputs: Any, raw: Any, has_trunk: bool, tangents: Tangents | None
    ) -> LinearizationPoint:
        """The point of given raw outputs: select and decode."""
        with torch.no_grad():
            before = versions(raw)
            selection = self.shadow.select(raw)
            check_selection(selection)
            self._check_unchanged(before, "select()")
            boxes = self.shadow.decode(raw, selection)
            self._check_unchanged(before, "decode()")
            return LinearizationPoint(
                self, inputs, raw, selection, boxes, has_trunk, None, tangents
            )

    def with_tangents(self, point: LinearizationPoint, tangents: Tangents) -> LinearizationPoint:
        """The same point from another pass that propagates ``tangents``; the trunk is replayed."""
        with torch.no_grad(), self.rerun(point.inputs, lambda _, c: c(), tangents) as raw:
            return replace(point, raw=raw, tangents=tangents)

    def recorded(self, inputs: Any, tangents: Tangents | None = None) -> Any:
        """The raw outputs of a plain pass that fills the trunk cache."""
        buffers = [] if self._buffers_checked else versions(list(self.shadow.buffers()))
        observer = self._observer(lambda _, call: call()) if self._is_observable else nullcontext()
        with torch.no_grad(), self.trunk.recording(), observer:
            raw = self._forward(inputs, tangents)
        check_buffers(buffers)
        self._buffers_checked = True
        return raw if self.trunk.intact() else self.recorded(inputs, tangents)

    @contextmanager
    def rerun(
        self, inputs: Any, on_call: OnCall, tangents: Tangents | None = None
    ) -> Iterator[Any]:
        """The raw outputs of another pass, which replays the trunk.

        ``on_call`` computes each use of a posterior weight, also inside the block.
        """
        with self.trunk.replaying(), self._observer(on_call):
            yield self._forward(inputs, tangents)

    def substitute(self, weights: Weights) -> OnCall:
        """Compute calls with ``weights`` instead of the trained ones."""

        def run(name: str, call: LayerCall) -> Tensor:
            bias = None if call.bias is None else self.names.get(id(call.bias))
            return call(weight=weights.get(name), bias=None if bias is None else weights.get(bias))

        return run

    def theta(self) -> dict[str, Tensor]:
        """The trained weights, detached."""
        return {name: p.detach() for name, p in self.weights.items()}

    def variables(self) -> dict[str, Tensor]:
        """The trained weights as leaves of a new autograd graph."""
        return {name: p.detach().requires_grad_() for name, p in self.weights.items()}

    def moved(self, etas: Weights, number: int, step: float = 1.0) -> dict[str, Tensor]:
        """The trained weights plus ``step`` times one of the directions (k, *shape)."""
        theta = self.theta()
        return {
            name: theta[name] + (step * eta[number]).to(theta[name].dtype)
            for name, eta in etas.items()
        }

    def _forward(self, inputs: Any, tangents: Tangents | None) -> Any:
        with nullcontext() if tangents is None else tangents:
            return self.shadow(fresh(inputs))

    def _observer(self, on_call: OnCall) -> LayerCallMode:
        """``on_call`` computes each use of a posterior weight, which ends the trunk."""

        def run(name: str, call: LayerCall) -> Tensor:
            self.trunk.is_over = True
            return on_call(name, call)

        return LayerCallMode(self.names, run)

    def _check_unchanged(self, before: list[tuple[Tensor, int]], method: str) -> None:
        if has_writes(before):
            raise BoxcovError(
                f"{type(self.shadow).__name__}.{method} changes raw outputs in place (sigmoid_() "
                "and similar): let it work on copies"
            )


@dataclass(frozen=True)
class LinearizationPoint:
    """The plain detector's result for one input, and z(theta) around it."""

    linearized: LinearizedDetector
    inputs: Any
    raw: Any
    selection: Selection
    boxes: Tensor  # (m, D)
    has_trunk: bool = True  # the trunk is cached, so the network can be re-run with other weights
    logits: Tensor | None = None  # (m,) if z includes the score logit, as number D + 1
    tangents: Tangents | None = None  # propagated through the pass

    @property
    def shadow(self) -> Detector:
        """The detector to run: a shadow of the user's."""
        return self.linearized.shadow

    def with_logits(self) -> LinearizationPoint:
        """The same point with the score logits as part of z."""
        logits = self.shadow.logits(self.raw, self.selection)
        if logits is None or logits.shape != self.selection.scores.shape:
            found = "None" if logits is None else f"shape {tuple(logits.shape)}"
            raise BoxcovError(
                f"{type(self.shadow).__name__}.logits() must give one logit for each of "
                f"{len(self.selection)} scores, it gave {found}"
            )
        return replace(self, logits=logits)

    def subset(self, rows: Tensor) -> LinearizationPoint | None:
        """The point of some of the boxes (n,); None if it is all, or ``where`` is not by box."""
        m, chosen = len(self.boxes), self.selection
        if len(rows) == m:
            return None
        own = {name: getattr(chosen, name)[rows] for name in ("frame", "scores", "labels")}
        selection = replace(chosen, **own, where=_index(chosen.where, rows, m))
        try:
            boxes = self.shadow.decode(self.raw, selection)
        except (LookupError, RuntimeError, TypeError, ValueError):
            return None
        if boxes.shape[0] != len(rows) or not torch.allclose(boxes, self.boxes[rows]):
            return None
        logits = None if self.logits is None else self.logits[rows]
        return replace(self, selection=selection, boxes=boxes, logits=logits)

    @property
    def z(self) -> Tensor:
        """The plain boxes (m, D), with the logits (m, D + 1)."""
        return self.boxes if self.logits is None else _append(self.boxes, self.logits)

    def z_of(self, raw: Any) -> Tensor:
        """z from other raw outputs, differentiable in them."""
        boxes = self.shadow.decode(raw, self.selection)
        if self.logits is None:
            return boxes
        logits = self.shadow.logits(raw, self.selection)
        assert logits is not None
        return _append(boxes, logits)

    def z_at(self, weights: Weights) -> Tensor:
        """z(theta) of the same instances with other weights, differentiable in them."""
        return self.z_by(self.linearized.substitute(weights))

    def z_by(self, on_call: OnCall) -> Tensor:
        """z of the same instances where ``on_call`` computes each use of a weight."""
        with self.linearized.rerun(self.inputs, on_call) as raw:
            return self.z_of(raw)

    def difference(self, z: Tensor) -> Tensor:
        """``z`` minus the plain z, the short way in fields that wrap."""
        return short_way(z - self.z, self.shadow)

    def detections(self, logit_row: Tensor | None = None, **extra: Any) -> Detections:
        """The plain boxes with further fields.

        logit_row: (m, D + 1) the score logit's row of the joint covariance of box and logit.
        """
        found = self.shadow.detections(self.selection, self.boxes)
        return replace(found, **extra, **logit_fields(logit_row))


def logit_fields(row: Tensor | None) -> dict[str, Any]:
    """Fields of ``Detections`` from the score logit's row (m, D + 1), if there is one."""
    if row is None:
        return {}
    return {"score_variance": row[:, -1].contiguous(), "score_covariance": row[:, :-1].contiguous()}


def _index(where: Any, rows: Tensor, m: int) -> Any:
    """The rows of every tensor with m of them."""
    if is_dataclass(where) and not isinstance(where, type):
        own = {f.name: _index(getattr(where, f.name), rows, m) for f in fields(where)}
        return replace(where, **own)
    return tree_map_only(Tensor, lambda t: t[rows] if t.dim() and len(t) == m else t, where)


def _append(boxes: Tensor, logits: Tensor) -> Tensor:
    return torch.cat([boxes, logits.unsqueeze(1).to(boxes.dtype)], 1)


def short_way(delta: Tensor, detector: Detector) -> Tensor:
    """Differences of boxes (m, D), the short way round in periodic fields; works in place."""
    for name, period in detector.periods.items():
        if name in detector.box_fields:
            column = detector.box_fields.index(name)
            wrapped = torch.remainder(delta[:, column] + period / 2, period) - period / 2
            # adding and subtracting half a period costs small differences their digits
            is_long = delta[:, column].abs() > period / 2
            delta[:, column] = torch.where(is_long, wrapped, delta[:, column])
    return delta


def field_gradients(
    z: Tensor, at: Sequence[Tensor] | Sequence[GradientEdge]
) -> list[Tensor | None]:
    """Gradients (D, *shape) of the sums over rows of z (m, D): D backward passes, batched."""
    m, D = z.shape
    seeds = torch.eye(D, dtype=z.dtype, device=z.device).unsqueeze(1).expand(D, m, D)
    with torch.enable_grad():
        return batched_gradients(z, at, seeds)


def batched_gradients(
    z: Tensor, at: Sequence[Tensor] | Sequence[GradientEdge], seeds: Tensor
) -> list[Tensor | None]:
    """Gradients (n, *shape) of ``z`` weighted by each of the n seeds, in one backward pass.

    Some operations cannot be batched, such as the backward pass of ``GroupNorm`` for maps with
    channels last: then one pass per seed.
    """
    options = {"allow_unused": True, "retain_graph": True}
    try:
        return list(torch.autograd.grad(z, at, seeds, is_grads_batched=True, **options))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        columns = zip(*(torch.autograd.grad(z, at, seed, **options) for seed in seeds))
    return [None if column[0] is None else torch.stack(column) for column in columns]
