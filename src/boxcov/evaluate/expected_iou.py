"""The expected IoU of a box with what it may be instead, N(box, Sigma): one number a box between 0 and 1 that no unit and no size enters.

All is done in coordinates of the box itself, ``relative``: along its heading in lengths, across in widths, and so on. There two boxes of
the same shape with the same relative covariance are the same, wherever they are, however large, and whichever way they look.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import lgamma, log, pi
from statistics import NormalDist
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from boxcov.errors import BoxcovError
from boxcov.evaluate.matching import IMAGE, PLANE, SPACE, columns, has
from boxcov.evaluate.overlap import iou_2d, iou_3d, iou_bev

Array = NDArray[Any]
Way = Literal["quadrature", "delta"]
DIRECTIONS, RADII = 128, 2
_CHUNK = 2000  # boxes at once


def expected_iou(
    boxes: Array, covariance: Array, fields: Sequence[str], way: Way = "quadrature"
) -> Array:
    """E[IoU(box, b)] (n,) for b drawn from N(box, covariance), of boxes (n, D) and covariances (n, D, D).

    "quadrature": the mean of the IoU over 128 directions with 2 radii each. Against sampling it is off by 0.001 (rms) while the expected IoU
    is above 0.9, and by 0.003 to 0.01 below; by twice as much for a covariance of rank 1. "delta": to first order in the covariance's root,
    eighty times as fast and more, off by 0.001 above 0.9, by 0.01 to 0.02 at 0.8, and of no use below.

    Fields that no IoU reads, velocities, play no part. A box without volume has 0; singular covariances are welcome, and a zero one has 1. NaN where
    a number is not finite.

    >>> car = np.array([[10.0, 5.0, 2.0, 4.0, 0.3]])
    >>> expected_iou(car, np.zeros((1, 5, 5)), ("x", "y", "w", "l", "yaw")).tolist()
    [1.0]
    >>> small = np.diag([0.01, 0.01, 0.0, 0.0, 0.001])[None]
    >>> [expected_iou(car, small, ("x", "y", "w", "l", "yaw"), way).round(2).item() for way in ("quadrature", "delta")]
    [0.89, 0.88]
    """
    if way not in get_args(Way):
        raise BoxcovError(f"way must be one of {', '.join(get_args(Way))}, got {way!r}")
    shape, of_shape = relative(boxes, covariance, fields)
    found = np.full(len(shape), np.nan)
    sound = np.isfinite(shape).all(1) & np.isfinite(of_shape).all((1, 2))
    flat = sound & (shape <= 0).any(1)
    found[flat] = 0.0
    rows = np.flatnonzero(sound & ~flat)
    one = _by_quadrature if way == "quadrature" else _by_delta
    for start in range(0, len(rows), _CHUNK):
        part = rows[start : start + _CHUNK]
        found[part] = one(shape[part], of_shape[part])
    return found


def relative(boxes: Array, covariance: Array, fields: Sequence[str]) -> tuple[Array, Array]:
    """The sizes of boxes, and their covariances in their own coordinates: what the IoU of a box with another one like it depends on.

    Boxes x y (z) w l (h) yaw: sizes (n, 2 or 3) as l w (h), covariance (n, 5 or 7, 5 or 7) of: along, across (and up) in l, w (and h), then the
    relative changes of l, w (and h), then yaw in radians. Boxes x1 y1 x2 y2: sizes width and height, the four edges in widths and heights.
    Where a size is not positive the covariance means nothing.

    >>> turned = np.array([[3.0, 4.0, 2.0, 4.0, np.pi / 2]])  # it looks along y
    >>> sizes, found = relative(turned, np.diag([1.0, 4.0, 0.0, 0.04, 0.0])[None], ("x", "y", "w", "l", "yaw"))
    >>> sizes.tolist(), np.diagonal(found[0]).round(6).tolist()
    ([[4.0, 2.0]], [0.25, 0.25, 0.0025, 0.0, 0.0])
    """
    fields = tuple(fields)
    boxes, covariance = np.asarray(boxes, dtype=float), np.asarray(covariance, dtype=float)
    if (
        boxes.ndim != 2
        or boxes.shape[1] != len(fields)
        or covariance.shape != (*boxes.shape, len(fields))
    ):
        shapes = f"{boxes.shape} and {covariance.shape}"
        raise BoxcovError(
            f"boxes and covariances have shapes {shapes}, expected (n, {len(fields)}) and (n, {len(fields)}, {len(fields)})"
        )
    if has(fields, IMAGE):
        at = columns(fields, IMAGE, boxes)
        sizes = at[:, 2:] - at[:, :2]
        J = _jacobian(fields, IMAGE, len(boxes))
        with np.errstate(divide="ignore", invalid="ignore"):
            J = J / np.tile(sizes, 2)[:, :, None]
    elif has(fields, PLANE):
        axes = ("l", "w", "h") if has(fields, SPACE) else ("l", "w")
        sizes = columns(fields, axes, boxes)
        J = _jacobian(fields, (*"xyz"[: len(axes)], *axes, "yaw"), len(boxes))
        yaw = columns(fields, ("yaw",), boxes)
        x, y = J[:, 0].copy(), J[:, 1].copy()
        J[:, 0], J[:, 1] = np.cos(yaw) * x + np.sin(yaw) * y, np.cos(yaw) * y - np.sin(yaw) * x
        with np.errstate(divide="ignore", invalid="ignore"):
            J[:, :-1] /= np.tile(sizes, 2)[:, :, None]
    else:
        raise BoxcovError(
            f"boxes of {' '.join(fields)} have no IoU: they need {' '.join(PLANE)}, or {' '.join(IMAGE)}"
        )
    with np.errstate(invalid="ignore"):
        found: Array = J @ covariance @ J.transpose(0, 2, 1)
    return sizes, found


def _jacobian(fields: tuple[str, ...], names: tuple[str, ...], n: int) -> Array:
    """Rows that pick ``names`` from the fields (n, d, D)."""
    J = np.zeros((n, len(names), len(fields)))
    J[:, np.arange(len(names)), [fields.index(name) for name in names]] = 1
    return J


# quadrature


def _by_quadrature(sizes: Array, covariance: Array) -> Array:
    """The IoU has a kink where the boxes are the same, and is smooth along every ray from there: few radii do, over many directions."""
    d = covariance.shape[1]
    points, weights = nodes(d)
    moved = np.einsum("nij,kj->nki", root(covariance), points)  # (n, k, d)
    n, k = moved.shape[:2]
    plain = np.repeat(sizes, k, 0)
    moved = moved.reshape(n * k, d)
    if d == 4:
        edges = np.concatenate([np.zeros_like(plain), plain], 1)
        iou = iou_2d(edges, edges + moved * np.tile(plain, 2))
    else:
        a = len(sizes[0])
        here = np.concatenate([np.zeros_like(plain), plain, np.zeros((n * k, 1))], 1)
        there = here + np.concatenate([moved[:, :-1] * np.tile(plain, 2), moved[:, -1:]], 1)
        order = [0, 1, 3, 2, 4] if a == 2 else [0, 1, 2, 4, 3, 5, 6]  # l w (h) to w l (h)
        iou = (iou_bev if a == 2 else iou_3d)(here[:, order], there[:, order])
    mean: Array = (
        1 - (1 - iou).reshape(n, k) @ weights
    )  # a sum of nothings is nothing: 1 exactly where all are 1
    return mean


def root(covariance: Array) -> Array:
    """The symmetric root (n, d, d): it is there for singular covariances, and is unique, so equal covariances get equal numbers.

    >>> root(np.array([[[4.0, 0.0], [0.0, 0.0]]])).tolist()
    [[[2.0, 0.0], [0.0, 0.0]]]
    """
    values, vectors = np.linalg.eigh((covariance + covariance.transpose(0, 2, 1)) / 2)
    found: Array = (vectors * np.sqrt(np.maximum(values, 0))[:, None]) @ vectors.transpose(0, 2, 1)
    return found


@cache
def nodes(d: int, directions: int = DIRECTIONS, radii: int = RADII) -> tuple[Array, Array]:
    """Points (k, d) and weights (k,) for means over the standard normal distribution in d dimensions, k = directions x radii.

    >>> points, weights = nodes(5)
    >>> np.allclose(weights @ points, 0), np.allclose((weights[:, None] * points).T @ points, np.eye(5))  # mean and covariance
    (True, True)
    """
    half = _directions(d, directions // 2)
    r, weights = _radii(d, radii)
    both = np.concatenate([half, -half])
    return np.concatenate([radius * both for radius in r]), np.repeat(
        weights / len(both), len(both)
    )


def _directions(d: int, count: int) -> Array:
    """Unit vectors: a low-discrepancy set in the cube, as normal numbers, made to have mean products of the identity over d."""
    phi = 2.0
    for _ in range(60):
        phi = (1 + phi) ** (
            1 / (d + 1)
        )  # the plastic number's cousins: the most irrational step in d dimensions
    u = (0.5 + np.outer(np.arange(1, count + 1), phi ** -np.arange(1.0, d + 1))) % 1
    x: Array = np.vectorize(NormalDist().inv_cdf)(u)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    for _ in range(200):  # whiten, back to the sphere, again: both at once in the end
        values, vectors = np.linalg.eigh(x.T @ x * d / count)
        x = x @ (vectors / np.sqrt(values)) @ vectors.T
        x /= np.linalg.norm(x, axis=1, keepdims=True)
    return x


def _radii(d: int, count: int) -> tuple[Array, Array]:
    """Gauss's nodes and weights for the length of a standard normal vector in d dimensions, from its moments."""
    moments = [
        np.exp(k / 2 * log(2) + lgamma((d + k) / 2) - lgamma(d / 2)) for k in range(2 * count + 1)
    ]
    hankel = np.array([[moments[i + j] for j in range(count + 1)] for i in range(count + 1)])
    R = np.linalg.cholesky(hankel).T
    alpha = [
        R[j, j + 1] / R[j, j] - (R[j - 1, j] / R[j - 1, j - 1] if j else 0) for j in range(count)
    ]
    beta = [R[j + 1, j + 1] / R[j, j] for j in range(count - 1)]
    values, vectors = np.linalg.eigh(
        np.diag(alpha) + np.diag(beta, 1) + np.diag(beta, -1)
    )  # Golub and Welsch
    return values, vectors[0] ** 2


# the delta method


def _by_delta(sizes: Array, covariance: Array) -> Array:
    """To first order the two boxes differ by what lies between their faces, the mean of |normal displacement| over each face.

    Of a normal number that mean is sqrt(2 / pi) standard deviations. One half of the difference is lost, one half gained.
    """
    rows, weights = _faces(sizes, covariance.shape[1])
    variance = np.einsum("nfi,nij,nfj->nf", rows, covariance, rows)
    differs = np.minimum(
        np.sqrt(2 / pi * np.maximum(variance, 0)) @ weights, 2.0
    )  # in volumes of the box
    iou: Array = (1 - differs / 2) / (1 + differs / 2)
    return iou


def _faces(sizes: Array, d: int) -> tuple[Array, Array]:
    """How far points of the faces move along the normal, in sizes of the box, for each relative coordinate (n, f, d), and their weights (f,)."""
    n, a = sizes.shape
    if d == 4:
        return np.tile(np.eye(4), (n, 1, 1)), np.ones(4)
    at, weights = np.polynomial.legendre.leggauss(5)  # across a face: the yaw moves its ends most
    rows = np.zeros((n, a, 2, len(at), d))
    for axis in range(a):
        rows[:, axis, :, :, axis] = 1
        rows[:, axis, :, :, a + axis] = np.array([0.5, -0.5])[:, None]
    aspect = (sizes[:, 1] / sizes[:, 0])[:, None, None]  # w / l
    rows[:, 0, :, :, -1] = -aspect * at / 2
    rows[:, 1, :, :, -1] = at / 2 / aspect
    return rows.reshape(n, -1, d), np.tile(weights / 2, 2 * a)
