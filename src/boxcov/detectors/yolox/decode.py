"""From the head's values to boxes in pixels, differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from boxcov.detectors.boxes import corners
from boxcov.detectors.signals import logit_of_log
from boxcov.detectors.yolox.config import STRIDES, Config


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
    widths = [x.shape[3] for x in features]
    cells = [torch.arange(x.shape[2] * x.shape[3], device=x.device) for x in features]
    return Grid(
        level=torch.cat([torch.full_like(cell, level) for level, cell in enumerate(cells)]),
        row=torch.cat([cell // width for cell, width in zip(cells, widths)]),
        column=torch.cat([cell % width for cell, width in zip(cells, widths)]),
    )


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
