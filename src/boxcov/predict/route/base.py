"""The base classes of the routers, and the route that they record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from logging import getLogger
from typing import Any

from torch import Tensor

from boxcov.posterior.posterior import Posterior
from boxcov.predict.cuda.static_graph import CaptureError, GraphPass, StaticGraph
from boxcov.predict.engine_options import EngineOptions
from boxcov.predict.forward_mode.derivatives import TangentPropagation
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
        self.staged_head = StagedHead(
            posterior, options.precision, options.tolerance, options.cuda_graphs
        )
        self.propagation = TangentPropagation(linearized.weights, options.precision)
