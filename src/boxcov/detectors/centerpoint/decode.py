"""From the head's maps to boxes x y z w l h yaw vx vy, differentiable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from boxcov.detector import Selection
from boxcov.detectors.centerpoint.config import Config
from boxcov.detectors.centerpoint.head import StackedMaps, TaskMaps


@dataclass(frozen=True)
class CellIndex:
    """The cells of m instances on the head's maps; ``Selection.where`` of a CenterPoint."""

    frame: Tensor  # (m,)
    task: Tensor  # (m,)
    row: Tensor  # (m,)
    column: Tensor  # (m,)

    def __getitem__(self, index: Tensor) -> CellIndex:
        return CellIndex(self.frame[index], self.task[index], self.row[index], self.column[index])


def values_at(tasks: Sequence[TaskMaps], at: CellIndex, names: Sequence[str]) -> dict[str, Tensor]:
    """Return the outputs (m, n) of the branches at m cells, each in its own task.

    names: of the branches of boxes, in their order.
    """
    if isinstance(tasks, StackedMaps):
        values = tasks.stacked[at.frame, at.task, :, at.row, at.column]
        sizes = [tasks[0][name].shape[1] for name in names]
        return dict(zip(names, values[:, : sum(sizes)].split(sizes, 1)))
    each = torch.arange(len(at.task), device=at.task.device)
    out = {}
    for name in names:
        all_tasks = torch.stack([maps[name][at.frame, :, at.row, at.column] for maps in tasks])
        out[name] = all_tasks[at.task, each]  # of (tasks, m, n)
    return out


def logits_at(tasks: Sequence[TaskMaps], selection: Selection) -> Tensor:
    """Return the heat map's logit (m,) of each instance's class at its cell."""
    at = selection.where
    heat = [maps["heatmap"][at.frame, :, at.row, at.column] for maps in tasks]
    return torch.cat(heat, 1).gather(1, selection.labels[:, None])[:, 0]


def boxes_of(values: Mapping[str, Tensor], row: Tensor, column: Tensor, config: Config) -> Tensor:
    """Return boxes (m, 9), or (m, 7) without velocity, from the branches' outputs (m, n)."""
    # Python numbers, not tensors: those would have to be copied to a GPU
    x, y = (
        (at + values["reg"][:, i]) * config.cell[i] + config.point_range[i]
        for i, at in enumerate((column, row))
    )
    centre = torch.stack([x, y], 1)
    l, w, h = values["dim"].exp().unbind(1)
    yaw = torch.atan2(values["rot"][:, 0], values["rot"][:, 1])
    parts = [centre, values["height"], torch.stack([w, l, h, yaw], 1)]
    return torch.cat([*parts, values["vel"]] if config.velocity else parts, 1)
