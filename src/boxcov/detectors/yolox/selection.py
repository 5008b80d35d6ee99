"""The boxes of a YOLOX: decoded at their cells, and those above the threshold that NMS keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from boxcov.detector import Candidates, Selection
from boxcov.detectors.boxes import corners, iou
from boxcov.detectors.nms import Pairs, greedy_nms, removed_by, suppressing_pairs
from boxcov.detectors.pyramid import CellIndex, ScoredBoxes, static_selection
from boxcov.detectors.signals import logit_of_log
from boxcov.detectors.yolox.config import STRIDES, Config
from boxcov.static_selection import StaticLimits, StaticSelection, check_one_frame

_MAX_CANDIDATES = 3000  # per image, by score, for NMS


@dataclass(frozen=True)
class Grid:
    """All N cells, level by level and row by row, or some of them."""

    level: Tensor  # (N,)
    row: Tensor  # (N,)
    column: Tensor  # (N,)

    def __getitem__(self, index: Tensor) -> Grid:
        return Grid(self.level[index], self.row[index], self.column[index])

    @property
    def stride(self) -> Tensor:
        """Pixels per cell (N,)."""
        return torch.tensor(STRIDES, device=self.level.device)[self.level]

    @property
    def corner(self) -> Tensor:
        """The top left corner of each cell, x and y in pixels (N, 2)."""
        return torch.stack([self.column, self.row], 1) * self.stride.unsqueeze(1)


def grid_of(features: Sequence[Tensor]) -> Grid:
    """Return the cells of the pyramid's maps."""
    levels = []
    for level, x in enumerate(features):
        cell = torch.arange(x.shape[2] * x.shape[3], device=x.device)
        levels.append((torch.full_like(cell, level), cell // x.shape[3], cell % x.shape[3]))
    return Grid(*(torch.cat(column) for column in zip(*levels)))


def centred_boxes(values: Tensor, grid: Grid) -> Tensor:
    """Return boxes (..., m, 4), centre and size in pixels, from the head's values at m cells."""
    stride = grid.stride.unsqueeze(1)
    return torch.cat([values[..., :2] * stride + grid.corner, values[..., 2:4].exp() * stride], -1)


def reported_boxes(values: Tensor, labels: Tensor, grid: Grid, config: Config) -> Tensor:
    """Return the reported boxes (m, D) from the head's values at m cells.

    values: (m, 4), or (m, 5 + classes) if a box includes its score logit.
    """
    boxes = corners(centred_boxes(values, grid))
    if not config.logit:
        return boxes
    named = values[:, 5:].gather(1, labels.unsqueeze(1))
    log_p = F.logsigmoid(values[:, 4:5]) + F.logsigmoid(named)
    return torch.cat([boxes, logit_of_log(log_p)], 1)


# which of them are reported


def select(values: Tensor, grid: Grid, config: Config) -> Selection:
    """Return the reported instances, image by image, by descending score.

    values: (B, N, 5 + classes) of the head.
    """
    scores, labels, images = _rank_candidates(values, grid, config)
    return _selection(scores, labels, grid, [image.cells[image.reported] for image in images])


def candidates(values: Tensor, grid: Grid, config: Config) -> Candidates:
    """Return all candidates of the NMS and the best reported box that suppresses each."""
    scores, labels, images = _rank_candidates(values, grid, config)
    every = _selection(scores, labels, grid, [image.cells for image in images])
    removed, before = [every.frame[:0]], 0
    for image in images:
        reported = image.reported.nonzero()[:, 0]
        rows = removed_by(image.pairs, reported, len(image.cells))
        removed.append(torch.where(rows >= 0, rows + before, -1))
        before += len(reported)
    return Candidates(every.frame, every.scores, every.labels, every.where, torch.cat(removed))


@dataclass(frozen=True)
class _Ranking:
    """The k candidates of one image, by descending score."""

    cells: Tensor  # (k,)
    pairs: Pairs  # of candidates: the first, if kept, suppresses the second
    reported: Tensor  # (k,)


def _rank_candidates(
    values: Tensor, grid: Grid, config: Config
) -> tuple[Tensor, Tensor, list[_Ranking]]:
    """Return scores and labels (B, N) of all cells, and the candidates of each image."""
    scores, labels = scores_and_labels(values)
    boxes = corners(centred_boxes(values, grid))
    return scores, labels, [_rank_image(*image, config) for image in zip(scores, labels, boxes)]


def _rank_image(scores: Tensor, labels: Tensor, boxes: Tensor, config: Config) -> _Ranking:
    cells = (scores > config.threshold).nonzero()[:, 0]
    cells = cells[scores[cells].argsort(descending=True, stable=True)][:_MAX_CANDIDATES]
    boxes, labels = boxes[cells], labels[cells]
    valid = torch.ones(1, len(cells), dtype=torch.bool, device=cells.device)

    def near(rows: slice) -> Tensor:
        same = labels[rows].unsqueeze(1) == labels
        return (same & (iou(boxes[rows, None], boxes) > config.overlap)).unsqueeze(0)

    pairs = suppressing_pairs(valid, near, most=config.max_boxes)
    kept = greedy_nms(*pairs, valid)[0]
    return _Ranking(cells, pairs, kept & (kept.cumsum(0) <= config.max_boxes))


def select_static(
    values: Tensor, grid: Grid, config: Config, *, counts: Sequence[int], limits: StaticLimits
) -> StaticSelection:
    """Return what ``select`` reports of one image, in a fixed number of rows; kind: the level.

    counts: the cells of each level.
    """
    check_one_frame(len(values))
    scores, labels = scores_and_labels(values)
    above = scores[0] > config.threshold
    boxes = corners(centred_boxes(values[0], grid))
    cells = torch.arange(len(above), device=above.device)
    found = ScoredBoxes(scores[0], boxes, cells, labels[0], labels[0], above, above)
    overlap, most = config.overlap, config.max_boxes
    return static_selection(found, limits, counts=counts, overlap=overlap, max_boxes=most)


def scores_and_labels(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores and labels (B, N) of all cells: the best class, times the objectness."""
    named, labels = values[:, :, 5:].sigmoid().max(2)
    return values[:, :, 4].sigmoid() * named, labels


def _selection(scores: Tensor, labels: Tensor, grid: Grid, cells: list[Tensor]) -> Selection:
    """Return the selection of the given cells of each image."""
    none = labels.new_zeros(0)  # of an empty batch
    cell = torch.cat([none, *cells])
    frame = torch.cat([none, *(torch.full_like(own, b) for b, own in enumerate(cells))])
    where = CellIndex(frame, cell, grid.level[cell])
    return Selection(frame, scores[frame, cell], labels[frame, cell], where)
