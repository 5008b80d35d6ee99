"""Which boxes are reported, in a fixed number of rows: as ``select``, with limits in the place of shapes that depend on the frame."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from boxcov.detector import Selection
from boxcov.detectors.centerpoint.config import Config
from boxcov.detectors.centerpoint.decode import Ranked, Where, ranked
from boxcov.detectors.centerpoint.head import TaskMaps
from boxcov.detectors.centerpoint.nms import near_boxes, near_centres, rotated_iou
from boxcov.errors import BoxcovError
from boxcov.static_selection import StaticLimits, StaticSelection, best, suppressed


def select_static(
    tasks: Sequence[TaskMaps], config: Config, limits: StaticLimits
) -> StaticSelection:
    """The boxes of one frame that ``select`` reports, by falling score; the kind of a row is its task.

    >>> config = Config.mmdet3d_pillar()
    >>> maps = [{name: torch.zeros(1, n, 128, 128) for name, n in config.branches.items()} for _ in config.tasks]
    >>> for task, names in zip(maps, config.tasks):
    ...     task["heatmap"] = torch.full((1, len(names), 128, 128), -9.0)
    >>> maps[2]["heatmap"][0, 1, 5, 6] = 3.0
    >>> found = select_static(maps, config, StaticLimits(boxes=7))
    >>> int(found.count), config.classes[found.selection.labels[0]], len(found.selection), int(found.left_off)
    (1, 'trailer', 7, 0)
    """
    if len(tasks[0]["reg"]) != 1:
        raise BoxcovError(
            f"a selection of fixed size is of one frame, got a batch of {len(tasks[0]['reg'])}"
        )
    some = ranked(tasks, config, limits.candidates)  # (tasks, k)
    rivals, ignored = _rivals(some, config, limits.pairs)
    stays, settled = suppressed(rivals)
    stays = stays & some.valid
    reported = stays & (stays.cumsum(1) <= config.reporting.most)
    index, count, more = best(some.scores.flatten(), reported.flatten(), limits.boxes)
    found = some.selection(index)
    left_off = some.beyond + ignored + more + (~settled).long()
    return StaticSelection(found, count, left_off, found.where.task, _of_tasks(found, len(tasks)))


def _of_tasks(found: Selection, tasks: int) -> tuple[Selection, ...]:
    w = found.where
    each = [Where(w.frame, torch.full_like(w.task, task), w.row, w.column) for task in range(tasks)]
    return tuple(Selection(found.frame, found.scores, found.labels, where) for where in each)


def _rivals(some: Ranked, config: Config, most: int) -> tuple[Tensor, Tensor]:
    """Which of the candidates would suppress which (G, k, k) as numbers 0 and 1, and how many pairs were not looked at."""
    rules, boxes, valid = config.reporting, some.boxes, some.valid
    later = torch.ones(boxes.shape[1], boxes.shape[1], dtype=torch.bool, device=boxes.device).triu(
        1
    )
    both = valid.unsqueeze(2) & valid.unsqueeze(1) & later
    if rules.nms == "circle":
        near = near_centres(boxes[:, :, :2], boxes.new_tensor(rules.radii)) & both
        return near.to(boxes.dtype), near.new_zeros((), dtype=torch.long)
    flat = boxes[:, :, [0, 1, 3, 4, 6]]
    near = near_boxes(flat) & both
    most = min(most, near.numel())
    # pairs of the best boxes first, so that what there is no room for are the worst ones
    value, index = (near * some.scores.unsqueeze(1)).flatten().topk(most)
    k = boxes.shape[1]
    group, first, second = index // (k * k), index % (k * k) // k, index % k
    flat = flat.flatten(0, 1)
    over = (rotated_iou(flat[group * k + first], flat[group * k + second]) > rules.overlap) & (
        value > 0
    )
    rivals = boxes.new_zeros(near.numel()).scatter(0, index, over.to(boxes.dtype)).view(near.shape)
    return rivals, (near.long().sum() - most).clamp(min=0)
