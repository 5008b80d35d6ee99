"""Intersection over union of aligned pairs of boxes: rotated in space, rotated seen from above, and upright in an image."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
_PLANE = [0, 1, 3, 4, 6]  # x y w l yaw among x y z w l h yaw
_SIGNS = np.array(
    [[1, 1], [-1, 1], [-1, -1], [1, -1]]
)  # corners, counter-clockwise: along the heading, across it


def iou_3d(a: Array, b: Array) -> Array:
    """IoU (n,) of box i of ``a`` with box i of ``b``: (n, 7) as x y z w l h yaw, or longer; upright, z at half height.

    w is across the heading, l along it, yaw from x to y. A box without volume, or with a number that is not finite, has IoU 0.

    >>> car = np.array([[10.0, 5.0, 0.0, 2.0, 4.0, 1.5, 0.3]])
    >>> iou_3d(car, car + [0, 0, 0.75, 0, 0, 0, np.pi]).round(6).tolist()  # half a height above it, looking back
    [0.333333]
    """
    a, b = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    with np.errstate(all="ignore"):
        rise = b[:, 2] - a[:, 2]
        height = np.minimum(a[:, 5] / 2, rise + b[:, 5] / 2) - np.maximum(
            -a[:, 5] / 2, rise - b[:, 5] / 2
        )
        shared = _shared_area(a[:, _PLANE], b[:, _PLANE]) * np.maximum(height, 0)
        return _ratio(shared, a[:, 3:6], b[:, 3:6])


def iou_bev(a: Array, b: Array) -> Array:
    """IoU (n,) seen from above: boxes (n, 5) as x y w l yaw, or (n, 7) as x y z w l h yaw, or longer.

    >>> iou_bev(np.array([[0.0, 0.0, 1.0, 4.0, 0.0]]), np.array([[0.0, 0.0, 1.0, 4.0, np.pi / 2]])).round(6).tolist()  # a cross
    [0.142857]
    """
    a, b = (
        boxes if boxes.shape[1] == 5 else boxes[:, _PLANE]
        for boxes in (np.asarray(a, dtype=float), np.asarray(b, dtype=float))
    )
    with np.errstate(all="ignore"):
        return _ratio(_shared_area(a, b), a[:, 2:4], b[:, 2:4])


def iou_2d(a: Array, b: Array) -> Array:
    """IoU (n,) of boxes (n, 4) as x1 y1 x2 y2.

    >>> iou_2d(np.array([[0.0, 0.0, 2.0, 1.0]]), np.array([[1.0, 0.0, 3.0, 1.0]])).round(6).tolist()
    [0.333333]
    """
    a, b = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    with np.errstate(all="ignore"):
        sides = np.minimum(a[:, 2:4], b[:, 2:4]) - np.maximum(a[:, :2], b[:, :2])
        return _ratio(np.maximum(sides, 0).prod(1), a[:, 2:4] - a[:, :2], b[:, 2:4] - b[:, :2])


def _ratio(shared: Array, sizes_a: Array, sizes_b: Array) -> Array:
    volume_a, volume_b = (np.maximum(sizes, 0).prod(1) for sizes in (sizes_a, sizes_b))
    union = volume_a + volume_b - shared
    sound = (volume_a > 0) & (volume_b > 0) & np.isfinite(union)
    ratio: Array = np.where(sound, np.clip(shared / union, 0, 1), 0.0)
    return ratio


def _shared_area(a: Array, b: Array) -> Array:
    """The area (n,) that two rectangles x y w l yaw have in common.

    With a's heading as the axis, a is the window [-l/2, l/2] x [-w/2, w/2]. The part of a polygon inside a window is the integral around
    the polygon, over the window's x alone, of y held to the window's y. Nothing is decided by comparing corners with edges,
    so edges that touch or coincide are as good as any others. Centres are subtracted first, so large coordinates lose nothing.
    """
    cos, sin = np.cos(a[:, 4]), np.sin(a[:, 4])
    dx, dy = b[:, 0] - a[:, 0], b[:, 1] - a[:, 1]
    centre = np.stack([dx * cos + dy * sin, dy * cos - dx * sin], 1)  # (n, 2)
    turn = b[:, 4] - a[:, 4]
    along, across = (
        np.stack([np.cos(turn), np.sin(turn)], 1),
        np.stack([-np.sin(turn), np.cos(turn)], 1),
    )
    half = np.maximum(b[:, [3, 2]], 0) / 2  # (n, 2) of l, w
    corners = centre[:, None] + (_SIGNS * half[:, None]) @ np.stack([along, across], 1)  # (n, 4, 2)
    return _inside_window(corners, np.roll(corners, -1, axis=1), np.maximum(a[:, [3, 2]], 0) / 2)


def _inside_window(start: Array, end: Array, half: Array) -> Array:
    """The area (n,) inside windows (n, 2) of half sides, of counter-clockwise polygons with edges from ``start`` to ``end`` (n, e, 2)."""
    way, hx, hy = end - start, half[:, None, 0], half[:, None, 1]
    enter, leave = (_time(start[..., 0], way[..., 0], bound) for bound in (-hx, hx))
    first, last = np.minimum(enter, leave), np.maximum(enter, leave)
    low, high = (
        np.clip(_time(start[..., 1], way[..., 1], bound), first, last) for bound in (-hy, hy)
    )
    times = np.stack(
        [first, np.minimum(low, high), np.maximum(low, high), last]
    )  # (4, n, e): y is linear or constant in between
    x = np.clip(start[..., 0] + times * way[..., 0], -hx, hx)
    y = np.clip(start[..., 1] + times * way[..., 1], -hy, hy)
    area: Array = -((y[1:] + y[:-1]) / 2 * np.diff(x, axis=0)).sum((0, 2))
    return np.maximum(area, 0)


def _time(start: Array, way: Array, bound: Array) -> Array:
    """When, in [0, 1], a move from ``start`` by ``way`` is at ``bound``, or nearest to it; 0 for no move."""
    moves = way != 0
    time: Array = np.where(moves, np.clip((bound - start) / np.where(moves, way, 1), 0, 1), 0)
    return time
