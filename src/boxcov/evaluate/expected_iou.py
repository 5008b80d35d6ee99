"""The expected IoU of a box with N(box, Sigma): a unitless number per box between 0 and 1.

It is computed in coordinates of the box itself (``relative_covariance``): along its heading in
lengths, across it in widths, and so on. There it depends on the shape of the box alone, not on its
position, size or heading.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import lgamma, log
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcov.box_layout import IMAGE, PLANE, SPACE, columns, find_layout
from boxcov.errors import BoxcovError
from boxcov.evaluate.matching import iou_2d, iou_3d, iou_bev

Array = NDArray[Any]
DIRECTIONS, RADII = 128, 2
_CHUNK = 2000  # boxes computed at once


def expected_iou(boxes: Array, covariance: Array, fields: Sequence[str]) -> Array:
    """Return E[IoU(box, b)] (n,) for b ~ N(box, covariance), boxes (n, D), covariances (n, D, D).

    Computed by a quadrature over 128 directions with 2 radii each. Compared with sampling, the
    error is 0.001 (rms) for an expected IoU above 0.9 and 0.003 to 0.01 below; twice that for a
    covariance of rank 1.

    Velocities are ignored. The result is 0 for a box without volume, 1 for a zero covariance, and
    NaN if a value is not finite. Covariances may be singular.

    >>> car, fields = np.array([[10.0, 5.0, 2.0, 4.0, 0.3]]), ("x", "y", "w", "l", "yaw")
    >>> expected_iou(car, np.zeros((1, 5, 5)), fields).tolist()
    [1.0]
    >>> expected_iou(car, np.diag([0.01, 0.01, 0.0, 0.0, 0.001])[None], fields).round(2).tolist()
    [0.89]
    """
    sizes, relative = relative_covariance(boxes, covariance, fields)
    found = np.full(len(sizes), np.nan)
    sound = np.isfinite(sizes).all(1) & np.isfinite(relative).all((1, 2))
    flat = sound & (sizes <= 0).any(1)
    found[flat] = 0.0
    rows = np.flatnonzero(sound & ~flat)
    for start in range(0, len(rows), _CHUNK):
        part = rows[start : start + _CHUNK]
        found[part] = _integrate(sizes[part], relative[part])
    return found


def relative_covariance(
    boxes: Array, covariance: Array, fields: Sequence[str]
) -> tuple[Array, Array]:
    """Return the sizes of boxes, and their covariances in coordinates of the box itself.

    Boxes x y (z) w l (h) yaw: sizes l w (h) and the covariance of the position along and across
    (and up) in lengths and widths (and heights), of the relative changes of l, w (and h), and of
    yaw in radians. Boxes x1 y1 x2 y2: width and height, and the covariance of the four edges in
    widths and heights. The covariance is meaningless where a size is not positive.
    """
    fields = tuple(fields)
    boxes, covariance = np.asarray(boxes, dtype=float), np.asarray(covariance, dtype=float)
    D = len(fields)
    if boxes.ndim != 2 or boxes.shape[1] != D or covariance.shape != (*boxes.shape, D):
        raise BoxcovError(
            f"boxes and covariances have shapes {boxes.shape} and {covariance.shape}, "
            f"expected (n, {D}) and (n, {D}, {D})"
        )
    layout = find_layout(fields, (IMAGE, SPACE, PLANE), "the IoU")
    if layout == IMAGE:
        edges = boxes[:, columns(fields, IMAGE)]
        sizes = edges[:, 2:] - edges[:, :2]
        J = _selection_jacobian(fields, IMAGE, len(boxes))
        with np.errstate(divide="ignore", invalid="ignore"):
            J = J / np.tile(sizes, 2)[:, :, None]
    else:
        axes = ("l", "w", "h") if layout == SPACE else ("l", "w")
        sizes = boxes[:, columns(fields, axes)]
        J = _selection_jacobian(fields, (*"xyz"[: len(axes)], *axes, "yaw"), len(boxes))
        yaw = boxes[:, columns(fields, ("yaw",))]
        x, y = J[:, 0].copy(), J[:, 1].copy()
        J[:, 0], J[:, 1] = np.cos(yaw) * x + np.sin(yaw) * y, np.cos(yaw) * y - np.sin(yaw) * x
        with np.errstate(divide="ignore", invalid="ignore"):
            J[:, :-1] /= np.tile(sizes, 2)[:, :, None]
    with np.errstate(invalid="ignore"):
        return sizes, J @ covariance @ J.transpose(0, 2, 1)


def _selection_jacobian(fields: tuple[str, ...], names: tuple[str, ...], n: int) -> Array:
    """Return matrices (n, d, D) that select ``names`` from the fields."""
    J = np.zeros((n, len(names), len(fields)))
    J[:, np.arange(len(names)), columns(fields, names)] = 1
    return J


def _integrate(sizes: Array, covariance: Array) -> Array:
    """Integrate the IoU over the Gaussian.

    The IoU has a kink where the boxes coincide and is smooth along every ray from there, so a few
    radii over many directions suffice.
    """
    d = covariance.shape[1]
    points, weights = nodes(d)
    offset = np.einsum("nij,kj->nki", _symmetric_root(covariance), points)  # (n, k, d)
    n, k = offset.shape[:2]
    size = np.repeat(sizes, k, 0)
    offset = offset.reshape(n * k, d)
    if d == 4:
        edges = np.concatenate([np.zeros_like(size), size], 1)
        iou = iou_2d(edges, edges + offset * np.tile(size, 2))
    else:
        a = len(sizes[0])
        box = np.concatenate([np.zeros_like(size), size, np.zeros((n * k, 1))], 1)
        other = box + np.concatenate([offset[:, :-1] * np.tile(size, 2), offset[:, -1:]], 1)
        order = [0, 1, 3, 2, 4] if a == 2 else [0, 1, 2, 4, 3, 5, 6]  # l w (h) to w l (h)
        iou = (iou_bev if a == 2 else iou_3d)(box[:, order], other[:, order])
    return 1 - (1 - iou).reshape(n, k) @ weights  # exactly 1 where every IoU is 1


def _symmetric_root(covariance: Array) -> Array:
    """Return the symmetric square root (n, d, d), which is unique and exists if singular."""
    values, vectors = np.linalg.eigh((covariance + covariance.transpose(0, 2, 1)) / 2)
    return (vectors * np.sqrt(np.maximum(values, 0))[:, None]) @ vectors.transpose(0, 2, 1)


@cache
def nodes(d: int) -> tuple[Array, Array]:
    """Return points (k, d) and weights (k,) for means over N(0, I) in d dimensions."""
    half = _directions(d, DIRECTIONS // 2)
    r, weights = _radii(d, RADII)
    both = np.concatenate([half, -half])
    points = np.concatenate([radius * both for radius in r])
    return points, np.repeat(weights / len(both), len(both))


def _directions(d: int, count: int) -> Array:
    """Return unit vectors (count, d) from a low-discrepancy sequence, with isotropic covariance."""
    phi = 2.0
    for _ in range(60):
        phi = (1 + phi) ** (1 / (d + 1))  # generalised golden ratio of the R_d sequence
    u = (0.5 + np.outer(np.arange(1, count + 1), phi ** -np.arange(1.0, d + 1))) % 1
    x: Array = np.vectorize(NormalDist().inv_cdf)(u)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    for _ in range(200):  # alternate whitening and projection to the sphere until both hold
        values, vectors = np.linalg.eigh(x.T @ x * d / count)
        x = x @ (vectors / np.sqrt(values)) @ vectors.T
        x /= np.linalg.norm(x, axis=1, keepdims=True)
    return x


def _radii(d: int, count: int) -> tuple[Array, Array]:
    """Return Gauss nodes and weights (count,) for the norm of a standard normal vector.

    Golub and Welsch's algorithm, from the moments of the chi distribution.
    """
    moments = [
        np.exp(k / 2 * log(2) + lgamma((d + k) / 2) - lgamma(d / 2)) for k in range(2 * count + 1)
    ]
    hankel = np.array([[moments[i + j] for j in range(count + 1)] for i in range(count + 1)])
    R = np.linalg.cholesky(hankel).T
    alpha = [
        R[j, j + 1] / R[j, j] - (R[j - 1, j] / R[j - 1, j - 1] if j else 0) for j in range(count)
    ]
    beta = [R[j + 1, j + 1] / R[j, j] for j in range(count - 1)]
    values, vectors = np.linalg.eigh(np.diag(alpha) + np.diag(beta, 1) + np.diag(beta, -1))
    return values, vectors[0] ** 2
