"""A selection of fixed size, for graphs whose shapes may not depend on the frame: what a detector reports, and rows that are none behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from boxcov.errors import BoxcovError

if TYPE_CHECKING:
    from boxcov.detector import Selection

ROUNDS = (
    16  # of suppression: the longest chain of boxes, each suppressing the next, that is followed
)


@dataclass(frozen=True)
class StaticLimits:
    """How much a graph of fixed size has room for. What does not fit is counted in ``StaticSelection.left_off``.

    >>> StaticLimits(boxes=50).candidates
    256
    """

    boxes: int = 100  # that are reported, by falling score
    candidates: int = (
        256  # before NMS, by falling score: of each task of a CenterPoint, of the image of a YOLOX
    )
    pairs: int = 8192  # of candidates near each other, whose overlap is computed where that is dear: rotated boxes

    def __post_init__(self) -> None:
        for name in ("boxes", "candidates", "pairs"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise BoxcovError(f"{name} must be a whole number of at least 1, got {value!r}")


@dataclass(frozen=True)
class StaticSelection:
    """The instances that ``Detector.select`` reports in the first rows of n, in its order, as far as they fit."""

    selection: Selection  # n rows; from ``count`` on they are of any cell, and mean nothing
    count: Tensor  # () how many rows are boxes
    left_off: Tensor  # () what did not fit, of candidates, pairs and boxes; 0: these are the detector's boxes
    kind: Tensor | None = (
        None  # (n,) where instances() runs groups of boxes apart: which group a row belongs to
    )
    of_kind: tuple[Selection, ...] = ()  # the same rows, as if all were of one kind

    @property
    def valid(self) -> Tensor:
        """Which rows are boxes (n,)."""
        return torch.arange(len(self.selection), device=self.count.device) < self.count


def suppressed(rivals: Tensor) -> tuple[Tensor, Tensor]:
    """What greedy suppression keeps of G times k boxes by falling score, where ``rivals`` (G, k, k) tells which would suppress which,
    and whether ``ROUNDS`` rounds were enough. The same as ``greedy`` of the detectors, without a loop that looks at the numbers.

    >>> rivals = torch.zeros(1, 3, 3)
    >>> rivals[0, 0, 1] = rivals[0, 1, 2] = 1
    >>> suppressed(rivals)  # what was removed removes nothing
    (tensor([[ True, False,  True]]), tensor(True))
    """
    stays = torch.ones_like(rivals[:, 0])  # (G, k)
    before = stays
    for _ in range(ROUNDS):
        before, stays = stays, ((stays.unsqueeze(1) @ rivals).squeeze(1) < 0.5).to(rivals.dtype)
    return stays > 0.5, (stays == before).all()


def best(scores: Tensor, stays: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of scores (n,), the ``most`` best that stay: their numbers, how many there are, and how many there was no room for.

    >>> best(torch.tensor([0.2, 0.9, 0.5]), torch.tensor([True, False, True]), 1)
    (tensor([2]), tensor(1), tensor(1))
    """
    held = min(most, len(scores))
    index = torch.where(stays, scores, scores.new_full((), -1.0)).topk(held).indices
    total = stays.long().sum()
    return index, total.clamp(max=held), (total - held).clamp(min=0)
