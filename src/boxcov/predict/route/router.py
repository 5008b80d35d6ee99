"""The options of all engines, and the base classes of the routers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from logging import getLogger
from typing import Any, Literal

from torch import Tensor

from boxcov._torch.process_state import Precision
from boxcov.errors import BoxcovError, check_choice
from boxcov.posterior.posterior import Posterior
from boxcov.predict.cuda.static_graph import CaptureError, GraphPass, StaticGraph
from boxcov.predict.forward_mode.derivatives import TangentPropagation
from boxcov.predict.forward_mode.tangents import NoRule, Tangents
from boxcov.predict.head.stages import StagedHead
from boxcov.predict.head.weights import TOLERANCE
from boxcov.predict.linearize import LinearizationPoint, LinearizedDetector
from boxcov.predict.route.verification import (
    StagesCheck,
    TangentsCheck,
    Verification,
    warn_of_route,
)

_LOG = getLogger("boxcov")


@dataclass(frozen=True)
class EngineOptions:
    """Numerical options of the engines. The defaults give float32 accuracy.

    precision: arithmetic of matrix products on a GPU: "float32", or "tf32", which is faster and
        less exact.
    tolerance: relative error allowed for each variance of the posterior in a head with stages;
        1e-3 or 1e-2 may be much faster.
    cuda_graphs: on a GPU, replay the static part of the detector and the head's stages as CUDA
        graphs; they hold memory.
    verify: a change of weights in place raises an error within this many calls, because each call
        compares a share of the weights, 1 / verify. "always" compares all weights in each call.

    >>> EngineOptions(precision="tf32")
    EngineOptions(precision='tf32', tolerance=1e-05, cuda_graphs=True, verify=16)
    """

    precision: Precision = "float32"
    tolerance: float = TOLERANCE
    cuda_graphs: bool = True
    verify: int | Literal["always"] = 16

    def __post_init__(self) -> None:
        check_choice("precision", self.precision, Precision)
        if not 1e-6 <= self.tolerance <= 0.1:
            raise BoxcovError(f"tolerance must lie between 1e-6 and 0.1, got {self.tolerance!r}")
        if self.verify != "always" and (not isinstance(self.verify, int) or self.verify < 1):
            raise BoxcovError(
                f"verify must be 'always' or a number of calls of at least 1, got {self.verify!r}"
            )


DEFAULT_ENGINE = EngineOptions()


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

    @cached_property
    def propagation(self) -> TangentPropagation:
        return TangentPropagation(self.linearized.weights, self.options.precision)
