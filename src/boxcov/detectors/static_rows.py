"""Boxes after a threshold and NMS per class, in a fixed number of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from boxcov.detectors.boxes import iou
from boxcov.static_selection import StaticLimits, best_rows, static_nms


@dataclass(frozen=True)
class ScoredBoxes:
    """All k boxes of one image, before NMS."""

    scores: Tensor  # (k,)
    boxes: Tensor  # (k, 4), x1 y1 x2 y2
    number: Tensor  # (k,) the model's class
    above: Tensor  # (k,) whether the score is above the model's threshold
    reported: Tensor  # (k,) whether the box would be reported if NMS keeps it


def rows_after_nms(
    found: ScoredBoxes, overlap: float, max_boxes: int, limits: StaticLimits
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the indices (n,) of the reported boxes by descending score, their number, and excess.

    The model keeps at most ``max_boxes`` after NMS. The last count is that of
    ``StaticSelection.left_off``.

    >>> boxes = torch.tensor([[0.0, 0, 2, 2], [0, 0, 2, 1.9], [5, 5, 6, 6]])
    >>> every = torch.ones(3, dtype=torch.bool)
    >>> found = ScoredBoxes(torch.tensor([0.6, 0.9, 0.8]), boxes, torch.zeros(3), every, every)
    >>> rows_after_nms(found, 0.5, 10, StaticLimits(boxes=2))
    (tensor([1, 2]), tensor(2), tensor(0))
    """
    index, candidates, beyond = best_rows(found.scores, found.above, limits.candidates)
    valid = torch.arange(len(index), device=index.device) < candidates
    boxes = found.boxes[index]
    suppresses = suppression_matrix(boxes, found.number[index], overlap)
    suppresses = suppresses & valid & valid.unsqueeze(1)
    kept, converged = static_nms(suppresses.to(boxes.dtype).unsqueeze(0))
    kept = kept[0] & valid
    kept = kept & (kept.cumsum(0) <= max_boxes) & found.reported[index]
    rows, count, excess = best_rows(found.scores[index], kept, limits.boxes)
    return index[rows], count, beyond + excess + (~converged).long()


def level_of(index: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the level (m,) of cells or anchors, of which each level has so many.

    >>> level_of(torch.tensor([0, 5, 4]), [4, 1, 1])
    tensor([0, 2, 1])
    """
    level = torch.zeros_like(index)
    for stop in accumulate(counts[:-1]):
        level = level + (index >= stop)
    return level


def on_each_level(index: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Return cells or anchors (m,) as they are on their own level, and any on every other.

    >>> on_each_level(torch.tensor([0, 5, 4]), [4, 2])
    [tensor([0, 3, 3]), tensor([4, 5, 4])]
    """
    stops = list(accumulate(counts))
    return [index.clamp(stop - count, stop - 1) for stop, count in zip(stops, counts)]


def suppression_matrix(boxes: Tensor, labels: Tensor, overlap: float) -> Tensor:
    """Return which boxes suppress which (k, k): later ones of their class, by IoU.

    boxes: (k, 4), x1 y1 x2 y2, by descending score.
    """
    return ((iou(boxes[:, None], boxes) > overlap) & (labels.unsqueeze(1) == labels)).triu(1)
