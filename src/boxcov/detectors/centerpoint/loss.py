"""The training loss of each frame: focal loss of the heat maps, weighted L1 of the values at the objects' cells."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from boxcov.detectors.centerpoint.config import Config
from boxcov.detectors.centerpoint.head import TaskMaps
from boxcov.detectors.centerpoint.settings import Loss
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
    each = [heat_loss(maps["heatmap"], target, config.loss) + box_loss(maps, target, config) for maps, target in zip(tasks, encoded.tasks)]
    return torch.stack(each).sum(0)


def heat_loss(heatmap: Tensor, target: TaskTargets, rules: Loss) -> Tensor:
    """The focal loss of each frame (B,), alpha 2, gamma 4.

    >>> none = torch.zeros(0, dtype=torch.long)
    >>> target = TaskTargets(torch.zeros(1, 1, 2, 2), none, none, none, none, torch.zeros(0, 10))
    >>> heat_loss(torch.zeros(1, 1, 2, 2), target, Loss())
    tensor([0.6931])
    """
    p = heatmap.sigmoid().clamp(1e-4, 1 - 1e-4)
    away = (-(1 - p).log() * p**2 * (1 - target.heat) ** 4).sum((1, 2, 3))
    at = -p.log() * (1 - p) ** 2
    if rules.positives == "objects":
        found, count = _by_frame(at[target.frame, target.label, target.row, target.column], target.frame, len(p)), _objects(target, p)
    else:
        peaks = target.heat == 1
        found, count = (at * peaks).sum((1, 2, 3)), peaks.sum((1, 2, 3))
    return found + away if rules.normaliser == "none" else (found + away) / count.clamp(min=1)


def box_loss(maps: TaskMaps, target: TaskTargets, config: Config) -> Tensor:
    """The weighted L1 loss of each frame (B,); values that are not known count nothing.

    >>> config, cell = Config.mmdet3d_pillar(), torch.zeros(1, dtype=torch.long)
    >>> maps = {name: torch.zeros(1, n, 2, 2) for name, n in config.branches.items()}
    >>> values = torch.tensor([[1.0, 1.0, 0, 0, 0, 0, 0, 0, 5.0, torch.nan]])
    >>> box_loss(maps, TaskTargets(torch.zeros(1, 1, 2, 2), cell, cell, cell, cell, values), config)
    tensor([0.7499])
    """
    rules = config.loss
    found = torch.cat([maps[name][target.frame, :, target.row, target.column] for name in config.branches], 1)  # (n, 10)
    known = target.values.isfinite()
    off = (found - torch.where(known, target.values, 0)).abs() * known
    weights = found.new_tensor(rules.weights[: found.shape[1]])
    total = _by_frame((off * weights).sum(1), target.frame, len(maps["reg"]))
    if rules.normaliser == "none":
        return rules.box_weight * total
    count = _objects(target, found)
    return rules.box_weight * total / (count + 1e-4 if rules.normaliser == "plus" else count.clamp(min=1))


def _objects(target: TaskTargets, like: Tensor) -> Tensor:
    return _by_frame(like.new_ones(len(target.frame)), target.frame, len(target.heat))


def _by_frame(values: Tensor, frame: Tensor, frames: int) -> Tensor:
    return values.new_zeros(frames).index_add(0, frame, values)
