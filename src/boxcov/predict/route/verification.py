"""Comparisons of a fast engine with its oracle, and what is known about the engine so far."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from enum import Enum
from warnings import warn

import torch
from torch import Tensor

from boxcov._torch.modules import check_fingerprint
from boxcov._torch.process_state import allows_tf32
from boxcov.detector import Detector
from boxcov.errors import BoxcovError, BoxcovWarning
from boxcov.predict.head.stages import StagedResult
from boxcov.predict.linearize import LinearizationPoint, short_way

BOX_TOLERANCE = 3e-2  # relative difference of a box's derivatives that a kink may cause in float32
_ENOUGH_BOXES = 8
_VERIFIED_BOXES = 128  # compare at most this many boxes per frame; each costs about 10 ms


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
        return self.is_verified and self.subjects.issuperset(subjects)

    @property
    def is_verified(self) -> bool:
        return self.state is State.VERIFIED

    @property
    def is_refused(self) -> bool:
        return self.state is State.REFUSED


class StagesCheck(Verification):
    """Verifies the stages of a head; its subjects are kinds of boxes."""

    def new_kinds(self, staged: StagedResult) -> list[int]:
        """Kinds of boxes in this frame for which the stages are not verified yet."""
        if self.covers({(staged.layers, kind) for kind in range(staged.n_kinds)}):
            return []
        present = staged.kind.unique().tolist()
        return [kind for kind in present if (staged.layers, kind) not in self.subjects]

    def same_boxes(self, staged: StagedResult, point: LinearizationPoint) -> bool:
        """Whether the stages give the boxes of the plain pass.

        Compared in every frame, because stages may be right for the boxes that they were verified
        on alone: those of single frames, or those away from the border. Not on a GPU, where it
        would be one more synchronisation.
        """
        if staged.boxes.is_cuda:
            return True
        tolerance = rounding_tolerance(point.linearized.weights.values())
        return bool((box_errors(staged.boxes, point.boxes, point.shadow) <= tolerance).all())

    def rows_to_compare(self, staged: StagedResult) -> Tensor:
        """The boxes (n,) on which new kinds are verified: up to 128, spread over these kinds."""
        kinds = self.new_kinds(staged)
        most = max(_ENOUGH_BOXES, _VERIFIED_BOXES // len(kinds))
        found = [(staged.kind == kind).nonzero()[:, 0] for kind in kinds]
        return torch.cat([rows[:: -(-len(rows) // most)] for rows in found]).sort().values

    def compare(self, staged: StagedResult, slow: Tensor, rows: Tensor | None = None) -> bool:
        """Whether the head's part agrees with the oracle's, for every new kind of box.

        Kinds that agree are accepted, also if others are undecided.
        rows: the boxes of ``slow``, if not all.
        """
        rows = torch.arange(len(staged.kind)) if rows is None else rows
        fast, kind = staged.head[rows], staged.kind[rows]
        errors = relative_errors(fast, slow)
        accepted, new = [], self.new_kinds(staged)
        # a kind of few boxes must not pass because the others agree
        for one in (None, *kind.unique().tolist()):
            which = kind >= 0 if one is None else kind == one
            verdict = judge_boxes(errors[which])
            if verdict is Verdict.CONTRADICTS:
                row = int(errors.where(which, 0).argmax())
                raise BoxcovError(
                    f"stages() contradicts instances() or decode(): box {int(rows[row])}: relative "
                    f"difference {float(errors[row]):.2g} between stages() and the reference "
                    f"(tolerance {BOX_TOLERANCE:g}); is a stage missing, or its norm or activation "
                    "different?"
                )
            if verdict is Verdict.AGREES and one in new:
                accepted.append((staged.layers, one))
        if accepted:
            self.accept(accepted)
        return not self.new_kinds(staged)


class TangentsCheck(Verification):
    """Verifies propagated tangents; its subjects are the weights at which propagation ends.

    The tolerance is that of kinks: rounding to the 10 bits of TF32 or float16 in each of 20 layers
    changes the derivatives of a box by 0.1 to 0.4 per cent.
    """

    def contradicts(self, fast: Tensor, slow: Tensor) -> bool:
        """Whether derivatives (m, D, k) contradict those of vmap(jvp)."""
        return judge_boxes(relative_errors(fast, slow)) is Verdict.CONTRADICTS

    def compare(self, fast: Tensor, slow: Tensor, ends: frozenset[int]) -> bool:
        """Whether derivatives (m, D, k) agree with those of vmap(jvp); a contradiction refuses."""
        errors = relative_errors(fast, slow)
        verdict = judge_boxes(errors)
        if verdict is Verdict.AGREES:
            self.accept({ends})
        elif verdict is Verdict.CONTRADICTS:
            self.refuse()
            wrong = int((~(errors <= BOX_TOLERANCE)).sum())
            warn_of_route(
                f"propagated tangents differ from vmap(jvp) for {wrong} of {len(errors)} boxes, so "
                "vmap(jvp) is used, which is slower: does the network write into tensors that it "
                "has already passed on?"
            )
        return verdict is Verdict.AGREES


def box_errors(z: Tensor, decoded: Tensor, detector: Detector) -> Tensor:
    """Largest difference (m,) of the numbers (m, D) of each box, relative to one plus their size.

    Infinite numbers of ``decode()`` are left to the check of the result.
    """
    delta = short_way(z.detach() - decoded.detach(), detector).abs()
    return (delta / (1 + decoded.abs())).where(decoded.isfinite(), 0.0).amax(1)


def relative_errors(fast: Tensor, slow: Tensor) -> Tensor:
    """Relative difference (m,) of each box's numbers (m, ...)."""
    scale = slow.flatten(1).norm(dim=1).clamp(min=1e-30)
    return (fast - slow).flatten(1).norm(dim=1) / scale


def judge_boxes(errors: Tensor) -> Verdict:
    """Verdict on relative differences (m,) of the covariance or derivatives of each box.

    With at least 8 boxes, more than a quarter of them off is a contradiction. With 2 to 7 boxes
    only a difference of ten times the tolerance for all of them is one. One box alone is never a
    contradiction.
    """
    wrong = int((~(errors <= BOX_TOLERANCE)).sum())  # NaN counts as wrong
    if wrong == 0:
        return Verdict.AGREES
    if len(errors) >= _ENOUGH_BOXES:
        return Verdict.AGREES if wrong <= len(errors) // 4 else Verdict.CONTRADICTS
    far = bool((~(errors <= 10 * BOX_TOLERANCE)).all())
    return Verdict.CONTRADICTS if far and len(errors) > 1 else Verdict.UNDECIDED


def judge_weights(
    errors: Mapping[str, float], boxes: Mapping[str, int], tolerance: float
) -> Verdict:
    """Verdict on relative differences of gradients by weight.

    boxes: how many boxes each gradient was summed over. A few boxes may sit at a kink.
    """
    # NaN counts as wrong
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
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
    uses_tf32 = any(allows_tf32())
    dtypes = {
        torch.float16 if w.is_cuda and uses_tf32 and w.dtype == torch.float32 else w.dtype
        for w in weights
    }
    return max(1e-2, 64 * max(torch.finfo(dtype).eps for dtype in dtypes))


def warn_of_boxes(point: LinearizationPoint, fingerprint: str, method: str) -> None:
    """Warn that stages give other boxes than ``decode()``; raise if the weights have changed."""
    check_fingerprint(fingerprint, point.linearized.detector, method)
    warn_of_route(
        f"{type(point.shadow).__name__}.stages() gives other boxes than decode() in some frames, "
        "which are computed without stages, slower: are its frame, row, column and kind those of "
        "the selection?"
    )


def warn_of_route(message: str) -> None:
    warn(message, BoxcovWarning, stacklevel=2)
