"""From the head's maps to boxes x y z w l h yaw vx vy, differentiable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from boxcov.detectors.centerpoint.config import Config
from boxcov.detectors.centerpoint.network import StackedMaps, TaskMaps


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
    sizes = [tasks[0][name].shape[1] for name in names]
    if isinstance(tasks, StackedMaps):
        values = tasks.stacked[at.frame, at.task, :, at.row, at.column]
    else:
        every = _columns([maps[name] for maps in tasks for name in names], at)
        own = at.task[:, None, None].expand(-1, 1, sum(sizes))
        values = every.unflatten(1, (len(tasks), -1)).gather(1, own)[:, 0]
    return dict(zip(names, values[:, : sum(sizes)].split(sizes, 1)))


def class_logits_at(tasks: Sequence[TaskMaps], at: CellIndex) -> Tensor:
    """Return the heat maps' logits (m, classes) of all tasks at m cells."""
    maps = [maps["heatmap"] for maps in tasks]
    if not isinstance(tasks, StackedMaps):
        return _columns(maps, at)
    every = tasks.stacked[at.frame, :, :, at.row, at.column]  # (m, tasks, outputs)
    first = sum(t.shape[1] for t in tasks[0].values()) - maps[0].shape[1]
    heat = (t[:, first : first + m.shape[1]] for t, m in zip(every.unbind(1), maps))
    return torch.cat(list(heat), 1)


def _columns(maps: Sequence[Tensor], at: CellIndex) -> Tensor:
    """Return the channels of all maps (B, n, h, w) at m cells, side by side."""
    height, width = maps[0].shape[2:]
    cell = (at.frame * height + at.row) * width + at.column
    # no copy if the channels come last, as they do behind the encoder
    rows = (each.permute(0, 2, 3, 1).flatten(0, 2) for each in maps)
    return torch.cat([each.index_select(0, cell) for each in rows], 1)


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
