"""The training loss of each frame: focal loss of heat maps, weighted L1 loss of boxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from boxcov.detectors.boxes import box_corners
from boxcov.detectors.centerpoint.config import Config, Loss
from boxcov.detectors.centerpoint.network import TaskMaps
from boxcov.detectors.centerpoint.voxels import rank_among_equals
from boxcov.detectors.objects import objects_of


@dataclass(frozen=True)
class MapTargets:
    """The targets of a batch: heat maps of all C classes, and n objects, task by task."""

    heat: Tensor  # (B, C, h, w)
    task: Tensor  # (n,)
    frame: Tensor  # (n,)
    label: Tensor  # (n,) among all classes
    row: Tensor  # (n,)
    column: Tensor  # (n,)
    values: Tensor  # (n, 10) reg, height, dim, rot, vel; (n, 8) without velocity; NaN where unknown
    sizes: tuple[int, ...]  # number of classes of each of T tasks

    def sum_objects(self, values: Tensor) -> Tensor:
        """Return the sums (T, B) of the objects' values (n,)."""
        tasks, frames = len(self.sizes), len(self.heat)
        total = values.new_zeros(tasks * frames)
        return total.index_add(0, self.task * frames + self.frame, values).view(tasks, frames)

    def sum_maps(self, maps: Tensor) -> Tensor:
        """Return the sums (T, B) of maps (B, C, h, w)."""
        planes = maps.sum((2, 3)).split(list(self.sizes), 1)
        return torch.stack([of_task.sum(1) for of_task in planes])


def frame_losses(tasks: Sequence[TaskMaps], targets: MapTargets, config: Config) -> Tensor:
    """Return the loss of each frame (B,), summed over the tasks."""
    return (heat_losses(tasks, targets, config.loss) + box_losses(tasks, targets, config)).sum(0)


def heat_losses(tasks: Sequence[TaskMaps], targets: MapTargets, rules: Loss) -> Tensor:
    """Return the focal loss of each task and frame (T, B), alpha 2, gamma 4."""
    logits = torch.cat([maps["heatmap"] for maps in tasks], 1)  # (B, C, h, w)
    p = logits.sigmoid().clamp(1e-4, 1 - 1e-4)
    away = targets.sum_maps(-(1 - p).log() * p**2 * (1 - targets.heat) ** 4)
    at = -p.log() * (1 - p) ** 2
    if rules.positives == "objects":
        values = at[targets.frame, targets.label, targets.row, targets.column]
        at_objects = targets.sum_objects(values)
        count = targets.sum_objects(torch.ones_like(values))
    else:
        peaks = targets.heat == 1
        at_objects, count = targets.sum_maps(at * peaks), targets.sum_maps(peaks)
    return (at_objects + away) / count.clamp(min=1)


def box_losses(tasks: Sequence[TaskMaps], targets: MapTargets, config: Config) -> Tensor:
    """Return the weighted L1 loss of each task and frame (T, B), without unknown values."""
    rules = config.loss
    joined = torch.cat([maps[name] for maps in tasks for name in config.branches], 1)
    joined = joined.unflatten(1, (len(tasks), -1))  # (B, T, 10, h, w)
    found = joined[targets.frame, targets.task, :, targets.row, targets.column]  # (n, 10)
    known = targets.values.isfinite()
    off = (found - torch.where(known, targets.values, 0)).abs() * known
    weights = found.new_tensor(rules.weights[: found.shape[1]])
    total = targets.sum_objects((off * weights).sum(1))
    count = targets.sum_objects(found.new_ones(len(found)))
    divisor = count + 1e-4 if rules.normaliser == "plus" else count.clamp(min=1)
    return rules.box_weight * total / divisor


# from boxes to targets


def gaussian_radius(l: Tensor, w: Tensor, overlap: float = 0.1) -> Tensor:
    """Return how far (n,) a box's corners may move for an IoU of at least ``overlap``.

    Only the first of the three solutions is correct: the others lack a division, but every
    CenterPoint was trained with them.
    """
    both, area = l + w, l * w
    moved = (both + (both**2 - 4 * area * (1 - overlap) / (1 + overlap)).sqrt()) / 2
    inner = (2 * both + (4 * both**2 - 16 * (1 - overlap) * area).clamp(min=0).sqrt()) / 2
    root = (4 * overlap**2 * both**2 + 16 * overlap * (1 - overlap) * area).sqrt()
    outer = (-2 * overlap * both + root) / 2
    return torch.minimum(torch.minimum(moved, inner), outer)


def encode(targets: Sequence[dict[str, Tensor]], config: Config, like: Tensor) -> MapTargets:
    """Return targets on the head's map, with the dtype and device of ``like`` (B, ...)."""
    objects = objects_of(targets, config.box_fields, len(config.classes), like)
    boxes, labels = (torch.cat(column) for column in zip(*objects))  # (N, D), (N,)
    frame = torch.cat([torch.full_like(own, b) for b, (_, own) in enumerate(objects)])
    cell_size = boxes.new_tensor(config.cell)
    at = (boxes[:, :2] - boxes.new_tensor(config.point_range[:2])) / cell_size  # (N, 2) in cells
    # det3d truncates towards zero: an object just below the range belongs to the first cell
    cell = at.trunc() if config.loss.inside == "corner" else at.floor()
    rows, columns = config.map_size
    sizes = tuple(len(classes) for classes in config.tasks)
    tasks = torch.arange(len(sizes), device=labels.device)
    task = tasks.repeat_interleave(tasks.new_tensor(sizes))[labels]
    kept = rank_among_equals(task * len(targets) + frame) < config.loss.max_objects
    kept &= ((cell >= 0) & (cell < boxes.new_tensor([columns, rows]))).all(1)
    kept &= (boxes[:, 3:5] > 0).all(1) & _in_range(boxes, config)
    index = kept.nonzero()[:, 0]
    index = index[task[index].argsort(stable=True)]
    task, frame, labels, boxes = task[index], frame[index], labels[index], boxes[index]
    column, row = cell[index].long().unbind(1)
    heat = like.new_zeros(len(targets), sum(sizes), rows, columns)
    _draw_gaussians(heat, frame, labels, row, column, boxes[:, 3:5] / cell_size.flip(0))
    values = _values(boxes, (at - cell)[index], config)
    return MapTargets(heat, task, frame, labels, row, column, values, sizes)


def _in_range(boxes: Tensor, config: Config) -> Tensor:
    """Return which boxes (n, D) the framework keeps as targets, besides those off the map."""
    low, high = (boxes.new_tensor(config.point_range[i : i + 3]) for i in (0, 3))
    if config.loss.inside == "centre_3d":
        return ((boxes[:, :3] >= low) & (boxes[:, :3] <= high)).all(1)
    if config.loss.inside == "corner":
        x, y, w, l, yaw = boxes[:, [0, 1, 3, 4, 6]].T
        corners = box_corners(torch.stack([x, y], 1), w, l, yaw)  # (n, 4, 2)
        return ((corners > low[:2]) & (corners < high[:2])).all(2).any(1)
    return boxes.new_ones(len(boxes), dtype=torch.bool)


def _values(boxes: Tensor, offset: Tensor, config: Config) -> Tensor:
    """Return the regression targets (n, 10 or 8). offset: (n, 2) of the centres in their cells."""
    w, l, h, yaw = boxes[:, 3:7].unbind(1)
    size = torch.stack([l, w, h], 1).clamp(min=torch.finfo(boxes.dtype).tiny).log()
    parts = [offset, boxes[:, 2:3], size, torch.stack([yaw.sin(), yaw.cos()], 1)]
    if not config.velocity:
        return torch.cat(parts, 1)
    velocity = boxes[:, 7:9]
    if config.loss.unknown_velocity == "zero":
        velocity = torch.where(velocity.isnan(), 0, velocity)
    return torch.cat([*parts, velocity], 1)


def _draw_gaussians(
    heat: Tensor, frame: Tensor, label: Tensor, row: Tensor, column: Tensor, size: Tensor
) -> None:
    """Draw a Gaussian per object into ``heat``; where several overlap, the maximum counts.

    size: (n, 2) w and l in cells.
    """
    if not len(row):
        return
    radius = gaussian_radius(size[:, 1], size[:, 0]).long().clamp(min=2)  # (n,)
    most = int(radius.max())
    around = torch.arange(-most, most + 1, device=heat.device)
    dy, dx = around.reshape(1, -1, 1), around.reshape(1, 1, -1)
    r = radius.reshape(-1, 1, 1)
    sigma = (2 * r + 1).to(heat.dtype) / 6
    splat = torch.exp(-(dx**2 + dy**2) / (2 * sigma**2))  # (n, s, s)
    y, x = row.reshape(-1, 1, 1) + dy, column.reshape(-1, 1, 1) + dx
    _, classes, rows, columns = heat.shape
    drawn = (dy.abs() <= r) & (dx.abs() <= r) & (y >= 0) & (y < rows) & (x >= 0) & (x < columns)
    plane = (frame * classes + label).reshape(-1, 1, 1)
    flat = (plane * rows + y.clamp(0, rows - 1)) * columns + x.clamp(0, columns - 1)
    # cells outside the Gaussian or the map add a 0 at the border, which changes nothing
    heat.view(-1).scatter_reduce_(0, flat.flatten(), (splat * drawn).flatten(), "amax")
