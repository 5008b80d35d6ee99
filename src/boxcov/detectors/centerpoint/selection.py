"""Which boxes a CenterPoint reports: those above the threshold that NMS keeps, per task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from boxcov.detector import Candidates, Selection
from boxcov.detectors.boxes import rotated_iou
from boxcov.detectors.centerpoint.config import Config
from boxcov.detectors.centerpoint.decode import CellIndex, boxes_of, values_at
from boxcov.detectors.centerpoint.network import StackedMaps, TaskMaps
from boxcov.detectors.centerpoint.voxels import numbers_like
from boxcov.detectors.nms import (
    Pairs,
    circle_pairs,
    greedy_nms,
    near_boxes,
    near_centres,
    removed_by,
    rotated_pairs,
)
from boxcov.static_selection import StaticLimits, StaticSelection, best_rows, static_nms


def select(tasks: Sequence[TaskMaps], config: Config) -> Selection:
    """Return the reported instances, frame by frame, by descending score."""
    ranked = rank_candidates(tasks, config)
    kept = greedy_nms(*_suppressions(ranked, config), ranked.valid)
    return ranked.selection(ranked.reported(kept, config.reporting.max_boxes))


def candidates(tasks: Sequence[TaskMaps], config: Config) -> Candidates:
    """Return all candidates of the NMS and the best reported box that suppresses each."""
    ranked = rank_candidates(tasks, config)
    pairs = _suppressions(ranked, config)
    kept = greedy_nms(*pairs, ranked.valid)
    reported = ranked.reported(kept, config.reporting.max_boxes)
    order = ranked.report_order(ranked.valid.flatten().nonzero()[:, 0])
    plain = ranked.selection(order)
    rows = removed_by(pairs, reported, ranked.valid.numel())[order]
    return Candidates(plain.frame, plain.scores, plain.labels, plain.where, rows)


def select_static(
    tasks: Sequence[TaskMaps], config: Config, limits: StaticLimits
) -> StaticSelection:
    """Return what ``select`` reports, in a fixed number of rows for all frames; kind: the task."""
    ranked = rank_candidates(tasks, config, limits.candidates)  # (B tasks, k)
    suppresses, ignored = static_suppressions(ranked, config, limits.pairs)
    kept, converged = static_nms(suppresses)
    kept = kept & ranked.valid
    kept = kept & (kept.cumsum(1) <= config.reporting.max_boxes)
    index, count, excess = best_rows(ranked.scores.flatten(), kept.flatten(), limits.boxes)
    frames = len(tasks[0]["reg"])
    if frames > 1:
        is_box = torch.arange(len(index), device=index.device) < count
        frame = torch.where(is_box, ranked.where.frame[index], frames)  # padding comes last
        index = index[frame.argsort(stable=True)]
    selection = ranked.selection(index)
    at = selection.where
    of_kind = tuple(
        replace(selection, where=replace(at, task=torch.full_like(at.task, task)))
        for task in range(len(tasks))
    )
    left_off = ranked.excess + ignored + excess + (~converged).long()
    return StaticSelection(selection, count, left_off, at.task, of_kind)


@dataclass(frozen=True)
class Ranking:
    """The k best candidates of each of G = frames x tasks groups, by descending score."""

    scores: Tensor  # (G, k)
    labels: Tensor  # (G k,)
    valid: Tensor  # (G, k) above the threshold and in the range
    where: CellIndex  # G k cells
    boxes: Tensor  # (G, k, D)
    excess: Tensor  # () how many more are above the threshold, in all groups

    def reported(self, kept: Tensor, most: int) -> Tensor:
        """Return the reported indices: at most ``most`` per group of those kept by NMS (G, k)."""
        return self.report_order((kept & (kept.cumsum(1) <= most)).flatten().nonzero()[:, 0])

    def report_order(self, index: Tensor) -> Tensor:
        """Sort indices by frame, then by descending score."""
        index = index[self.scores.flatten()[index].argsort(descending=True, stable=True)]
        return index[self.where.frame[index].argsort(stable=True)]

    def selection(self, index: Tensor) -> Selection:
        where = self.where[index]
        return Selection(where.frame, self.scores.flatten()[index], self.labels[index], where)


def rank_candidates(tasks: Sequence[TaskMaps], config: Config, k: int | None = None) -> Ranking:
    """Return the best ``k`` candidates of each frame and task.

    By default k is the largest number of candidates above the threshold in any frame and task.
    """
    scores, labels, cells = _best_cells(tasks, config)
    valid = scores > config.reporting.threshold
    k = int(valid.sum(2).amax()) if k is None else k
    excess = valid[:, :, k:].sum()
    scores, labels, cells, valid = (
        t[:, :, :k].flatten(0, 1) for t in (scores, labels, cells, valid)
    )  # (B tasks, k)
    group = torch.arange(len(scores), device=scores.device).unsqueeze(1).expand_as(scores)
    columns = tasks[0]["reg"].shape[3]
    index = (group // len(tasks), group % len(tasks), cells // columns, cells % columns)
    where = CellIndex(*(t.flatten() for t in index))
    values = values_at(tasks, where, list(config.branches))
    boxes = boxes_of(values, where.row, where.column, config).unflatten(0, scores.shape)
    if config.reporting.per_class:
        valid = valid & _in_range(boxes[:, :, :3].unbind(2), config)
    return Ranking(scores, labels.flatten(), valid, where, boxes, excess)


def _best_cells(tasks: Sequence[TaskMaps], config: Config) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores, labels and cells (B, tasks, K) of each task's best candidates."""
    rules, heat, classes = config.reporting, _heat_maps(tasks, config), None
    scores, n_cells = heat.sigmoid().flatten(3), heat[0, 0, 0].numel()  # (B, tasks, classes, cells)
    if not rules.per_class:
        inside = [_in_range(_centres(maps, config), config).flatten(1) for maps in tasks]
        scores, classes = (scores * torch.stack(inside, 1).unsqueeze(2)).max(2)
    scores, index = scores.flatten(2).topk(min(rules.candidates, scores[0, 0].numel()))
    cells = index % n_cells
    classes = index // n_cells if classes is None else classes.gather(2, cells)
    first = numbers_like(cells, [config.first_class(task) for task in range(len(tasks))])
    return scores, classes + first.unsqueeze(1), cells


def _heat_maps(tasks: Sequence[TaskMaps], config: Config) -> Tensor:
    """Return the logits of all tasks (B, tasks, classes, h, w).

    A class that a task does not have has a score of 0.
    """
    if isinstance(tasks, StackedMaps):
        return tasks.stacked[:, :, sum(config.branches.values()) :]
    maps = [task["heatmap"] for task in tasks]
    missing = [max(map(len, config.tasks)) - heat.shape[1] for heat in maps]
    padded = [pad(h, (0, 0, 0, 0, 0, n), value=-torch.inf) for h, n in zip(maps, missing)]
    return torch.stack(padded, 1)


def _centres(maps: TaskMaps, config: Config) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, y and z (B, h, w) of the centre that each cell predicts."""
    x, y = maps["reg"].unbind(1)
    columns = torch.arange(x.shape[2], device=x.device)
    rows = torch.arange(y.shape[1], device=y.device).unsqueeze(1)
    x = (x + columns) * config.cell[0] + config.point_range[0]
    y = (y + rows) * config.cell[1] + config.point_range[1]
    return x, y, maps["height"][:, 0]


def _in_range(centres: Sequence[Tensor], config: Config) -> Tensor:
    """Return which centres, given as x, y and z, are in the range."""
    low, high = config.reporting.centre_range[:3], config.reporting.centre_range[3:]
    inside = [(lo <= v) & (v <= hi) for v, lo, hi in zip(centres, low, high)]
    return inside[0] & inside[1] & inside[2]


def _suppressions(ranked: Ranking, config: Config) -> Pairs:
    """Return pairs of candidates, of all G k: the first, if kept, suppresses the second."""
    rules, boxes = config.reporting, ranked.boxes
    if rules.nms == "circle":
        bounds = _circle_bounds(boxes, config)
        return circle_pairs(boxes[:, :, :2], ranked.valid, bounds, rules.max_boxes)
    return rotated_pairs(_seen_from_above(boxes), ranked.valid, rules.overlap, rules.max_boxes)


def static_suppressions(ranked: Ranking, config: Config, pairs: int) -> tuple[Tensor, Tensor]:
    """Return the same as a 0/1 matrix (G, k, k), and how many pairs beyond ``pairs`` it ignores."""
    rules, boxes, k = config.reporting, ranked.boxes, ranked.boxes.shape[1]
    later = torch.ones(k, k, dtype=torch.bool, device=boxes.device).triu(1)
    both = ranked.valid.unsqueeze(2) & ranked.valid.unsqueeze(1) & later
    if rules.nms == "circle":
        centres = boxes[:, :, :2]
        near = near_centres(centres, centres, _circle_bounds(boxes, config)) & both
        return near.to(boxes.dtype), near.new_zeros((), dtype=torch.long)
    flat = _seen_from_above(boxes)
    near = near_boxes(flat, flat) & both
    # pairs with the best second box first, so that the ignored pairs are the worst ones
    first, second, total = _first_pairs(near, min(pairs, near.numel()))
    is_pair = torch.arange(len(first), device=first.device) < total
    flat = flat.flatten(0, 1)
    over = (rotated_iou(flat[first], flat[second]) > rules.overlap) & is_pair
    at = torch.where(is_pair, first * k + second % k, near.numel())
    suppresses = boxes.new_zeros(near.numel() + 1).scatter(0, at, over.to(boxes.dtype))
    return suppresses[:-1].view(near.shape), (total - len(first)).clamp(min=0)


def _first_pairs(near: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first ``count`` pairs of ``near`` (G, k, k), by the rank of the second box.

    They are indices (count,) into all G k boxes. The third result is the number of all pairs (); if
    there are fewer than ``count``, the other indices are arbitrary.
    """
    G, k = near.shape[:2]
    by_second = near.permute(2, 0, 1).flatten()
    rank = by_second.cumsum(0)  # from 1 on
    slot = torch.where(by_second & (rank <= count), rank - 1, count)  # the last is for the others
    number = torch.arange(len(slot), device=near.device)
    index = torch.zeros(count + 1, dtype=torch.long, device=near.device)
    index = index.scatter(0, slot, number)[:-1]
    first, second = index % (G * k), index // (G * k)
    return first, first // k * k + second, rank[-1]


def _circle_bounds(boxes: Tensor, config: Config) -> Tensor:
    """Return the bound (G,) of each group's circle NMS, without a copy from the host."""
    bounds = torch.cat([boxes.new_full((1,), radius) for radius in config.reporting.radii])
    return bounds.repeat(len(boxes) // len(config.tasks))


def _seen_from_above(boxes: Tensor) -> Tensor:
    """Return x y w l yaw (..., 5) of boxes; a list as an index would be copied from the host."""
    return torch.cat([boxes[..., :2], boxes[..., 3:5], boxes[..., 6:7]], -1)
