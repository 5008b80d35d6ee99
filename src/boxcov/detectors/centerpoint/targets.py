"""Boxes as the loss reads them: Gaussian heat maps, and the values to regress at the objects' cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from boxcov.detectors.centerpoint.config import Config
from boxcov.detectors.centerpoint.voxels import rank_among_equals
from boxcov.errors import BoxcovError


@dataclass(frozen=True)
class TaskTargets:
    """The targets of one task in a batch, with n objects."""

    heat: Tensor  # (B, classes, h, w)
    frame: Tensor  # (n,)
    label: Tensor  # (n,) among the task's classes
    row: Tensor  # (n,)
    column: Tensor  # (n,)
    values: Tensor  # (n, 10) reg, height, dim, rot, vel; (n, 8) without velocity; NaN where unknown


@dataclass(frozen=True)
class Encoded:
    """The targets of a batch, task by task."""

    tasks: tuple[TaskTargets, ...]


def object_counts(targets: Sequence[dict[str, Tensor]] | Encoded) -> Tensor:
    """The objects of each frame (B,), at least 1: ``boxcov.fit(..., weight=object_counts)`` undoes the loss's division by their number.

    Exactly, for a head of one task whose objects are all on the map. With several tasks each divides by its own number, and a frame's weight can
    only restore their sum; ``Loss(normaliser="none")`` in the detector's configuration leaves out every division.

    >>> object_counts([{"labels": torch.tensor([0, 0, 3])}, {"labels": torch.zeros(0, dtype=torch.long)}])
    tensor([3., 1.])
    """
    if isinstance(targets, Encoded):
        frames = len(targets.tasks[0].heat)
        counts = torch.stack(
            [torch.bincount(task.frame, minlength=frames) for task in targets.tasks]
        ).sum(0)
    else:
        counts = torch.tensor([len(target["labels"]) for target in targets])
    return counts.clamp(min=1).float()


def gaussian_radius(l: Tensor, w: Tensor, overlap: float = 0.1) -> Tensor:
    """How far (n,) the corners of a box may move so that it still overlaps its old self by ``overlap``.

    Only the first of the three solutions is a right one. The others lack a division, and all CenterPoints were trained with them.

    >>> gaussian_radius(torch.tensor([5.75]), torch.tensor([2.375])).round(decimals=3)
    tensor([1.5490])
    """
    both, area = l + w, l * w
    moved = (both + (both**2 - 4 * area * (1 - overlap) / (1 + overlap)).sqrt()) / 2
    inner = (2 * both + (4 * both**2 - 16 * (1 - overlap) * area).clamp(min=0).sqrt()) / 2
    outer = (
        -2 * overlap * both
        + (4 * overlap**2 * both**2 + 16 * overlap * (1 - overlap) * area).sqrt()
    ) / 2
    return torch.minimum(torch.minimum(moved, inner), outer)


def encode(targets: Sequence[dict[str, Tensor]], config: Config, like: Tensor) -> Encoded:
    """Targets of a batch on the head's map, with the type and device of ``like`` (B, ...).

    >>> boxes = torch.tensor([[0.4, 0.4, 0.0, 2.0, 4.0, 1.5, 0.0, 1.0, float("nan")]])
    >>> encoded = encode([{"boxes": boxes, "labels": torch.tensor([0])}], Config.mmdet3d_pillar(), torch.zeros(1))
    >>> encoded.tasks[0].values.round(decimals=2)
    tensor([[0.5000, 0.5000, 0.0000, 1.3900, 0.6900, 0.4100, 0.0000, 1.0000, 1.0000,
                nan]])
    """
    if len(targets) != len(like):
        raise BoxcovError(f"{len(like)} frames in the batch, but targets for {len(targets)}")
    boxes, labels, frame = _joined(targets, config, like)
    cell_size = boxes.new_tensor(config.cell)
    at = (boxes[:, :2] - boxes.new_tensor(config.point_range[:2])) / cell_size  # (N, 2) in cells
    cell = at.floor()
    rows, columns = config.map_size
    sizes = [len(classes) for classes in config.tasks]
    task, first = _task_of_class(sizes, labels.device)[labels].unbind(1)
    kept = rank_among_equals(task * len(targets) + frame) < config.loss.max_objects
    kept &= ((cell >= 0) & (cell < boxes.new_tensor([columns, rows]))).all(1) & (
        boxes[:, 3:5] > 0
    ).all(1)
    index = kept.nonzero()[:, 0]
    index = index[task[index].argsort(stable=True)]
    counts = torch.bincount(task[index], minlength=len(sizes)).tolist()
    column, row = cell[index].long().unbind(1)
    heat = like.new_zeros(len(targets), sum(sizes), rows, columns)
    _splat(heat, frame[index], labels[index], row, column, boxes[index, 3:5] / cell_size.flip(0))
    per_object = (
        frame[index],
        (labels - first)[index],
        row,
        column,
        _values(boxes, at - cell, config)[index],
    )
    parts = zip(heat.split(sizes, 1), *(numbers.split(counts) for numbers in per_object))
    return Encoded(tuple(TaskTargets(*part) for part in parts))


def _task_of_class(sizes: Sequence[int], device: torch.device) -> Tensor:
    """For each class (C, 2) its task, and that task's first class."""
    starts = [sum(sizes[:task]) for task in range(len(sizes))]
    return torch.tensor(
        [[task, start] for task, start in enumerate(starts) for _ in range(sizes[task])],
        device=device,
    )


def _joined(
    targets: Sequence[dict[str, Tensor]], config: Config, like: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """All boxes (N, D), labels (N,) and frames (N,)."""
    D = len(config.box_fields)
    boxes, labels = [], []
    for b, target in enumerate(targets):
        given, label = target["boxes"].to(like), target["labels"].to(like.device)
        if given.dim() != 2 or given.shape[1] not in {D, 9} or len(given) != len(label):
            raise BoxcovError(
                f"targets of frame {b}: boxes must have the shape (n, {D}) for {' '.join(config.box_fields)} and labels (n,), "
                f"got {tuple(given.shape)} and {tuple(label.shape)}"
            )
        boxes.append(given[:, :D])
        labels.append(label)
    every, all_labels = torch.cat(boxes), torch.cat(labels)
    sound = every[:, :7].isfinite().all(1) & (all_labels >= 0) & (all_labels < len(config.classes))
    if not bool(sound.all()):  # one look at the device for all frames
        _refuse(boxes, labels, config)
    counts = torch.tensor([len(label) for label in labels], device=like.device)
    frames = torch.arange(len(targets), device=like.device)
    return every, all_labels.long(), torch.repeat_interleave(frames, counts, output_size=len(every))


def _refuse(boxes: list[Tensor], labels: list[Tensor], config: Config) -> None:
    for b, (given, label) in enumerate(zip(boxes, labels)):
        if not bool(given[:, :7].isfinite().all()):
            raise BoxcovError(
                f"targets of frame {b}: a box holds a NaN or an infinity outside of its velocity"
            )
        if len(label) and not 0 <= int(label.min()) <= int(label.max()) < len(config.classes):
            raise BoxcovError(
                f"targets of frame {b}: labels from {int(label.min())} to {int(label.max())}, but {len(config.classes)} classes"
            )


def _values(boxes: Tensor, offset: Tensor, config: Config) -> Tensor:
    w, l, h, yaw = boxes[:, 3:7].unbind(1)
    size = torch.stack([l, w, h], 1).clamp(min=torch.finfo(boxes.dtype).tiny).log()
    parts = [offset, boxes[:, 2:3], size, torch.stack([yaw.sin(), yaw.cos()], 1)]
    return torch.cat([*parts, boxes[:, 7:9]] if config.velocity else parts, 1)


def _splat(
    heat: Tensor, frame: Tensor, label: Tensor, row: Tensor, column: Tensor, size: Tensor
) -> None:
    """Draw a Gaussian for each of n objects of ``size`` (n, 2), w and l in cells, into ``heat``: where several meet, the highest counts."""
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
    seen = (dy.abs() <= r) & (dx.abs() <= r) & (y >= 0) & (y < rows) & (x >= 0) & (x < columns)
    flat = (
        (frame * classes + label).reshape(-1, 1, 1) * rows + y.clamp(0, rows - 1)
    ) * columns + x.clamp(0, columns - 1)
    heat.view(-1).scatter_reduce_(
        0, flat.flatten(), (splat * seen).flatten(), "amax"
    )  # what is not seen is a 0 on the border: no more than was there
