"""Geometry of boxes: IoU of rotated and upright boxes, corners, and ellipses of covariances."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from boxcov.detectors.boxes import rotated_intersection

Array = NDArray[Any]
_PLANE = [0, 1, 3, 4, 6]  # x y w l yaw among x y z w l h yaw


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
    """Return the intersection area (n,) of rectangles x y w l yaw."""
    area: Array = rotated_intersection(torch.tensor(a), torch.tensor(b)).numpy()
    return area
