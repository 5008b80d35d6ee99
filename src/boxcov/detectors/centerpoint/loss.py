"""The training loss of each frame: focal loss of the heat maps, weighted L1 of the values at the objects' cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from boxcov.detectors.centerpoint.config import Config, Loss
from boxcov.detectors.centerpoint.head import TaskMaps
from boxcov.detectors.centerpoint.targets import Encoded, TaskTargets


def frame_losses(tasks: Sequence[TaskMaps], encoded: Encoded, config: Config) -> Tensor:
    """The loss of each frame (B,), summed over the tasks.

    >>> from boxcov.detectors.centerpoint.targets import encode
    >>> config, none = Config.mmdet3d_pillar(), {"boxes": torch.zeros(0, 9), "labels": torch.zeros(0, dtype=torch.long)}
    >>> maps = [{"heatmap": torch.full((1, len(t), 128, 128), -9.0)} for t in config.tasks]
    >>> for task in maps:
    ...     task.update({name: torch.zeros(1, n, 128, 128) for name, n in config.branches.items()})
    >>> float(frame_losses(maps, encode([none], config, maps[0]["heatmap"]), config)) < 1e-3
    True
    """
    return (
        heat_losses(tasks, encoded.tasks, config.loss) + box_losses(tasks, encoded.tasks, config)
    ).sum(0)


def heat_losses(tasks: Sequence[TaskMaps], targets: Sequence[TaskTargets], rules: Loss) -> Tensor:
    """The focal loss of each task and frame (T, B), alpha 2, gamma 4.

    >>> none = torch.zeros(0, dtype=torch.long)
    >>> target = TaskTargets(torch.zeros(1, 1, 2, 2), none, none, none, none, torch.zeros(0, 10))
    >>> heat_losses([{"heatmap": torch.zeros(1, 1, 2, 2)}], [target], Loss())
    tensor([[0.6931]])
    """
    p = (
        torch.cat([maps["heatmap"] for maps in tasks], 1).sigmoid().clamp(1e-4, 1 - 1e-4)
    )  # (B, all classes, h, w)
    heat = torch.cat([target.heat for target in targets], 1)
    sizes = [target.heat.shape[1] for target in targets]
    away = _by_task(-(1 - p).log() * p**2 * (1 - heat) ** 4, sizes)
    at = -p.log() * (1 - p) ** 2
    if rules.positives == "objects":
        objects = _joined(targets)
        found = objects.summed(at[objects.frame, objects.label, objects.row, objects.column])
        count = objects.summed(p.new_ones(len(objects.frame)))
    else:
        peaks = heat == 1
        found, count = _by_task(at * peaks, sizes), _by_task(peaks, sizes)
    return found + away if rules.normaliser == "none" else (found + away) / count.clamp(min=1)


def box_losses(tasks: Sequence[TaskMaps], targets: Sequence[TaskTargets], config: Config) -> Tensor:
    """The weighted L1 loss of each task and frame (T, B); values that are not known count nothing.

    >>> config, cell = Config.mmdet3d_pillar(), torch.zeros(1, dtype=torch.long)
    >>> maps = {name: torch.zeros(1, n, 2, 2) for name, n in config.branches.items()}
    >>> values = torch.tensor([[1.0, 1.0, 0, 0, 0, 0, 0, 0, 5.0, torch.nan]])
    >>> box_losses([maps], [TaskTargets(torch.zeros(1, 1, 2, 2), cell, cell, cell, cell, values)], config)
    tensor([[0.7499]])
    """
    rules, objects = config.loss, _joined(targets)
    joined = torch.cat([maps[name] for maps in tasks for name in config.branches], 1).unflatten(
        1, (len(tasks), -1)
    )  # (B, T, 10, h, w)
    found = joined[objects.frame, objects.task, :, objects.row, objects.column]  # (n, 10)
    known = objects.values.isfinite()
    off = (found - torch.where(known, objects.values, 0)).abs() * known
    weights = found.new_tensor(rules.weights[: found.shape[1]])
    total = objects.summed((off * weights).sum(1))
    if rules.normaliser == "none":
        return rules.box_weight * total
    count = objects.summed(found.new_ones(len(found)))
    return (
        rules.box_weight
        * total
        / (count + 1e-4 if rules.normaliser == "plus" else count.clamp(min=1))
    )


@dataclass(frozen=True)
class _Objects:
    """The n objects of all tasks, one task behind the other: what is done to all of them at once is done in one operation."""

    tasks: int
    frames: int
    task: Tensor  # (n,)
    frame: Tensor  # (n,)
    label: Tensor  # (n,) among the classes of all tasks
    row: Tensor  # (n,)
    column: Tensor  # (n,)
    values: Tensor  # (n, 10)

    def summed(self, values: Tensor) -> Tensor:
        """Sums (T, B) of the objects' values (n,)."""
        return (
            values.new_zeros(self.tasks * self.frames)
            .index_add(0, self.task * self.frames + self.frame, values)
            .view(self.tasks, -1)
        )


def _joined(targets: Sequence[TaskTargets]) -> _Objects:
    sizes = [target.heat.shape[1] for target in targets]
    first = torch.tensor([[task, sum(sizes[:task])] for task in range(len(sizes))])
    task, before = (
        first.repeat_interleave(torch.tensor([len(target.frame) for target in targets]), 0)
        .to(targets[0].frame.device)
        .unbind(1)
    )
    frame, label, row, column, values = (
        torch.cat([getattr(target, name) for target in targets])
        for name in ("frame", "label", "row", "column", "values")
    )
    return _Objects(
        len(targets), len(targets[0].heat), task, frame, label + before, row, column, values
    )


def _by_task(maps: Tensor, sizes: list[int]) -> Tensor:
    """Sums (T, B) of maps (B, all classes, h, w)."""
    return torch.stack([planes.sum(1) for planes in maps.sum((2, 3)).split(sizes, 1)])
