"""Geometry of boxes: IoU of rotated and upright boxes, corners, and ellipses of covariances."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
_PLANE = [0, 1, 3, 4, 6]  # x y w l yaw among x y z w l h yaw
# signs of the corners along and across the heading, counter-clockwise
_SIGNS = np.array([[1, 1], [-1, 1], [-1, -1], [1, -1]])


def iou_3d(a: Array, b: Array) -> Array:
    """Return the IoU (n,) of box i of ``a`` with box i of ``b``.

    Boxes are (n, 7) or wider: x y z w l h yaw, upright, z at half height, w across the heading, l
    along it, yaw from x to y. A box without volume or with a value that is not finite has IoU 0.

    >>> car = np.array([[10.0, 5.0, 0.0, 2.0, 4.0, 1.5, 0.3]])
    >>> iou_3d(car, car + [0, 0, 0.75, 0, 0, 0, np.pi]).round(6).tolist()
    [0.333333]
    """
    a, b = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    with np.errstate(all="ignore"):
        rise = b[:, 2] - a[:, 2]
        top = np.minimum(a[:, 5] / 2, rise + b[:, 5] / 2)
        bottom = np.maximum(-a[:, 5] / 2, rise - b[:, 5] / 2)
        area = _intersection_area(a[:, _PLANE], b[:, _PLANE])
        return _ratio(area * np.maximum(top - bottom, 0), a[:, 3:6], b[:, 3:6])


def iou_bev(a: Array, b: Array) -> Array:
    """Return the IoU (n,) seen from above, of boxes x y w l yaw or x y z w l h yaw (or wider).

    >>> box = np.array([[0.0, 0.0, 1.0, 4.0, 0.0]])
    >>> iou_bev(box, box + [0, 0, 0, 0, np.pi / 2]).round(6).tolist()
    [0.142857]
    """
    a, b = (
        boxes if boxes.shape[1] == 5 else boxes[:, _PLANE]
        for boxes in (np.asarray(a, dtype=float), np.asarray(b, dtype=float))
    )
    with np.errstate(all="ignore"):
        return _ratio(_intersection_area(a, b), a[:, 2:4], b[:, 2:4])


def iou_2d(a: Array, b: Array) -> Array:
    """Return the IoU (n,) of boxes (n, 4) as x1 y1 x2 y2.

    >>> iou_2d(np.array([[0.0, 0.0, 2.0, 1.0]]), np.array([[1.0, 0.0, 3.0, 1.0]])).round(6).tolist()
    [0.333333]
    """
    a, b = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    with np.errstate(all="ignore"):
        sides = np.minimum(a[:, 2:4], b[:, 2:4]) - np.maximum(a[:, :2], b[:, :2])
        return _ratio(np.maximum(sides, 0).prod(1), a[:, 2:4] - a[:, :2], b[:, 2:4] - b[:, :2])


def corners(boxes: Array) -> Array:
    """Return the closed outlines (n, 5, 2) of boxes (n, 5) as x y w l yaw, first corner repeated.

    >>> corners(np.array([[0.0, 0.0, 2.0, 4.0, 0.0]]))[0, 0].tolist()
    [2.0, 1.0]
    """
    x, y, w, length, yaw = (boxes[:, i, None] for i in range(5))
    along, across = length / 2 * np.array([1, 1, -1, -1, 1]), w / 2 * np.array([1, -1, -1, 1, 1])
    return np.stack(
        [
            x + along * np.cos(yaw) - across * np.sin(yaw),
            y + along * np.sin(yaw) + across * np.cos(yaw),
        ],
        2,
    )


def ellipse(mean: Array, covariance: Array, sigmas: float, points: int = 60) -> Array:
    """Return the outline (points, 2) at ``sigmas`` standard deviations of a 2D Gaussian.

    >>> np.abs(ellipse(np.zeros(2), np.eye(2), 3.0)).max().round(2).item()
    3.0
    """
    values, vectors = np.linalg.eigh(covariance)
    angle = np.linspace(0, 2 * np.pi, points)
    circle = np.stack([np.cos(angle), np.sin(angle)])
    line: Array = mean + sigmas * (vectors @ (np.sqrt(values.clip(min=0))[:, None] * circle)).T
    return line


def _ratio(intersection: Array, sizes_a: Array, sizes_b: Array) -> Array:
    volume_a, volume_b = (np.maximum(sizes, 0).prod(1) for sizes in (sizes_a, sizes_b))
    union = volume_a + volume_b - intersection
    sound = (volume_a > 0) & (volume_b > 0) & np.isfinite(union)
    ratio: Array = np.where(sound, np.clip(intersection / union, 0, 1), 0.0)
    return ratio


def _intersection_area(a: Array, b: Array) -> Array:
    """Return the intersection area (n,) of rectangles x y w l yaw.

    In the frame of a, a is the window [-l/2, l/2] x [-w/2, w/2]. The area of b inside it is a line
    integral around b. No corner is compared with an edge, so touching and coinciding edges are not
    special cases. Centres are subtracted first, so that large coordinates lose no precision.
    """
    cos, sin = np.cos(a[:, 4]), np.sin(a[:, 4])
    dx, dy = b[:, 0] - a[:, 0], b[:, 1] - a[:, 1]
    centre = np.stack([dx * cos + dy * sin, dy * cos - dx * sin], 1)  # (n, 2)
    turn = b[:, 4] - a[:, 4]
    along = np.stack([np.cos(turn), np.sin(turn)], 1)
    across = np.stack([-np.sin(turn), np.cos(turn)], 1)
    half = np.maximum(b[:, [3, 2]], 0) / 2  # (n, 2) of l, w
    polygon = centre[:, None] + (_SIGNS * half[:, None]) @ np.stack([along, across], 1)  # (n, 4, 2)
    return _area_in_window(polygon, np.maximum(a[:, [3, 2]], 0) / 2)


def _area_in_window(polygon: Array, half: Array) -> Array:
    """Return the area (n,) of counter-clockwise polygons (n, e, 2) in windows of half sides (n, 2).

    It is the integral of y dx around the polygon, with x and y clipped to the window.
    """
    start, step = polygon, np.roll(polygon, -1, axis=1) - polygon
    hx, hy = half[:, None, 0], half[:, None, 1]
    enter, leave = (_crossing(start[..., 0], step[..., 0], bound) for bound in (-hx, hx))
    first, last = np.minimum(enter, leave), np.maximum(enter, leave)
    low, high = (
        np.clip(_crossing(start[..., 1], step[..., 1], bound), first, last) for bound in (-hy, hy)
    )
    # (4, n, e): between these times the clipped y is linear or constant
    times = np.stack([first, np.minimum(low, high), np.maximum(low, high), last])
    x = np.clip(start[..., 0] + times * step[..., 0], -hx, hx)
    y = np.clip(start[..., 1] + times * step[..., 1], -hy, hy)
    area: Array = -((y[1:] + y[:-1]) / 2 * np.diff(x, axis=0)).sum((0, 2))
    return np.maximum(area, 0)


def _crossing(start: Array, step: Array, bound: Array) -> Array:
    """Return the time in [0, 1] at which ``start + time * step`` is nearest to ``bound``."""
    moves = step != 0
    time: Array = np.where(moves, np.clip((bound - start) / np.where(moves, step, 1), 0, 1), 0)
    return time
