"""The routers decide how a frame is computed: the rules and all states are here.

The decisions of ExactGLM are in ``exact.py``, those of MCGLM in ``mcglm_route.py``.

Engines compute and know nothing of each other. A router holds one ``Verification`` per fast engine
and chooses among them on the first boxes:

==============================  ================================================================
engine                          verified against
==============================  ================================================================
``instances.py``                ``decode()``: equal boxes, equal gradients (``_verify_instances``)
``head/stages.py``, exact       ``instances.py``, for every kind of box (``exact.py``)
``head/stages.py``, directions  ``forward_mode/jvp.py``, for every kind (``mcglm_route.py``)
``forward_mode/propagation.py`` ``forward_mode/jvp.py``
``cuda/static_graph.py``        the plain pass, bit for bit
==============================  ================================================================

Autograd and ``forward_mode/jvp.py`` work for any detector; they are the oracles and need no
verification. An engine starts UNVERIFIED. It becomes VERIFIED when it agrees with its oracle. Its
result is used for that frame and all later ones, so a frame gives the same result whether it comes
first or later. A new kind of box (another task or level) is verified when it first appears.
An optional speed-up that contradicts its oracle, or is not available, becomes REFUSED; its oracle
is used and one warning says so. Stages or instances that contradict their oracle are an error of
the detector: ``BoxcovError``. If a frame has too few boxes for a verdict (``verification.py``), the
oracle's numbers are returned and the next frame is compared again.

The route is logged when it is fixed (logger "boxcov", level INFO) and shown by ``repr(model)``.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from logging import getLogger
from typing import Any, get_args
from warnings import warn

import torch
from torch import Tensor

from boxcov._torch.precision import Precision
from boxcov.detector import InstanceGroup
from boxcov.errors import BoxcovError, BoxcovWarning, join_names
from boxcov.posterior.posterior import Posterior
from boxcov.predict.cuda.static_graph import CaptureError, GraphPass, StaticGraph
from boxcov.predict.forward_mode.propagation import TangentPropagation
from boxcov.predict.forward_mode.tangents import NoRule, Tangents
from boxcov.predict.head.stages import StagedHead, StagedResult
from boxcov.predict.head.weights import TOLERANCE
from boxcov.predict.instances import (
    Dependence,
    compare_with_decode,
    has_instances,
    instance_groups,
    leaves_read,
    method_name,
    with_leaves,
)
from boxcov.predict.linearize import LinearizationPoint, LinearizedDetector
from boxcov.predict.verification import (
    State,
    Verdict,
    Verification,
    judge_boxes,
    judge_weights,
    relative_errors,
    rounding_tolerance,
)

_LOG = getLogger("boxcov")
_HALF_TANGENTS_TOLERANCE = 0.15


@dataclass(frozen=True)
class EngineOptions:
    """Speed against accuracy and memory; the defaults give float32 accuracy.

    precision: arithmetic of matrix products on a GPU: "float32", or "tf32", which is faster and
        less exact; "half" also propagates tangents in bfloat16, on a CPU too.
    tolerance: relative error allowed for each variance of the posterior in a head with stages;
        1e-3 or 1e-2 may be much faster.
    cuda_graphs: on a GPU, replay the static part of the detector and the head's stages as CUDA
        graphs; they hold memory.
    chunk: number of directions differentiated at once by vmap(jvp), to bound memory; None for all.

    >>> EngineOptions(precision="tf32")
    EngineOptions(precision='tf32', tolerance=1e-05, cuda_graphs=True, chunk=None)
    """

    precision: Precision = "float32"
    tolerance: float = TOLERANCE
    cuda_graphs: bool = True
    chunk: int | None = None

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            known = ", ".join(get_args(Precision))
            raise BoxcovError(f"precision must be one of {known}, got {self.precision!r}")
        if not 1e-6 <= self.tolerance <= 0.1:
            raise BoxcovError(f"tolerance must lie between 1e-6 and 0.1, got {self.tolerance!r}")
        if self.chunk is not None and (not isinstance(self.chunk, int) or self.chunk < 1):
            raise BoxcovError(
                f"chunk must be a whole number of directions of at least 1, got {self.chunk!r}"
            )


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
    """Runs the plain pass of every frame; derivatives run the whole network again."""

    def __init__(self, linearized: LinearizedDetector, options: EngineOptions) -> None:
        self.linearized, self.options = linearized, options
        self.route: Route | None = None  # None before the first boxes
        self.graph_check = Verification()
        self.graph = StaticGraph(linearized.detector, linearized.weights.values())
        if not options.cuda_graphs or not self.graph.is_available():
            self.graph_check.refuse()

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
        _warn(f"{name}.static_part() {reason}; it now runs without a CUDA graph, which is slower")


class InstanceRouter(Router):
    """Runs the head per instance if all posterior weights that affect the boxes are in it."""

    def __init__(self, linearized: LinearizedDetector, options: EngineOptions) -> None:
        super().__init__(linearized, options)
        self.instances_check = Verification()
        self._dependence: dict[bool, Dependence] = {}  # with logits or without

    def needs_trunk(self) -> bool:
        return self.instances_check.state is not State.VERIFIED

    def groups(self, point: LinearizationPoint) -> list[InstanceGroup] | None:
        """The instances of a frame; None if the whole network has to run."""
        if self.instances_check.state is State.UNVERIFIED:
            self._decide(point)
        return instance_groups(point) if self.instances_check.state is State.VERIFIED else None

    def _decide(self, point: LinearizationPoint) -> None:
        if not has_instances(point):
            self.instances_check.refuse()
        else:
            watched = with_leaves(point)
            with torch.inference_mode(False), torch.enable_grad():
                read = {leaf for _, run in instance_groups(watched) for leaf in leaves_read(run())}
            if not self._verify_instances(watched, {""}):
                return
            if self._dependence[point.logits is not None].upstream_of(watched.raw, read):
                self.instances_check.refuse()
        is_refused = self.instances_check.is_refused
        self.settle("the whole network" if is_refused else "instances")

    def _verify_instances(self, point: LinearizationPoint, weights: set[str]) -> bool:
        """Compare with decode(); False if the frame has too few boxes to decide."""
        found = compare_with_decode(point)
        self._dependence[point.logits is not None] = found.dependence
        tolerance = rounding_tolerance(w.dtype for w in self.linearized.weights.values())
        method = method_name(point)
        oracle = "decode()" if point.logits is None else "decode() with logits()"
        errors = found.value_errors(point)
        if not bool((errors <= tolerance).all()):  # values have no kinks: every box must agree
            row = int(errors.argmax())
            raise BoxcovError(
                f"{method} gives box {row} as {found.by_instance[row].tolist()}, {oracle} gives "
                f"{found.decoded[row].tolist()}"
            )
        gradients = found.gradient_errors
        verdict = judge_weights(gradients.values(), len(errors), tolerance)
        if verdict is Verdict.CONTRADICTS:
            wrong = [name for name, error in gradients.items() if not error <= tolerance]
            raise BoxcovError(
                f"{method} gives other gradients than {oracle} for {join_names(wrong)}: is its "
                "crop too small, or its border off?"
            )
        if verdict is Verdict.AGREES:
            self.instances_check.accept((point.logits is not None, name) for name in weights)
        return verdict is Verdict.AGREES


class TangentRouter(Router):
    """Shared by the routers that can propagate tangents and use the stages of a head."""

    def __init__(
        self, linearized: LinearizedDetector, posterior: Posterior, options: EngineOptions
    ) -> None:
        super().__init__(linearized, options)
        self.posterior = posterior
        self.stages_check, self.tangents_check = Verification(), Verification()
        self.staged_head = StagedHead(
            posterior, options.precision, options.tolerance, options.cuda_graphs
        )
        self.propagation = TangentPropagation(linearized.weights, options.precision)

    def new_kinds(self, staged: StagedResult) -> set[Hashable]:
        """Kinds of boxes in this frame for which the stages are not verified yet."""
        every: set[Hashable] = {(staged.layers, kind) for kind in range(staged.n_kinds)}
        if self.stages_check.covers(every):
            return set()
        present: set[Hashable] = {(staged.layers, kind) for kind in staged.kind.unique().tolist()}
        return present - self.stages_check.subjects

    def verify_stages(self, staged: StagedResult, slow: Tensor) -> bool:
        """Compare the head's part of all boxes with the oracle's; False if undecided."""
        errors = relative_errors(staged.head, slow)
        verdict = judge_boxes(errors)
        if verdict is Verdict.CONTRADICTS:
            row = int(errors.argmax())
            raise BoxcovError(
                f"stages() contradicts instances() or decode(): box {row} has "
                f"{staged.head[row].diagonal().tolist()} by stages, "
                f"{slow[row].diagonal().tolist()} without; is a stage missing, or its norm or "
                "activation different?"
            )
        if verdict is Verdict.AGREES:
            self.stages_check.accept(self.new_kinds(staged))
        return verdict is Verdict.AGREES

    def verify_tangents(self, fast: Tensor, slow: Tensor, tangents: Tangents) -> bool:
        """Compare derivatives (m, D, k) with those of vmap(jvp); refuse them if they contradict."""
        is_half = self.options.precision == "half"
        errors = relative_errors(fast, slow)
        tolerance = _HALF_TANGENTS_TOLERANCE if is_half else 3e-2
        verdict = judge_boxes(errors, tolerance)
        if verdict is Verdict.AGREES:
            self.tangents_check.accept({tangents.ends})
        elif verdict is Verdict.CONTRADICTS:
            self.tangents_check.refuse()
            wrong = int((~(errors <= tolerance)).sum())
            _warn(
                f"propagated tangents differ from vmap(jvp) for {wrong} of {len(errors)} boxes, so "
                "vmap(jvp) is used, which is slower: does the network write into tensors that it "
                "has already passed on?"
            )
        return verdict is Verdict.AGREES


def _warn(message: str) -> None:
    warn(message, BoxcovWarning, stacklevel=2)
