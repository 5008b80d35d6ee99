"""A selection of fixed size: the reported boxes, then padding. Static graphs need it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from boxcov.errors import BoxcovError, check_positive

if TYPE_CHECKING:
    from boxcov.detector import Selection

# The longest chain of boxes, each suppressing the next, that ``static_nms`` resolves.
NMS_ROUNDS = 16


@dataclass(frozen=True)
class StaticLimits:
    """The sizes of a static graph; ``StaticSelection.left_off`` counts what exceeds them.

    >>> StaticLimits(boxes=50).candidates
    256
    """

    boxes: int = 100  # reported boxes, by descending score
    candidates: int = 256  # before NMS: per task of a CenterPoint, per image of a YOLOX
    pairs: int = 8192  # near candidates whose rotated overlap is computed

    def __post_init__(self) -> None:
        for name in ("boxes", "candidates", "pairs"):
            check_positive(name, getattr(self, name))


@dataclass(frozen=True)
class StaticSelection:
    """The instances of ``Detector.select``, in its order, in the first ``count`` of n rows."""

    selection: Selection  # n rows; those from ``count`` on are padding, at arbitrary cells
    count: Tensor  # () number of boxes
    left_off: Tensor  # () candidates, pairs and boxes beyond the limits; 0: the boxes are complete
    kind: Tensor | None = None  # (n,) the group of each row, if instances() has several groups
    of_kind: tuple[Selection, ...] = ()  # for each kind, the same rows as if all were of that kind

    @property
    def valid(self) -> Tensor:
        """Whether each row is a box (n,)."""
        return torch.arange(len(self.selection), device=self.count.device) < self.count


def static_nms(suppresses: Tensor) -> tuple[Tensor, Tensor]:
    """Return which boxes greedy NMS keeps (G, k), and whether ``NMS_ROUNDS`` rounds were enough ().

    suppresses: (G, k, k) is 1 where the row's box suppresses the column's, boxes by descending
    score. The result is that of ``greedy_nms``, but no shape or branch depends on the data.

    >>> suppresses = torch.zeros(1, 3, 3)
    >>> suppresses[0, 0, 1] = suppresses[0, 1, 2] = 1
    >>> static_nms(suppresses)  # a removed box removes no other
    (tensor([[ True, False,  True]]), tensor(True))
    """
    kept = ones = torch.ones_like(suppresses[:, :1])  # (G, 1, k)
    before = kept
    for _ in range(NMS_ROUNDS):
        before, kept = kept, torch.baddbmm(ones, kept, suppresses, alpha=-1).relu()
    return kept[:, 0] > 0.5, (kept == before).all()


def best_rows(scores: Tensor, kept: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the indices of the n best ``kept`` scores (k,), and two counts.

    The counts are the number of valid indices, and of kept scores that did not fit into n rows.

    >>> best_rows(torch.tensor([0.2, 0.9, 0.5]), torch.tensor([True, False, True]), 1)
    (tensor([2]), tensor(1), tensor(1))
    """
    n, k = min(n, len(scores)), len(scores)
    key = torch.where(kept, scores, -1.0)
    total = kept.long().sum()
    if k > 8 * n:  # pairs of all scores would be too many
        best = key.topk(n).indices.sort().values
        return best[best_rows(key[best], kept[best], n)[0]], *_counts(total, n)
    place = torch.arange(k, device=scores.device)
    # equal scores keep their order, as in ``Detector.select``; ONNX has no stable sort
    is_ahead = (key.unsqueeze(0) > key.unsqueeze(1)) | (
        (key.unsqueeze(0) == key.unsqueeze(1)) & (place.unsqueeze(0) < place.unsqueeze(1))
    )
    rank = is_ahead.long().sum(1)
    index = torch.zeros_like(place).scatter(0, rank, place)[:n]
    return index, *_counts(total, n)


def _counts(total: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return how many of ``total`` fit into n rows, and how many do not."""
    return total.clamp(max=n), (total - n).clamp(min=0)


def first_rows(scores: Tensor, kept: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return what ``best_rows`` returns, with the valid indices in ascending order.

    >>> first_rows(torch.tensor([0.2, 0.9, 0.5]), torch.tensor([True, False, True]), 2)
    (tensor([0, 2]), tensor(2), tensor(0))
    """
    index, count, excess = best_rows(scores, kept, n)
    row = torch.arange(len(index), device=index.device)
    order = torch.where(row < count, index, len(scores) + row).argsort()
    return index[order], count, excess


def check_one_frame(batch: int) -> None:
    """Raise unless there is one frame: the rows of a static selection are those of one."""
    if batch != 1:
        raise BoxcovError(f"a static selection takes one image, got a batch of {batch}")
