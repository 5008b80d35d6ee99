"""A detector with its covariances as one function of fixed shapes, for ONNX and CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from boxcov._torch.process_state import SideStream, matrix_precision
from boxcov.detections import Detections
from boxcov.detector import SIGNAL_INPUTS, Detector, Selection
from boxcov.errors import BoxcovError, join_names
from boxcov.posterior.posterior import Posterior
from boxcov.predict.engine_options import DEFAULT_ENGINE, EngineOptions
from boxcov.predict.forward_mode.derivatives import directional_derivatives, sample_covariance
from boxcov.predict.head.cells import group_in_blocks, plan_own_cells, window_tables
from boxcov.predict.head.stages import head_covariance
from boxcov.predict.head.weight_stacks import build_head_weights
from boxcov.predict.head.weights import HeadWeights
from boxcov.predict.instances import InstanceEngine, InstanceRun, with_leaves
from boxcov.predict.linearize import LinearizationPoint, LinearizedDetector
from boxcov.predict.predictor import add_signals, detector_signals
from boxcov.predict.route.instances import check_items
from boxcov.static_selection import FusedNetwork, StaticLimits, StaticSelection

OUTPUTS = ("boxes", "scores", "labels", "covariance", "count", "left_off")
ERROR_OUTPUTS = (
    *("risk", "no_object", "misplaced", "iou_below", "flipped", "scale", "predictive"),
    *("region_widths", "joint_widths"),
)
MAX_ROWS = 2000  # the neighbours of more boxes would be computed frame by frame
Covariance = Callable[[LinearizationPoint, StaticSelection], Tensor]


class WithSignals(NamedTuple):
    """Inputs of a static part, together with ``Detector.signal_inputs``."""

    inputs: Any
    signal_inputs: Tensor


class FrameFunction:
    """Compute a frame, or a batch, in n rows, of which the first ``count`` are boxes.

    detector: a static part. inputs: an example of what it reads, ``WithSignals`` if the error model
    needs them. posterior: None for boxes alone; its error model, if it has one, is
    applied. etas: posterior samples, for the covariance of ``MCGLM``; None for the exact one.

    A call returns the tensors ``names``, with zeros in the padding: ``OUTPUTS`` and, with an error
    model, ``ERROR_OUTPUTS``; ``flipped`` is left out for boxes without a heading.
    """

    def __init__(
        self,
        detector: Detector,
        posterior: Posterior | None,
        inputs: Any,
        limits: StaticLimits,
        etas: dict[str, Tensor] | None = None,
        engine: EngineOptions = DEFAULT_ENGINE,
    ) -> None:
        self.limits, self.engine = limits, engine
        self.error_model = None if posterior is None else posterior.error_model
        names = [] if posterior is None else posterior.parameters
        self.linearized = LinearizedDetector(detector, names)
        self.covariance: Covariance | None = None
        self.needs_trunk = True
        self.network: FusedNetwork | None = None  # runs in place of the detector, see use_network
        device = next(detector.parameters()).device
        self._signal_stream, self._report_stream = SideStream(device), SideStream(device)
        with torch.no_grad():
            point, static = self.linearize(inputs)
            if posterior is not None:
                self.covariance = self._choose(posterior, etas, point, static)
            found, _ = self.run(inputs)  # refuses an error model that the graph cannot compute
        given = ERROR_OUTPUTS if self.error_model is not None else ()
        self.names = (*OUTPUTS, *(name for name in given if getattr(found, name) is not None))

    def _choose(
        self,
        posterior: Posterior,
        etas: dict[str, Tensor] | None,
        point: LinearizationPoint,
        static: StaticSelection,
    ) -> Covariance:
        """Return how the covariance is computed: by the head's stages where they suffice."""
        moving = _moving_parameters(point, static)
        head, staged = None, self.linearized.shadow.stages(point.raw, point.selection)
        if staged is not None:
            names, tolerance = self.linearized.names, self.engine.tolerance
            head = build_head_weights(staged, posterior, names, etas, tolerance)
        if head is not None and head.parameters and moving <= head.parameters:
            self.needs_trunk = False
            return _by_stages(head, len(point.boxes), point.boxes.device)
        if etas is not None:
            directions = {name: eta for name, eta in etas.items() if name in moving}
            return lambda point, _: sample_covariance(directional_derivatives(point, directions))
        engine = InstanceEngine(self.linearized, posterior)
        deep = sorted(moving - _instance_parameters(engine, point, static))
        if deep:
            raise BoxcovError(
                "an exact covariance can be exported for layers that instances() runs: "
                f"{join_names(deep)} lie below the head. Take samples, or a posterior of the head"
            )
        return partial(_instance_covariance, engine)

    def run(self, inputs: Any) -> tuple[Detections, StaticSelection]:
        """Return n rows of detections, with arbitrary padding, and which of them are boxes."""
        with torch.no_grad():
            point, static = self.linearize(inputs)
            found, covariance, report = point.detections(), None, None
            if self.error_model is not None:  # both beside the covariance
                # padding is no neighbour of a box: each such row has a frame of its own
                own = -1 - torch.arange(len(found), device=found.scores.device)
                found = replace(found, frame=torch.where(static.valid, found.frame, own))
                with self._signal_stream.beside():
                    found = add_signals(found, detector_signals(point))
                with self._report_stream.beside():
                    report = self.error_model.report_inputs(found)
            if self.covariance is not None:
                with matrix_precision(self.engine.precision):
                    covariance = self.covariance(point, static)
            self._signal_stream.join()
            self._report_stream.join()
            self.linearized.trunk.memory.clear()
        found = replace(found, covariance=covariance)
        if self.error_model is None:
            return found, static
        return self.error_model.apply(found, check=False, report=report), static

    def __call__(self, inputs: Any) -> tuple[Tensor, ...]:
        found, static = self.run(inputs)
        values = {"count": static.count, "left_off": static.left_off}
        for name in self.names:
            if name not in values:
                value, padding = getattr(found, name), -1 if name == "labels" else 0
                valid = static.valid.view(-1, *[1] * (value.dim() - 1))
                values[name] = torch.where(valid, value, padding)
        return tuple(values[name] for name in self.names)

    def use_network(self, network: FusedNetwork) -> None:
        """Run a fused network from now on: inputs are then what its ``pack`` returns."""
        if self.covariance is not None and self.needs_trunk:
            raise BoxcovError(
                "fused=True needs a posterior of the head alone, and a head that declares stages()"
            )
        self.network = network

    def linearize(self, inputs: Any) -> tuple[LinearizationPoint, StaticSelection]:
        """Run the plain detector and select its boxes in a fixed number of rows."""
        shadow = self.linearized.shadow
        inputs, raw, excess = self._raw(inputs)
        static = shadow.select_static(raw, self.limits)
        if static is None:
            raise BoxcovError(
                f"{type(shadow).__name__} has no select_static(): an ONNX file needs a selection "
                "whose shapes do not depend on the frame"
            )
        if excess is not None:
            static = replace(static, left_off=static.left_off + excess)
        boxes = shadow.decode(raw, static.selection)
        return LinearizationPoint(self.linearized, inputs, raw, static.selection, boxes), static

    def _raw(self, inputs: Any) -> tuple[Any, Any, Tensor | None]:
        """Return the network's inputs, its raw outputs, and how many inputs are left off."""
        extra, excess = None, None
        if self.network is not None:
            if self.error_model is not None:
                with self._signal_stream.beside():
                    extra = self.network.signal_inputs(*inputs)
            raw, excess = self.network(*inputs)
        else:
            if isinstance(inputs, WithSignals):
                inputs, extra = inputs
            forward = self.linearized.recorded if self.needs_trunk else self.linearized.shadow
            raw = forward(inputs)
        return inputs, raw if extra is None else {**raw, SIGNAL_INPUTS: extra}, excess


def _moving_parameters(point: LinearizationPoint, static: StaticSelection) -> set[str]:
    """Return the posterior's parameters that boxes depend on, unlike those of a score branch."""
    moving: set[str] = set()
    with torch.enable_grad():
        theta = point.linearized.variables()
        for selection in static.of_kind or (static.selection,):
            z = replace(point, selection=selection).z_at(theta)
            probe = torch.linspace(1, 2, z.numel(), dtype=z.dtype, device=z.device).view(z.shape)
            gradients = torch.autograd.grad(
                (z * probe).sum(), list(theta.values()), allow_unused=True
            )
            moving |= {name for name, g in zip(theta, gradients) if g is not None and bool(g.any())}
    return moving


def _by_stages(head: HeadWeights, m: int, device: torch.device) -> Covariance:
    """Return the covariance by the head's stages: exact, or along their directions."""
    side = SideStream(device)
    # an ONNX file computes the tables, which are larger than the operations
    windows = window_tables(m, head) if device.type == "cuda" else None

    def covariance(point: LinearizationPoint, static: StaticSelection) -> Tensor:
        staged = point.shadow.stages(point.raw, point.selection)
        assert staged is not None
        with side.beside():
            group = group_in_blocks(staged.kind, head)
        rows, plan = plan_own_cells(staged, head, group, windows)
        found, _ = head_covariance(head, plan, rows, staged, side=side)
        return sample_covariance(found) if head.has_directions else found

    return covariance


def _instance_covariance(
    engine: InstanceEngine, point: LinearizationPoint, static: StaticSelection
) -> Tensor:
    """Compute all rows as every kind in turn, and take each row from its own kind (n, D, D)."""
    n, D = point.boxes.shape
    kind = static.selection.labels.new_zeros(n) if static.kind is None else static.kind
    out = point.boxes.new_zeros(n, D, D)
    for number, run in enumerate(_runs(engine, point, static)):
        out = torch.where((kind == number)[:, None, None], engine.covariance(run), out)
    return out


def _instance_parameters(
    engine: InstanceEngine, point: LinearizationPoint, static: StaticSelection
) -> set[str]:
    """Return the posterior's parameters that instances() uses; raise if it mixes the boxes."""
    used: set[str] = set()
    for run in _runs(engine, point, static):
        if len(point.boxes) > 1 and run.uses:
            check_items(run, type(point.shadow).__name__)
        used |= set(engine.posterior.restricted(engine.block_of[w] for w in run.uses).parameters)
    return used


def _runs(
    engine: InstanceEngine, point: LinearizationPoint, static: StaticSelection
) -> Iterator[InstanceRun]:
    """Run all rows by instance, as every kind in turn."""
    watched = with_leaves(point)
    for selection in static.of_kind or (static.selection,):
        yield engine.run(*_single_group(watched, selection))


def _single_group(point: LinearizationPoint, selection: Selection) -> Any:
    """Return the one group of instances of a selection of one kind."""
    shadow, n = point.shadow, len(point.boxes)
    found = shadow.instances(point.raw, selection)
    if found is None:
        raise BoxcovError(
            f"{type(shadow).__name__} has no instances(), which an exact covariance needs: use "
            "samples, with an error model for them (`boxcov calibrate --method mcglm --samples 10`;"
            " in Python MCGLM, or samples=10 of export)"
        )
    groups = [group for group in found if len(group[0])]
    if len(groups) != 1 or len(groups[0][0]) != n:
        raise BoxcovError(
            f"{type(shadow).__name__}.instances() must return one group for boxes of one kind, "
            f"got {len(groups)} groups for {n} boxes"
        )
    return groups[0]
