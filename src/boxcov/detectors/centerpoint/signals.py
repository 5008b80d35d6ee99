"""Signals of a CenterPoint: numbers per box that its maps contain but that are not reported."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from boxcov._torch.layers import at_least_float32
from boxcov.detector import Selection
from boxcov.detectors.centerpoint.config import Config
from boxcov.detectors.centerpoint.decode import CellIndex, boxes_of, values_at
from boxcov.detectors.centerpoint.head import TaskMaps
from boxcov.detectors.centerpoint.point_signals import point_signals
from boxcov.detectors.signals import TINY, Signals, class_margin, finite, window, window_signals

OCCUPANCY_WINDOWS = (1.0, 2.5)  # metres from the box's cell to the border of a square
_NAMES = {
    "reg": ("x", "y"),
    "height": ("z",),
    "dim": ("l", "w", "h"),
    "rot": ("sin", "cos"),
    "vel": ("x", "y"),
}


def signals(
    tasks: Sequence[TaskMaps],
    maps: tuple[Tensor, Tensor | None],
    selection: Selection,
    config: Config,
) -> Signals:
    """Return named numbers (m,) of the selected boxes.

    The raw outputs at the box's cell; how far its neighbours disagree with it (``spread ...``, the
    root mean square over the 3 x 3 cells, weighted by their scores); the length of the heading
    vector; how far the peak of the heat map stands out; the margin to the next class; how many
    cells of the bird's-eye view are occupied around the box; and how the points lie in it.

    maps: the bird's-eye view (B, channels, ny, nx), and ``point_maps``.
    """
    bev, points = maps
    at, labels = selection.where, selection.labels
    row, column, inside = window(at.row, at.column, *tasks[0]["reg"].shape[2:])  # (m, 9)
    cells = CellIndex(
        at.frame.repeat_interleave(9), at.task.repeat_interleave(9), row.flatten(), column.flatten()
    )
    heat = torch.cat([t["heatmap"][cells.frame, :, cells.row, cells.column] for t in tasks], 1)
    heat = at_least_float32(heat).unflatten(0, (-1, 9))  # (m, 9, classes)
    values = values_at(tasks, cells, list(config.branches))
    windows = {name: at_least_float32(v).unflatten(0, (-1, 9)) for name, v in values.items()}
    logits = heat.gather(2, labels[:, None, None].expand(-1, 9, 1))[:, :, 0]  # (m, 9)
    names, compared = _compared(windows, row, column, config)
    found = window_signals(logits, compared, inside, names)
    found["class margin"] = class_margin(heat[:, 4], labels)
    for name, branch in windows.items():
        found |= {f"{name} {n}": v for n, v in zip(_NAMES[name], branch[:, 4].unbind(1))}
    found["heading length"] = (windows["rot"][:, 4].norm(dim=1) + TINY).log()
    found |= _occupancy(bev, at, config)
    if points is not None:
        own = {name: branch[:, 4] for name, branch in windows.items()}
        boxes = boxes_of(own, at.row, at.column, config)
        found |= point_signals(points, boxes, at.frame, config)
    return finite(found)


def _compared(
    windows: dict[str, Tensor], row: Tensor, column: Tensor, config: Config
) -> tuple[list[str], Tensor]:
    """Return what is compared with the neighbours (m, 9, n), and its names.

    Centres are in metres, sizes in logarithms, headings compared as directions.
    """
    reg = windows["reg"]
    centre = torch.stack(
        [(reg[:, :, 0] + column) * config.cell[0], (reg[:, :, 1] + row) * config.cell[1]], 2
    )
    names = ["x", "y", "z", "l", "w", "h", "sin", "cos"]
    every = [centre, windows["height"], windows["dim"], F.normalize(windows["rot"], dim=2)]
    if "vel" in windows:
        names, every = [*names, "vx", "vy"], [*every, windows["vel"]]
    return names, torch.cat(every, 2)


def _occupancy(bev: Tensor, at: CellIndex, config: Config) -> Signals:
    """Return log(1 + n) of the occupied cells in squares around each box's cell."""
    factor = bev.shape[2] * config.cell[1] / (config.point_range[4] - config.point_range[1])
    size = config.cell[0] / factor  # metres per cell of the bird's-eye view
    middle_row, middle_column = ((t * factor + factor / 2).long() for t in (at.row, at.column))
    ny, nx = bev.shape[2:]
    reach = [max(1, round(metres / size)) for metres in OCCUPANCY_WINDOWS]
    row, column, inside = window(middle_row, middle_column, ny, nx, max(reach))
    # features follow a ReLU; one maximum over the map is faster than all channels of each window
    occupied = (bev.amax(1) > 0)[at.frame[:, None], row, column]  # (m, side * side)
    side = 2 * max(reach) + 1
    around = (occupied & inside).unflatten(1, (side, side))
    found = {}
    for metres, r in zip(OCCUPANCY_WINDOWS, reach):
        edge = max(reach) - r
        part = around[:, edge : side - edge, edge : side - edge]
        found[f"occupied {metres:g} m"] = part.sum((1, 2)).float().log1p()
    return found
