"""Signals of a CenterPoint from its points: how they lie in and around each box.

A box is compared with the points that it should explain. Where they end short of a side, or go on
beyond it, the box is probably misplaced. Two maps of the street, from all sweeps and from the
newest ones, hold the number of points and the highest point of each cell; a box is sampled on a
regular grid in its own axes. All shapes are fixed, so a static graph can compute it, too.
"""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor

from boxcov.detectors.centerpoint.config import Config
from boxcov.detectors.signals import Signals

CELL = 0.2  # metres
MARGIN = 0.7  # metres around a box that are sampled, too
ABOVE_GROUND = 0.25  # metres above the bottom of the box
NEWEST = 0.06  # seconds
_SAMPLES = (17, 13)  # along the box and across it
_EMPTY = -1e3  # height of a cell without points
_OUTSIDE = 1024  # cells for points outside the maps, a power of two
_SWEEPS = ("all sweeps", "newest")
_NAMES = (
    *("inside", "around", "above ground", "front", "back", "left", "right", "top"),
    *("mean along", "mean across", "spread along", "spread across", "skew", "depth"),
    *("far end", "near end", "far side", "near side", "mean away", "mean aside", "skew away"),
)


def point_maps(points: Tensor, frame: Tensor, frames: int, config: Config) -> Tensor:
    """Return maps (frames, 4, ny, nx) of points (N, 5), given the frame (N,) of each.

    The highest point of each cell in all sweeps, and in the newest; then the number of points.
    """
    x0, y0, _, x1, y1, _ = config.point_range
    nx, ny = ceil((x1 - x0) / CELL), ceil((y1 - y0) / CELL)
    x, y, z, _, age = points.float().unbind(1)
    column, row = ((x - x0) / CELL).floor(), ((y - y0) / CELL).floor()
    inside = (column >= 0) & (column < nx) & (row >= 0) & (row < ny)  # False for a NaN
    cell = (frame * ny + row.long()) * nx + column.long()
    # older points, newest points, and points outside, which several cells share on a GPU
    size = frames * ny * nx
    spread = 2 * size + (torch.arange(len(cell), device=cell.device) & (_OUTSIDE - 1))
    cell = torch.where(inside, cell + size * (age < NEWEST), spread)
    highest = z.new_full((2 * size + _OUTSIDE,), _EMPTY).scatter_reduce(0, cell, z, "amax")
    count = z.new_zeros(2 * size + _OUTSIDE).scatter_add(0, cell, torch.ones_like(z))
    highest, count = (t[:-_OUTSIDE].view(2, frames, ny, nx) for t in (highest, count))
    return torch.stack([highest.amax(0), highest[1], count.sum(0), count[1]], 1)


def point_signals(maps: Tensor, boxes: Tensor, frame: Tensor, config: Config) -> Signals:
    """Return named numbers (m,) of boxes (m, 7 or more), given ``point_maps``.

    frame: (m,) the frame of each box. Numbers of points are logarithms; front, back, left, right
    and top say how far the points go beyond the side, in metres, negative if they end before it;
    means and spreads are relative to the box; depth is how deep points lie inside it. The last
    seven are the same with axes that point away from the sensor: it sees the near side of an
    object, which may be the front or the back of the box.
    """
    if not len(boxes):
        return {f"points {s}, {n}": boxes.new_zeros(0) for s in _SWEEPS for n in _NAMES}
    w, l, h = (side[:, None] for side in boxes[:, 3:6].float().unbind(1))  # (m, 1)
    # along the box (m, a), across it (m, b); samples are (2, m, a, b)
    u, v = (
        (side / 2 + MARGIN) * torch.linspace(-1, 1, n, device=maps.device)
        for side, n in zip((l, w), _SAMPLES)
    )
    height, count = _samples(maps, boxes.float(), frame, (u, v), config)
    half_h = h[:, :, None] / 2
    is_high = (height > ABOVE_GROUND - half_h) & (height < half_h + 2 * MARGIN)
    seen = is_high.to(u.dtype)
    inside_u, inside_v = u.abs() < l / 2, v.abs() < w / 2
    is_inside = inside_u[:, :, None] & inside_v[:, None, :]  # (m, a, b)
    n_inside, n_high = count * is_inside, count * seen
    n_both = n_high * is_inside
    depth = torch.minimum((l / 2 - u.abs())[:, :, None], (w / 2 - v.abs())[:, None, :])
    above = torch.where(is_high, height, _EMPTY).amax((2, 3)) - h[:, 0] / 2
    total = seen.sum((2, 3))  # (2, m)
    is_seen = total > 0
    columns = [
        n_inside.sum((2, 3)).log1p(),
        (n_high - n_both).sum((2, 3)).clamp(min=0).log1p(),
        n_both.sum((2, 3)).log1p(),
        *_extents(u, seen.sum(3), l),
        *_extents(v, seen.sum(2), w),
        torch.where(is_seen, above, 0),
        *_moments(seen, u, v, l, w),
        (depth * n_both).sum((2, 3)) / n_both.sum((2, 3)).clamp(min=1e-6),
    ]
    columns += _away_from_sensor(columns, boxes.float())
    return {
        f"points {sweeps}, {name}": column[i]
        for i, sweeps in enumerate(_SWEEPS)
        for name, column in zip(_NAMES, columns)
    }


def _away_from_sensor(columns: list[Tensor], boxes: Tensor) -> list[Tensor]:
    """Return extents, means and skew (2, m) of all columns, with the far end of the box first."""
    front, back, left, right = columns[3:7]
    along, across, skew = columns[8], columns[9], columns[12]
    x, y, yaw = boxes[:, 0], boxes[:, 1], boxes[:, 6]
    front_is_far = x * yaw.cos() + y * yaw.sin() >= 0
    left_is_far = y * yaw.cos() - x * yaw.sin() >= 0
    return [
        torch.where(front_is_far, front, back),
        torch.where(front_is_far, back, front),
        torch.where(left_is_far, left, right),
        torch.where(left_is_far, right, left),
        torch.where(front_is_far, along, -along),
        torch.where(left_is_far, across, -across),
        torch.where(front_is_far == left_is_far, skew, -skew),
    ]


def _extents(at: Tensor, seen: Tensor, side: Tensor) -> tuple[Tensor, Tensor]:
    """Return how far samples ``at`` (m, n) with points, ``seen`` (2, m, n), exceed the sides."""
    is_seen = seen > 0
    first, last = (torch.where(is_seen, t, _EMPTY).amax(2) - side[:, 0] / 2 for t in (at, -at))
    any_seen = is_seen.any(2)
    return torch.where(any_seen, first, 0), torch.where(any_seen, last, 0)


def _moments(seen: Tensor, u: Tensor, v: Tensor, l: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Return means, log spreads and correlation of the samples with points (2, m, a, b)."""
    total = seen.sum((2, 3))
    count, is_seen = total.clamp(min=1), total > 0
    by_u, by_v = seen.sum(3), seen.sum(2)
    mean_u, mean_v = (u * by_u).sum(2) / count, (v * by_v).sum(2) / count
    spread_u, spread_v = (
        (((t - mean[:, :, None]).square() * by).sum(2) / count).sqrt()
        for t, by, mean in ((u, by_u, mean_u), (v, by_v, mean_v))
    )
    product = (u * (seen * v[:, None, :]).sum(3)).sum(2) / count
    length, width = (side[:, 0].clamp(min=CELL) for side in (l, w))
    return (
        mean_u / length,
        mean_v / width,
        ((spread_u + 0.05) / length).log() * is_seen,
        ((spread_v + 0.05) / width).log() * is_seen,
        product / (spread_u * spread_v + 0.05),
    )


def _samples(
    maps: Tensor, boxes: Tensor, frame: Tensor, at: tuple[Tensor, Tensor], config: Config
) -> tuple[Tensor, Tensor]:
    """Return the highest point above each box's centre, and the number of points (2, m, a, b).

    at: where boxes are sampled, along them (m, a) and across (m, b). A sample stands for its share
    of the area.
    """
    x, y, z, w, l, _, yaw = (t[:, None, None] for t in boxes[:, :7].unbind(1))
    u, v = at[0][:, :, None], at[1][:, None, :]
    ny, nx = maps.shape[2:]
    x0, y0 = config.point_range[:2]
    column = ((x + u * yaw.cos() - v * yaw.sin() - x0) / CELL).floor()
    row = ((y + u * yaw.sin() + v * yaw.cos() - y0) / CELL).floor()
    is_on_map = (column >= 0) & (column < nx) & (row >= 0) & (row < ny)
    cell = row.clamp(0, ny - 1).long() * nx + column.clamp(0, nx - 1).long()
    index = (frame[:, None, None] * (4 * ny * nx) + cell).flatten()
    flat = maps.flatten()
    found = [flat[index + i * (ny * nx)].view(cell.shape) for i in range(4)]
    highest, count = torch.stack(found[:2]), torch.stack(found[2:])
    area = (l + 2 * MARGIN) * (w + 2 * MARGIN) / (_SAMPLES[0] * _SAMPLES[1] * CELL**2)
    return torch.where(is_on_map, highest - z, _EMPTY), count * (is_on_map * area)
