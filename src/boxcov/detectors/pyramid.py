"""Boxes on the levels of a pyramid: their cells, and a selection in a fixed number of rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from boxcov.detector import Selection
from boxcov.detectors.boxes import iou
from boxcov.static_selection import StaticLimits, StaticSelection, best_rows, static_nms


@dataclass(frozen=True)
class CellIndex:
    """The cells or anchors of m instances."""

    frame: Tensor  # (m,)
    cell: Tensor  # (m,) index into all N cells or anchors, level by level, row by row
    level: Tensor  # (m,) of the cell

    def level_groups(self, levels: int) -> list[Tensor]:
        """Return the rows (g,) of the instances of each level."""
        return [(self.level == level).nonzero()[:, 0] for level in range(levels)]


@dataclass(frozen=True)
class ScoredBoxes:
    """All k boxes of one image, before NMS."""

    scores: Tensor  # (k,)
    boxes: Tensor  # (k, 4), x1 y1 x2 y2
    cell: Tensor  # (k,) among all cells or anchors of the image
    number: Tensor  # (k,) the model's class
    labels: Tensor  # (k,) index into the detector's classes; -1: not reported
    above: Tensor  # (k,) whether the score is above the model's threshold
    reported: Tensor  # (k,) whether the box would be reported if NMS keeps it


def static_selection(
    found: ScoredBoxes,
    limits: StaticLimits,
    *,
    counts: Sequence[int],
    overlap: float,
    max_boxes: int,
) -> StaticSelection:
    """Return the boxes that NMS per class keeps, by descending score; the kind is the level.

    counts: the cells of each level. overlap, max_boxes: the IoU above which a box suppresses
    others, and how many are kept.
    """
    rows, count, left_off = _rows_after_nms(found, overlap, max_boxes, limits)
    cell = found.cell[rows]
    level = level_of(cell, counts)
    labels, frame = found.labels[rows].clamp(min=0), torch.zeros_like(cell)
    where = CellIndex(frame, cell, level)
    selection = Selection(frame, found.scores[rows], labels, where)
    of_kind = []
    for n, stop in enumerate(accumulate(counts)):
        # a constant: full_like would depend on the frame, and a graph cannot group boxes by that
        same = torch.full(level.shape, n, device=level.device)
        moved = cell.clamp(stop - counts[n], stop - 1)  # any cell of the level for other boxes
        of_kind.append(replace(selection, where=replace(where, cell=moved, level=same)))
    return StaticSelection(selection, count, left_off, level, tuple(of_kind))


def _rows_after_nms(
    found: ScoredBoxes, overlap: float, max_boxes: int, limits: StaticLimits
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows (n,) of the reported boxes, their number, and what is left off."""
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


def cell_counts(maps: Iterable[Tensor]) -> list[int]:
    """Return the number of cells of each map (B, C, h, w)."""
    return [x.shape[2] * x.shape[3] for x in maps]


def level_of(index: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the level (m,) of cells or anchors, of which each level has so many.

    >>> level_of(torch.tensor([0, 5, 4]), [4, 1, 1])
    tensor([0, 2, 1])
    """
    level = torch.zeros_like(index)
    for stop in accumulate(counts[:-1]):
        level = level + (index >= stop)
    return level


def suppression_matrix(boxes: Tensor, labels: Tensor, overlap: float) -> Tensor:
    """Return which boxes suppress which (k, k): later ones of their class, by IoU.

    boxes: (k, 4), x1 y1 x2 y2, by descending score.
    """
    return ((iou(boxes[:, None], boxes) > overlap) & (labels.unsqueeze(1) == labels)).triu(1)
