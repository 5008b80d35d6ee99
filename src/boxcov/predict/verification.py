"""One policy for all verifications: when does a fast engine agree with its slow oracle?

Rounding differs between two engines, and an activation at its kink (ReLU at zero) may fall to
either side, which changes a box's derivatives by some per cent. A few boxes that differ are
therefore no contradiction, and a frame with few boxes decides nothing unless the difference is
far beyond rounding.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from enum import Enum

import torch
from torch import Tensor

TOLERANCE = 3e-2  # relative difference of a box's derivatives that a kink may cause in float32
ENOUGH_BOXES = 8


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
    """State of one engine, and the subjects (kinds of boxes, weights, graphs) it was verified for.

    >>> stages = Verification()
    >>> stages.accept({0, 1})
    >>> stages.state.value, stages.covers({0}), stages.covers({0, 2})
    ('verified', True, False)
    """

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
    errors: Tensor = (fast - slow).flatten(1).norm(dim=1) / scale
    return errors


def judge_boxes(errors: Tensor, tolerance: float = TOLERANCE) -> Verdict:
    """Verdict on relative differences (m,) of the covariance or derivatives of each box.

    With at least 8 boxes, more than a quarter of them off is a contradiction. With 2 to 7 boxes
    only a difference of ten times the tolerance for all of them is one.

    >>> judge_boxes(torch.tensor([1e-6, 1e-6])), judge_boxes(torch.tensor([1e-6, 0.05])).value
    (<Verdict.AGREES: 'agrees'>, 'undecided')
    """
    wrong = int((~(errors <= tolerance)).sum())  # NaN is wrong
    if wrong == 0:
        return Verdict.AGREES
    if len(errors) >= ENOUGH_BOXES:
        return Verdict.AGREES if wrong <= len(errors) // 4 else Verdict.CONTRADICTS
    far = bool((~(errors <= 10 * tolerance)).all())
    return Verdict.CONTRADICTS if far and len(errors) > 1 else Verdict.UNDECIDED


def judge_weights(errors: Iterable[float], boxes: int, tolerance: float) -> Verdict:
    """Verdict on relative differences of gradients that were summed over ``boxes`` boxes."""
    worst = max((float("inf") if error != error else error for error in errors), default=0.0)
    if worst <= tolerance:
        return Verdict.AGREES
    is_clear = boxes >= ENOUGH_BOXES or (boxes > 1 and worst > 10 * tolerance)
    return Verdict.CONTRADICTS if is_clear else Verdict.UNDECIDED


def rounding_tolerance(dtypes: Iterable[torch.dtype]) -> float:
    """Relative difference that rounding may cause in a network with weights of these dtypes.

    >>> rounding_tolerance([torch.float32]), rounding_tolerance([torch.bfloat16])
    (0.01, 0.5)
    """
    return max(1e-2, 64 * max(torch.finfo(dtype).eps for dtype in dtypes))
