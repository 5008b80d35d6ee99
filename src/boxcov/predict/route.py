"""The routers decide how a frame is computed: the rules and all states are here.

The decisions of ExactGLM are in ``exact.py``, those of MCGLM in ``mcglm.py``.

A router holds one ``Verification`` per fast engine and chooses among them on the first boxes:

==========================  ====================================================================
engine                      verified against
==========================  ====================================================================
``InstanceEngine``          ``decode()``: equal boxes, equal gradients
``StagedHead``, exact       ``InstanceEngine``, for every kind of box (``exact.py``)
``StagedHead``, directions  vmap(jvp), for every kind of box (``mcglm.py``)
``TangentPropagation``      vmap(jvp)
``StaticGraph``             the plain pass, bit for bit
==========================  ====================================================================

Autograd and vmap(jvp) work for any detector; they are the oracles and need no verification. An
engine starts UNVERIFIED. It becomes VERIFIED when it agrees with its oracle. Its
result is used for that frame and all later ones, so a frame gives the same result whether it comes
first or later. A new kind of box (another task or level) is verified when it first appears.
An optional speed-up that contradicts its oracle, or is not available, becomes REFUSED; its oracle
is used and one warning says so. Stages or instances that contradict their oracle are an error of
the detector: ``BoxcovError``.

Rounding differs between two engines, and an activation at its kink (ReLU at zero) may fall to
either side, which changes a box's derivatives by some per cent. A few boxes that differ are
therefore no contradiction, and a frame with few boxes decides nothing unless the difference is far
beyond rounding: the oracle's numbers are then returned, and the next frame is compared again.

The route is logged when it is fixed (logger "boxcov", level INFO) and shown by ``repr(model)``.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from logging import getLogger
from typing import Any, Literal
from warnings import warn

import torch
from torch import Tensor

from boxcov._torch.process_state import Precision
from boxcov.errors import BoxcovError, BoxcovWarning, check_choice
from boxcov.posterior.posterior import Posterior
from boxcov.predict.cuda.static_graph import CaptureError, GraphPass, StaticGraph
from boxcov.predict.forward_mode.derivatives import TangentPropagation
from boxcov.predict.forward_mode.tangents import NoRule, Tangents
from boxcov.predict.head.stages import StagedHead, StagedResult
from boxcov.predict.head.weights import TOLERANCE
from boxcov.predict.linearize import LinearizationPoint, LinearizedDetector

_LOG = getLogger("boxcov")
BOX_TOLERANCE = 3e-2  # relative difference of a box's derivatives that a kink may cause in float32
_ENOUGH_BOXES = 8
_VERIFIED_BOXES = 128  # of a frame with more: its first pass would take 10 ms for each


@dataclass(frozen=True)
class EngineOptions:
    """Speed against accuracy and memory; the defaults give float32 accuracy.

    precision: arithmetic of matrix products on a GPU: "float32", or "tf32", which is faster and
        less exact.
    tolerance: relative error allowed for each variance of the posterior in a head with stages;
        1e-3 or 1e-2 may be much faster.
    cuda_graphs: on a GPU, replay the static part of the detector and the head's stages as CUDA
        graphs; they hold memory.
    verify: number of calls within which weights that were changed in place are noticed, whatever
        changed them; every call reads this share of the weights. "always" reads all in each call.

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


class Verdict(Enum):
    """Result of one comparison."""

    AGREES = "agrees"
    UNDECIDED = "undecided"  # the frame has too few boxes: use the slow result, compare again
    CONTRADICTS = "contradicts"


class State(Enum):
    """What is known about an engine."""

    UNVERIFIED = "unverified"
    VERIFIED = "verified"
    REFUSED = "refused"  # not available for this detector, or it contradicted its oracle


class Verification:
    """State of one engine, and the subjects (kinds of boxes, weights, graphs) that it covers."""

    def __init__(self) -> None:
        self.state = State.UNVERIFIED
        self.subjects: set[Hashable] = set()

    def accept(self, subjects: Iterable[Hashable]) -> None:
        self.state = State.VERIFIED
        self.subjects.update(subjects)

    def refuse(self) -> None:
        self.state = State.REFUSED

    def covers(self, subjects: Iterable[Hashable]) -> bool:
        """Whether the engine is verified for all ``subjects``."""
        return self.state is State.VERIFIED and self.subjects.issuperset(subjects)

    @property
    def is_refused(self) -> bool:
        return self.state is State.REFUSED


def relative_errors(fast: Tensor, slow: Tensor) -> Tensor:
    """Relative difference (m,) of each box's numbers (m, ...)."""
    scale = slow.flatten(1).norm(dim=1).clamp(min=1e-30)
    return (fast - slow).flatten(1).norm(dim=1) / scale


def judge_boxes(errors: Tensor, tolerance: float = BOX_TOLERANCE) -> Verdict:
    """Verdict on relative differences (m,) of the covariance or derivatives of each box.

    With at least 8 boxes, more than a quarter of them off is a contradiction. With 2 to 7 boxes
    only a difference of ten times the tolerance for all of them is one.
    """
    wrong = int((~(errors <= tolerance)).sum())  # NaN is wrong
    if wrong == 0:
        return Verdict.AGREES
    if len(errors) >= _ENOUGH_BOXES:
        return Verdict.AGREES if wrong <= len(errors) // 4 else Verdict.CONTRADICTS
    far = bool((~(errors <= 10 * tolerance)).all())
    return Verdict.CONTRADICTS if far and len(errors) > 1 else Verdict.UNDECIDED


def judge_weights(
    errors: Mapping[str, float], boxes: Mapping[str, int], tolerance: float
) -> Verdict:
    """Verdict on relative differences of gradients by weight.

    boxes: how many boxes each gradient was summed over. A few boxes may sit at a kink.
    """
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}  # NaN is
    if not wrong:
        return Verdict.AGREES
    for name, error in wrong.items():
        count = boxes[name]
        if count >= _ENOUGH_BOXES or (count > 1 and not error <= 10 * tolerance):
            return Verdict.CONTRADICTS
    return Verdict.UNDECIDED


def rounding_tolerance(weights: Iterable[Tensor]) -> float:
    """Relative difference that rounding may cause in a network with these weights.

    Convolutions in float32 on a GPU are in TF32 by default, which has the digits of float16.
    """
    uses_tf32 = torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
    dtypes = {
        torch.float16 if w.is_cuda and uses_tf32 and w.dtype == torch.float32 else w.dtype
        for w in weights
    }
    return max(1e-2, 64 * max(torch.finfo(dtype).eps for dtype in dtypes))


class Router:
    """Runs the plain pass of every frame; derivatives run the whole network again."""

    def __init__(self, linearized: LinearizedDetector, options: EngineOptions) -> None:
        self.linearized, self.options = linearized, options
        self.route: Route | None = None  # None before the first boxes
        self.graph_check = Verification()
        on_gpu = next(linearized.detector.parameters()).is_cuda
        if not (options.cuda_graphs and on_gpu and self.graph.is_available()):
            self.graph_check.refuse()

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

    @cached_property
    def propagation(self) -> TangentPropagation:
        return TangentPropagation(self.linearized.weights, self.options.precision)

    def new_kinds(self, staged: StagedResult) -> set[Hashable]:
        """Kinds of boxes in this frame for which the stages are not verified yet."""
        every: set[Hashable] = {(staged.layers, kind) for kind in range(staged.n_kinds)}
        if self.stages_check.covers(every):
            return set()
        present: set[Hashable] = {(staged.layers, kind) for kind in staged.kind.unique().tolist()}
        return present - self.stages_check.subjects

    def rows_to_verify(self, staged: StagedResult) -> Tensor:
        """The boxes (n,) on which new kinds are verified: up to 128, spread over these kinds."""
        new = self.new_kinds(staged)
        kinds = [k for k in staged.kind.unique().tolist() if (staged.layers, k) in new]
        most = max(_ENOUGH_BOXES, _VERIFIED_BOXES // len(kinds))
        found = [(staged.kind == kind).nonzero()[:, 0] for kind in kinds]
        return torch.cat([rows[:: -(-len(rows) // most)] for rows in found]).sort().values

    def verify_stages(self, staged: StagedResult, slow: Tensor, rows: Tensor | None = None) -> bool:
        """Compare the head's part with the oracle's; False if undecided.

        rows: the boxes of ``slow``, if not all.
        """
        rows = torch.arange(len(staged.kind)) if rows is None else rows
        fast, kind = staged.head[rows], staged.kind[rows]
        errors = relative_errors(fast, slow)
        # a kind of few boxes must not pass because the others agree
        for which in (torch.ones_like(kind) > 0, *(kind == one for one in kind.unique())):
            if judge_boxes(errors[which]) is Verdict.CONTRADICTS:
                row = int(errors.where(which, 0).argmax())
                raise BoxcovError(
                    f"stages() contradicts instances() or decode(): box {int(rows[row])} has "
                    f"{fast[row].diagonal().tolist()} by stages, "
                    f"{slow[row].diagonal().tolist()} without; is a stage missing, or its norm or "
                    "activation different?"
                )
        agrees = judge_boxes(errors) is Verdict.AGREES
        if agrees:
            self.stages_check.accept(self.new_kinds(staged))
        return agrees

    def verify_tangents(self, fast: Tensor, slow: Tensor, tangents: Tangents) -> bool:
        """Compare derivatives (m, D, k) with those of vmap(jvp); refuse them if they contradict."""
        errors = relative_errors(fast, slow)
        verdict = judge_boxes(errors)
        if verdict is Verdict.AGREES:
            self.tangents_check.accept({tangents.ends})
        elif verdict is Verdict.CONTRADICTS:
            self.tangents_check.refuse()
            wrong = int((~(errors <= BOX_TOLERANCE)).sum())
            warn_of_route(
                f"propagated tangents differ from vmap(jvp) for {wrong} of {len(errors)} boxes, so "
                "vmap(jvp) is used, which is slower: does the network write into tensors that it "
                "has already passed on?"
            )
        return verdict is Verdict.AGREES


def warn_of_route(message: str) -> None:
    warn(message, BoxcovWarning, stacklevel=2)
