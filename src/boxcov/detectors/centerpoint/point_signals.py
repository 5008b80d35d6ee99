"""Signals of a CenterPoint from its points: how they lie in and around each box.

A box is compared with the points that it should explain. Where they end short of a side, or go on
beyond it, the box is probably misplaced. Two maps of the street, from all sweeps and from the
newest ones, hold the number of points and the highest point of each cell; a box is sampled on a
regular grid in its own axes. All shapes are fixed, so a static graph can compute it, too. Most
tensors are small, so the number of operations decides the time: sums over samples are products
with constants.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from boxcov._torch.process_state import matrix_precision
from boxcov.detectors.centerpoint.config import Config
from boxcov.detectors.signals import Signals

CELL = 0.2  # metres
MARGIN = 0.7  # metres around a box that are sampled, too
ABOVE_GROUND = 0.25  # metres above the bottom of the box
NEWEST = 0.06  # seconds
_SAMPLES = (17, 13)  # along the box and across it
_EMPTY = -1e3  # height of a cell without points
_SWEEPS = ("all sweeps", "newest")
_NAMES = (
    *("inside", "around", "above ground", "far end", "near end", "far side", "near side", "top"),
    *("mean along", "mean across", "spread along", "spread across", "skew", "depth"),
)


def point_maps(points: Tensor, frame: Tensor | int, frames: int, config: Config) -> Tensor:
    """Return maps (4, frames, ny + 2, nx + 2) of points (N, 5), given the frame (N,) of each.

    The highest point of each cell in all sweeps, and in the newest; then the number of points. The
    cells at the border hold the points outside the range.
    """
    (x0, y0), (nx, ny) = config.point_range[:2], _shape(config.point_range)
    x, y, z, _, age = points.float().unbind(1)
    column, row = (_cells(t - low, n) for t, low, n in ((x, x0, nx), (y, y0, ny)))
    size = frames * (ny + 2) * (nx + 2)
    cell = column.add_(row, alpha=nx + 2).add_(nx + 3)
    if frames > 1:
        cell = cell + frame * ((ny + 2) * (nx + 2))
    cell = cell.add_(age < NEWEST, alpha=size).long()
    maps = z.new_empty(4, size)
    highest, count = maps[:2].fill_(_EMPTY), maps[2:].zero_()  # of the older points, and the newest
    highest.view(-1).scatter_reduce_(0, cell, z, "amax")
    count.view(-1).scatter_add_(0, cell, torch.ones_like(z))
    torch.maximum(highest[0], highest[1], out=highest[0])
    count[0].add_(count[1])
    return maps.view(4, frames, ny + 2, nx + 2)


def _shape(point_range: tuple[float, ...]) -> tuple[int, int]:
    """Return the number of columns and rows of the maps within the range."""
    x0, y0, _, x1, y1, _ = point_range
    return ceil((x1 - x0) / CELL), ceil((y1 - y0) / CELL)


def _cells(metres: Tensor, count: int) -> Tensor:
    """Return the cells of coordinates, which are overwritten; -1 or ``count`` beyond the map."""
    # clamped as integers: what a NaN becomes depends on the machine
    return metres.div_(CELL).floor_().int().clamp_(-1, count)


class _Grid(NamedTuple):
    """Constants of the samples of a box, of which n lie along it and k across it."""

    low: Tensor  # (2,) x and y of the corner of the maps
    first: Tensor  # (2, 1) column and row of the first cell of the range
    last: Tensor  # (2, 1)
    places: Tensor  # (3, n k) along and across the box from -1 to 1, and 1; over the size of a cell
    along: Tensor  # (n, 1) from the centre, up to 1
    across: Tensor  # (k,)
    steps: Tensor  # (2,) samples from the centre to an end
    sums: Tensor  # (n k, n + k + 6) over the lines of samples, then the moments
    ends: Tensor  # (4, n + k) how far each line is to the far and near end, far and near side


@lru_cache(maxsize=16)
@torch.inference_mode(False)
def _grid(device: torch.device, point_range: tuple[float, ...]) -> _Grid:
    """Return the constants, made once per device: they would take many launches per frame."""
    steps = [n // 2 for n in _SAMPLES]
    axes = [torch.arange(-n, n + 1.0) for n in steps]
    a, b = (t.flatten() for t in torch.meshgrid(*axes, indexing="ij"))
    lines = [t[:, None] == axis for t, axis in zip((a, b), axes)]
    along, across = (axis / n for axis, n in zip(axes, steps))
    ends = torch.full((4, sum(_SAMPLES)), _EMPTY)
    ends[:2, : _SAMPLES[0]] = torch.stack([along, -along])
    ends[2:, _SAMPLES[0] :] = torch.stack([across, -across])
    grid = _Grid(
        low=torch.tensor(point_range[:2]) - CELL,
        first=torch.ones(2, 1, dtype=torch.int32),
        last=torch.tensor(_shape(point_range), dtype=torch.int32)[:, None],
        places=torch.stack([a / steps[0], b / steps[1], torch.ones_like(a)]) / CELL,
        along=along.abs()[:, None],
        across=across.abs(),
        steps=torch.tensor(steps, dtype=torch.float32),
        # whole numbers, so that sums are exact
        sums=torch.cat([*lines, torch.stack([a**0, a, b, a * a, b * b, a * b], 1)], 1),
        ends=ends,
    )
    return _Grid(*(t.to(device) for t in grid))


@matrix_precision("float32")
def point_signals(maps: Tensor, boxes: Tensor, frame: Tensor, config: Config) -> Signals:
    """Return named numbers (m,) of boxes (m, 7 or more), given ``point_maps``.

    frame: (m,) the frame of each box. Numbers of points are logarithms; ends, sides and top say how
    far the points go beyond them, in metres, negative if they end before; means and spreads are
    relative to the box; depth is how deep points lie inside it. The axes of a box point away from
    the sensor: it sees the near side of an object, which may be the front or the back of the box.
    """
    grid, boxes = _grid(maps.device, config.point_range), boxes.float()
    half = boxes[:, 3:5].flip(1) / 2  # (m, 2) along the box and across it
    reach = half + MARGIN
    axes = _axes_away(boxes) * reach[:, None]
    values, is_on_map = _samples(maps, boxes[:, :2], axes, frame, grid)
    above = values[:2] - (boxes[:, 2:3] + (MARGIN + ABOVE_GROUND / 2))  # (2, m, n k)
    limit = boxes[:, 5:6] / 2 + (MARGIN - ABOVE_GROUND / 2)
    is_high = (above.abs() < limit) & is_on_map
    top = torch.where(is_high, above, _EMPTY).amax(2, keepdim=True) - (limit - 2 * MARGIN)
    counts = _counts(values[2:], torch.stack([is_on_map.expand_as(is_high), is_high]), half, grid)
    lines, total, moments = (is_high.float() @ grid.sums).split([sum(_SAMPLES), 1, 5], 2)
    ends = grid.ends.masked_fill(lines[:, :, None] == 0, _EMPTY).amax(3).unflatten(2, (2, 2))
    extents = (ends * reach[:, :, None] - half[:, :, None]).flatten(2)  # (2, m, 4)
    seen = torch.cat([extents, top, *_moments(moments, total, half, reach / grid.steps)], 2)
    parts = [counts[..., :3].log1p(), seen * (total > 0), counts[..., 3:]]
    columns = torch.cat(parts, 2).transpose(1, 2).flatten(0, 1)  # (28, m)
    names = (f"points {sweeps}, {name}" for sweeps in _SWEEPS for name in _NAMES)
    return dict(zip(names, columns.unbind(0)))


def _axes_away(boxes: Tensor) -> Tensor:
    """Return x and y (m, 2, 2) of unit vectors along and across the boxes, away from the sensor."""
    cos, sin = boxes[:, 6].cos(), boxes[:, 6].sin()
    axes = torch.stack([cos, -sin, sin, cos], 1).unflatten(1, (2, 2))
    points_away = (boxes[:, :2, None] * axes).sum(1, keepdim=True) >= 0
    return torch.where(points_away, axes, -axes)


def _samples(
    maps: Tensor, centre: Tensor, axes: Tensor, frame: Tensor, grid: _Grid
) -> tuple[Tensor, Tensor]:
    """Return the maps (4, m, n k) at the samples of each box, and which lie on them (m, n k).

    axes: (m, 2, 2) x and y of what is sampled along the box and across it, from the centre (m, 2).
    """
    origin = (centre - grid.low)[:, :, None]
    place = (torch.cat([axes, origin], 2) @ grid.places).int()  # (m, 2, n k) column and row
    inside = place.clamp(grid.first, grid.last)
    width, cells = maps.shape[3], maps.shape[2] * maps.shape[3]
    index = torch.add(inside[:, 0], inside[:, 1], alpha=width) + (frame * cells)[:, None]
    values = maps.flatten(1).index_select(1, index.flatten()).unflatten(1, index.shape)
    return values, (inside == place).all(1)


def _counts(count: Tensor, counted: Tensor, half: Tensor, grid: _Grid) -> Tensor:
    """Return the points inside, around and above ground, and the mean depth of those (2, m, 4).

    count: (2, m, n k) points in the cells of the samples; counted: (2, 2, m, n k) which samples
    are on the map, and which are high. Each stands for its share of the area that is sampled.
    """
    reach = half + MARGIN
    depth = torch.minimum(
        half[:, :1, None] - reach[:, :1, None] * grid.along,
        half[:, 1:, None] - reach[:, 1:, None] * grid.across,
    ).flatten(1)  # (m, n k), positive inside the box
    weights = torch.stack([depth > 0, depth <= 0, depth.clamp(min=0)], 2)  # (m, n k, 3)
    numbers = (count * counted).flatten(0, 1).transpose(0, 1)  # (m, 4, n k)
    area = reach.prod(1) * (4 / (_SAMPLES[0] * _SAMPLES[1] * CELL**2))
    sums = (numbers @ weights * area[:, None, None]).unflatten(1, (2, 2)).permute(1, 2, 0, 3)
    every, high = sums  # (2, m, 3) inside, around, and depth
    inside, around, depths = high.split(1, 2)
    return torch.cat([every[..., :1], around, inside, depths / inside.clamp(min=1e-6)], 2)


def _moments(moments: Tensor, total: Tensor, half: Tensor, unit: Tensor) -> tuple[Tensor, ...]:
    """Return means, log spreads and correlation of the samples with points (2, m, 2 or 1).

    moments: (2, m, 5) sums of place, its square, and the product of both places; total: (2, m, 1)
    number of samples; unit: (m, 2) metres between samples.
    """
    first, second, product = moments.split([2, 2, 1], 2)
    count, size = total.clamp(min=1), (2 * half).clamp(min=CELL)
    spread = torch.addcmul(second * total, first, first, value=-1).sqrt() / count * unit
    correlation = product / count * unit.prod(1, keepdim=True)
    return (
        first / count * (unit / size),
        ((spread + 0.05) / size).log(),
        correlation / (spread.prod(2, keepdim=True) + 0.05),
    )
