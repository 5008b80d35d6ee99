"""Signals of a CenterPoint: numbers per box that its maps contain and nobody reports."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from boxcov.detector import Selection
from boxcov.detectors.centerpoint.config import Config
from boxcov.detectors.centerpoint.decode import CellIndex, values_at
from boxcov.detectors.centerpoint.head import TaskMaps, at_least_single

OCCUPANCY_WINDOWS = (1.0, 2.5)  # metres from the box's cell to the border of a square
_NAMES = {
    "reg": ("x", "y"),
    "height": ("z",),
    "dim": ("l", "w", "h"),
    "rot": ("sin", "cos"),
    "vel": ("x", "y"),
}
_TINY = 1e-6


def signals(
    tasks: Sequence[TaskMaps], bev: Tensor, selection: Selection, config: Config
) -> dict[str, Tensor]:
    """Return named numbers (m,) of the selected boxes.

    The raw outputs at the box's cell; how far its neighbours disagree with it (``spread ...``, the
    root mean square over the 3 x 3 cells, weighted by their scores); the length of the heading
    vector; how far the peak of the heat map stands out; the margin to the next class; and how many
    cells of the bird's-eye view ``bev`` (B, channels, ny, nx) are occupied around the box.
    """
    at = selection.where
    cells, inside = _window(at, tasks[0]["reg"].shape[2:], 1)  # (9 m,), (m, 9)
    logits = torch.cat([t["heatmap"][cells.frame, :, cells.row, cells.column] for t in tasks], 1)
    logits = at_least_single(logits).unflatten(0, (-1, 9))  # (m, 9, classes)
    values = values_at(tasks, cells, list(config.branches))
    windows = {name: at_least_single(v).unflatten(0, (-1, 9)) for name, v in values.items()}
    own = logits.gather(2, selection.labels[:, None, None].expand(-1, 9, 1))[:, :, 0]  # (m, 9)
    found = _peak(logits[:, 4], own, inside, selection.labels)
    for name, window in windows.items():
        found |= {f"{name} {n}": v for n, v in zip(_NAMES[name], window[:, 4].unbind(1))}
    found["heading length"] = (windows["rot"][:, 4].norm(dim=1) + _TINY).log()
    found |= _spread(windows, own.sigmoid() * inside, cells, config)
    return found | _occupancy(bev, at, config)


def _window(at: CellIndex, shape: Sequence[int], reach: int) -> tuple[CellIndex, Tensor]:
    """Return the cells (n m,) around each of m cells, clamped to the map, and which lie in it."""
    steps = torch.arange(-reach, reach + 1, device=at.row.device)
    down, right = (t.flatten() for t in torch.meshgrid(steps, steps, indexing="ij"))
    row, column = at.row[:, None] + down, at.column[:, None] + right  # (m, n)
    inside = (row >= 0) & (row < shape[0]) & (column >= 0) & (column < shape[1])
    row, column = row.clamp(0, shape[0] - 1), column.clamp(0, shape[1] - 1)
    frame, task = (t[:, None].expand_as(row) for t in (at.frame, at.task))
    return CellIndex(*(t.flatten() for t in (frame, task, row, column))), inside


def _peak(centre: Tensor, own: Tensor, inside: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return how far the logit stands above its neighbours (m, 9) and other classes (m, C)."""
    logit = own[:, 4]
    around = inside.clone()
    around[:, 4] = False
    mean = (own * around).sum(1) / around.sum(1).clamp(min=1)
    lowest = torch.finfo(own.dtype).min
    highest = own.masked_fill(~around, lowest).amax(1)
    highest = torch.where(around.any(1), highest, logit)
    others = centre.scatter(1, labels[:, None], lowest)
    margin = logit - others.amax(1) if centre.shape[1] > 1 else torch.zeros_like(logit)
    return {
        "logit": logit,
        "peak over mean": logit - mean,
        "peak over highest": logit - highest,
        "class margin": margin,
    }


def _spread(
    windows: dict[str, Tensor], weight: Tensor, cells: CellIndex, config: Config
) -> dict[str, Tensor]:
    """Return the log of the weighted root mean square distance of the neighbours' boxes.

    ``weight`` (m, 9) is the score of each neighbour. Centres are in metres, sizes in logarithms,
    headings compared as directions.
    """
    column, row = (c.unflatten(0, (-1, 9)) for c in (cells.column, cells.row))
    reg = windows["reg"]
    centre = torch.stack(
        [(reg[:, :, 0] + column) * config.cell[0], (reg[:, :, 1] + row) * config.cell[1]], 2
    )
    direction = torch.nn.functional.normalize(windows["rot"], dim=2)
    names = ["x", "y", "z", "l", "w", "h", "sin", "cos"]
    every = [centre, windows["height"], windows["dim"], direction]
    if "vel" in windows:
        names, every = [*names, "vx", "vy"], [*every, windows["vel"]]
    values = torch.cat(every, 2)  # (m, 9, n)
    square = (values - values[:, 4:5]).square() * weight[:, :, None]
    mean = square.sum(1) / weight.sum(1, keepdim=True).clamp(min=_TINY)
    logs = 0.5 * (mean + _TINY).log()
    return {f"spread {name}": column for name, column in zip(names, logs.unbind(1))}


def _occupancy(bev: Tensor, at: CellIndex, config: Config) -> dict[str, Tensor]:
    """Return log(1 + n) of the occupied cells in squares around each box's cell."""
    factor = bev.shape[2] * config.cell[1] / (config.point_range[4] - config.point_range[1])
    size = config.cell[0] / factor  # metres per cell of the bird's-eye view
    centre = CellIndex(
        at.frame, at.task, *((t * factor + factor / 2).long() for t in (at.row, at.column))
    )
    reach = [max(1, round(metres / size)) for metres in OCCUPANCY_WINDOWS]
    cells, inside = _window(centre, bev.shape[2:], max(reach))
    occupied = bev[cells.frame, :, cells.row, cells.column].ne(0).any(1)
    side = 2 * max(reach) + 1
    window = (occupied.unflatten(0, (-1, side * side)) & inside).unflatten(1, (side, side))
    found = {}
    for metres, r in zip(OCCUPANCY_WINDOWS, reach):
        edge = max(reach) - r
        part = window[:, edge : side - edge, edge : side - edge]
        found[f"occupied {metres:g} m"] = part.sum((1, 2)).to(torch.float32).log1p()
    return found
