"""The base classes of the routers, and the route that they record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from logging import getLogger
from typing import Any

import torch
from torch import Tensor

from boxcov._torch.process_state import matrix_precision
from boxcov.posterior.posterior import Posterior
from boxcov.predict.cuda.static_graph import CaptureError, GraphPass, StaticGraph
from boxcov.predict.engine_options import EngineOptions
from boxcov.predict.forward_mode.derivatives import TangentPropagation, directional_derivatives
from boxcov.predict.forward_mode.jvp import NoRule
from boxcov.predict.forward_mode.tangents import Tangents
from boxcov.predict.head.stages import StagedHead
from boxcov.predict.linearize import LinearizationPoint, LinearizedDetector
from boxcov.predict.route.verification import (
    StagesCheck,
    TangentsCheck,
    Verification,
    warn_of_route,
)

_LOG = getLogger("boxcov")


@dataclass(frozen=True)
class Route:
    """How the next frame is computed."""

    head: str  # engine of the layers of the head
    below: str = "none"  # engine of the layers below the head
    caches_trunk: bool = True
    cuda_graph: bool = False

    def __str__(self) -> str:
        trunk = "trunk cached" if self.caches_trunk else "plain pass once"
        graph = ", CUDA graph" if self.cuda_graph else ""
        return f"head layers by {self.head}, below the head: {self.below}, {trunk}{graph}"


class Router:
    """Runs the plain pass of every frame and records the route; subclasses choose the engines.

    engine: the only one, for an estimator that has no choice.
    """

    def __init__(
        self, linearized: LinearizedDetector, options: EngineOptions, engine: str | None = None
    ) -> None:
        self.linearized, self.options = linearized, options
        self.route: Route | None = None  # None before the first boxes
        self.graph_check = Verification()
        on_gpu = next(linearized.detector.parameters()).is_cuda
        if not (options.cuda_graphs and on_gpu and self.graph.is_available()):
            self.graph_check.refuse()
        if engine is not None:
            self.settle(engine, engine)

    @cached_property
    def graph(self) -> StaticGraph:
        return StaticGraph(self.linearized.detector, self.linearized.weights.values())

    def plain_pass(self, inputs: Any) -> LinearizationPoint:
        """Run the plain detector once, with the trunk cached and tangents as the route needs."""
        tangents = self.next_tangents()
        try:
            if self.needs_trunk():
                return self.linearized.at(inputs, True, tangents)
            done = self._graph_pass(inputs, tangents)
            if done is None:
                return self.linearized.at(inputs, False, tangents)
            point = self.linearized.at_raw(inputs, done.raw, False, tangents)
        except NoRule:  # this frame uses an operation that earlier frames did not
            return self.linearized.at(inputs)
        own, selection = self.graph.detach, point.selection
        columns = {name: own(getattr(selection, name)) for name in ("frame", "scores", "labels")}
        return replace(point, boxes=own(point.boxes), selection=replace(selection, **columns))

    def needs_trunk(self) -> bool:
        """Whether the network is re-run with other weights, so that the trunk must be cached."""
        return True

    def next_tangents(self) -> Tangents | None:
        """Tangents to propagate through the plain pass of the next frame."""
        return None

    def settle(self, head: str, below: str = "none") -> None:
        """Record, and log, how frames are computed from now on."""
        has_graph = not self.graph_check.is_refused and not self.needs_trunk()
        route = Route(head, below, self.needs_trunk(), has_graph)
        if route != self.route:
            self.route = route
            _LOG.info("%s: %s", type(self.linearized.detector).__name__, route)

    @contextmanager
    def without_half(self, reason: str) -> Iterator[bool]:
        """Store tangents in float32, for good unless the block raises; yield if it is a change."""
        yield False

    def with_trunk(self, point: LinearizationPoint) -> LinearizationPoint:
        """The same point with its trunk cached: runs the detector again if it is not."""
        if point.has_trunk:
            return point
        return replace(self.linearized.at(point.inputs), logits=point.logits)

    def _graph_pass(self, inputs: Any, tangents: Tangents | None) -> GraphPass | None:
        if self.graph_check.is_refused:
            return None
        try:
            done = self.graph.run(inputs, tangents)
        except CaptureError as error:
            self._refuse_graph(f"cannot be captured as a CUDA graph ({error})")
            return None
        if done is not None and done.is_replay and not self.graph_check.covers({done.key}):
            if not self.graph.matches_plain(done):
                self._refuse_graph("gives a different result as a CUDA graph")
                return None
            self.graph_check.accept({done.key})
        return done

    def _refuse_graph(self, reason: str) -> None:
        self.graph_check.refuse()
        self.graph.release()
        name = type(self.linearized.detector).__name__
        warn_of_route(
            f"{name}.static_part() {reason}; it now runs without a CUDA graph, which is slower"
        )


class TangentRouter(Router):
    """Shared by the routers that can propagate tangents and use the stages of a head.

    etas: directions (k, *shape) by parameter name, if the estimator samples.
    """

    def __init__(
        self,
        linearized: LinearizedDetector,
        posterior: Posterior,
        options: EngineOptions,
        etas: Mapping[str, Tensor],
        with_logit: bool,
    ) -> None:
        super().__init__(linearized, options)
        self.posterior, self.etas, self.with_logit = posterior, etas, with_logit
        # directions of weights below the stages that boxes depend on, once these are verified
        self._etas_below: Mapping[str, Tensor] = {}
        self.stages_check, self.tangents_check = StagesCheck(), TangentsCheck()
        self.staged_head = StagedHead(posterior, options)
        weights = self.linearized.weights
        in_half = options.precision == "tf32" and all(
            w.is_cuda and w.dtype == torch.float32 for w in weights.values()
        )
        self.propagation = TangentPropagation(weights, options.precision, in_half)

    @contextmanager
    def without_half(self, reason: str) -> Iterator[bool]:
        before = self.propagation, self.tangents_check
        if not self.propagation.in_half:
            yield False
            return
        self.propagation = TangentPropagation(self.linearized.weights, self.options.precision)
        self.tangents_check = TangentsCheck()
        try:
            yield True
        except Exception:  # float16 is not the cause
            self.propagation, self.tangents_check = before
            raise
        warn_of_route(f"{reason}, so they are propagated in float32 from now on, which is slower")

    def oracle(self, point: LinearizationPoint, etas: Mapping[str, Tensor]) -> Tensor:
        """J eta (m, D, k) by vmap(jvp), in float32 where it verifies tangents in float16."""
        in_half = self.propagation.in_half and not self.tangents_check.is_refused
        with matrix_precision("float32") if in_half else nullcontext():
            return directional_derivatives(point, etas)

    def tangents_agree(self, fast: Tensor, slow: Tensor, tangents: Tangents) -> bool | None:
        """Whether derivatives from tangents agree with the oracle; None: try those in float32."""
        in_half = tangents.directions.half is not None
        if in_half and self.tangents_check.contradicts(fast, slow):
            with self.without_half("tangents in float16 differ from those by vmap(jvp)"):
                return None
        return self.tangents_check.compare(fast, slow, tangents.ends)
