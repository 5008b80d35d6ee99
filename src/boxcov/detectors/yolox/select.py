"""Which cells are reported: those above the threshold that no better box of their class suppresses."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from boxcov.detector import Candidates, Selection
from boxcov.detectors.centerpoint.nms import greedy_nms
from boxcov.detectors.yolox.config import STRIDES, Config
from boxcov.detectors.yolox.decode import Grid, centred_boxes, corners, pairwise_iou
from boxcov.errors import BoxcovError
from boxcov.static_selection import StaticLimits, StaticSelection, best_rows, static_nms

_MOST = 3000  # candidates of an image, by score, that NMS compares with each other


@dataclass(frozen=True)
class Where:
    """The cells of m instances."""

    frame: Tensor  # (m,)
    cell: Tensor  # (m,) among all N
    grid: Grid  # the same cells


def select(values: Tensor, grid: Grid, config: Config) -> Selection:
    """What is reported of the head's values (B, N, 5 + classes), image by image, by falling score.

    >>> from boxcov.detectors.yolox.decode import grid_of
    >>> values = torch.full((1, 84, 85), -9.0)
    >>> values[0, 20, [4, 5 + 16]] = 3.0  # a dog
    >>> found = select(values, grid_of([torch.zeros(1, 1, n, n) for n in (8, 4, 2)]), Config.named("nano"))
    >>> found.scores.round(decimals=2), found.labels, found.where.cell
    (tensor([0.9100]), tensor([16]), tensor([20]))
    """
    scores, labels, images = _ranked(values, grid, config)
    return _selection(scores, labels, grid, [image.cells[image.reported] for image in images])


def candidates(values: Tensor, grid: Grid, config: Config) -> Candidates:
    """What NMS chooses from, in the order of ``select``, and the best reported box that suppresses each.

    >>> from boxcov.detectors.yolox.decode import grid_of
    >>> values = torch.full((1, 84, 85), -9.0)
    >>> values[0, [20, 21], 2:4] = 2.0  # large boxes, 8 pixels apart
    >>> values[0, 20, [4, 5 + 16]], values[0, 21, [4, 5 + 16]] = 3.0, 2.0
    >>> values[0, [20, 21], :2] = 0.0
    >>> found = candidates(values, grid_of([torch.zeros(1, 1, n, n) for n in (8, 4, 2)]), Config.named("nano"))
    >>> found.where.cell, found.removed_by
    (tensor([20, 21]), tensor([-1,  0]))
    """
    scores, labels, images = _ranked(values, grid, config)
    plain = _selection(scores, labels, grid, [image.cells for image in images])
    removed_by, before = [], 0
    for image in images:
        row = image.reported.cumsum(0) - 1 + before
        by = image.rivals & image.reported.unsqueeze(1)  # (k, k), the better one first
        best = by.int().argmax(0) if len(row) else row
        removed_by.append(torch.where(by.any(0), row[best], -1))
        before += int(image.reported.sum())
    return Candidates(
        plain.frame,
        plain.scores,
        plain.labels,
        plain.where,
        torch.cat(removed_by) if images else plain.frame,
    )


@dataclass(frozen=True)
class _Ranked:
    """The k candidates of one image, by falling score."""

    cells: Tensor  # (k,)
    rivals: Tensor  # (k, k) which would suppress which: the row the column
    reported: Tensor  # (k,)


def _ranked(values: Tensor, grid: Grid, config: Config) -> tuple[Tensor, Tensor, list[_Ranked]]:
    """Scores and labels (B, N) of all cells, and the candidates of each image."""
    scores, labels = scored(values)
    boxes = corners(centred_boxes(values, grid))
    return scores, labels, [_of_image(*image, config) for image in zip(scores, labels, boxes)]


def _of_image(scores: Tensor, labels: Tensor, boxes: Tensor, config: Config) -> _Ranked:
    cells = (scores > config.threshold).nonzero()[:, 0]
    cells = cells[scores[cells].argsort(descending=True, stable=True)][:_MOST]
    rivals = rivals_of(boxes[cells], labels[cells], config.overlap)
    first, second = rivals.nonzero(as_tuple=True)
    stays = greedy_nms(
        first, second, torch.ones(1, len(cells), dtype=torch.bool, device=cells.device)
    )[0]
    return _Ranked(cells, rivals, stays & (stays.cumsum(0) <= config.max_boxes))


def select_static(
    values: Tensor, grid: Grid, config: Config, limits: StaticLimits
) -> StaticSelection:
    """What ``select`` reports of one image, in a fixed number of rows; the kind of a row is its level.

    >>> from boxcov.detectors.yolox.decode import grid_of
    >>> values = torch.full((1, 84, 85), -9.0)
    >>> values[0, 20, [4, 5 + 16]] = 3.0  # a dog
    >>> grid = grid_of([torch.zeros(1, 1, n, n) for n in (8, 4, 2)])
    >>> found = select_static(values, grid, Config.named("nano"), StaticLimits(boxes=5))
    >>> int(found.count), found.selection.labels[0], len(found.selection)
    (1, tensor(16), 5)
    """
    if len(values) != 1:
        raise BoxcovError(f"a static selection takes one image, got a batch of {len(values)}")
    scores, labels = scored(values)
    above = scores[0] > config.threshold
    cells, taken, beyond = best_rows(scores[0], above, limits.candidates)
    valid = torch.arange(len(cells), device=cells.device) < taken
    boxes = corners(centred_boxes(values[0, cells], grid[cells]))
    rivals = rivals_of(boxes, labels[0, cells], config.overlap) & valid & valid.unsqueeze(1)
    stays, settled = static_nms(rivals.to(values.dtype).unsqueeze(0))
    stays = stays[0] & valid
    reported = stays & (stays.cumsum(0) <= config.max_boxes)
    index, count, more = best_rows(scores[0, cells], reported, limits.boxes)
    cell = cells[index]
    frame = torch.zeros_like(cell)
    whole = Where(frame, cell, grid[cell])
    found = Selection(frame, scores[0, cell], labels[0, cell], whole)
    levels = [_on_level(whole, grid, level) for level in range(len(STRIDES))]
    left_off = beyond + more + (~settled).long()
    return StaticSelection(
        found,
        count,
        left_off,
        whole.grid.level,
        tuple(replace(found, where=where) for where in levels),
    )


def _on_level(where: Where, grid: Grid, level: int) -> Where:
    """The cells of the same row and column on another level, or the last ones there."""
    at = (grid.level == level).nonzero()[:, 0]
    first, rows, columns = at.min(), grid.row[at].max(), grid.column[at].max()
    row, column = torch.minimum(where.grid.row, rows), torch.minimum(where.grid.column, columns)
    cell = first + row * (columns + 1) + column
    return Where(where.frame, cell, Grid(torch.full_like(cell, level), row, column))


def scored(values: Tensor) -> tuple[Tensor, Tensor]:
    """Scores and labels (B, N) of all cells: the best class, times the objectness.

    >>> scored(torch.zeros(1, 2, 7))
    (tensor([[0.2500, 0.2500]]), tensor([[0, 0]]))
    """
    named, labels = values[:, :, 5:].sigmoid().max(2)
    return values[:, :, 4].sigmoid() * named, labels


def rivals_of(boxes: Tensor, labels: Tensor, overlap: float) -> Tensor:
    """Which of k boxes (k, 4) as x1 y1 x2 y2, by falling score, would suppress which (k, k): later ones of its class that overlap it more.

    >>> boxes = torch.tensor([[0.0, 0, 4, 4], [0, 0, 4, 5], [0, 0, 4, 5]])
    >>> rivals_of(boxes, torch.tensor([0, 0, 1]), 0.65).nonzero()
    tensor([[0, 1]])
    """
    return ((pairwise_iou(boxes, boxes) > overlap) & (labels.unsqueeze(1) == labels)).triu(1)


def _selection(scores: Tensor, labels: Tensor, grid: Grid, cells: list[Tensor]) -> Selection:
    cell = torch.cat(cells) if cells else labels.new_zeros(0)
    counts = torch.tensor([len(some) for some in cells], dtype=torch.long, device=cell.device)
    frame = torch.arange(len(cells), device=cell.device).repeat_interleave(counts)
    return Selection(
        frame, scores[frame, cell], labels[frame, cell], Where(frame, cell, grid[cell])
    )
