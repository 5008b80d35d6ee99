"""What all pictures share: the background, the colour of a risk, outlines of boxes and regions."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from boxcov.data.coco.images import to_pixels

Array = NDArray[Any]
# of risks 0, 0.5 and 1 on a light and on a dark ground: blue, amber and red, as in the report
ON_LIGHT = ((42, 120, 214), (185, 119, 10), (207, 35, 49))
ON_DARK = ((108, 177, 255), (240, 178, 60), (255, 88, 98))
DOUBTFUL = 0.5  # boxes above this risk are thin, without region and text: probably wrong


def background_of(inputs: Any) -> Array | None:
    """Return what boxes are drawn on: points (n, 2 or more), bytes (h, w, 3) of an image, or None.

    inputs: of one frame: points or an image as a tensor or array, or a list of one.
    """
    one = inputs[0] if isinstance(inputs, (list, tuple)) and inputs else inputs
    if not isinstance(one, (Tensor, np.ndarray)):
        return None
    if one.ndim == 2:
        return one.detach().cpu().numpy() if isinstance(one, Tensor) else one
    is_bytes = isinstance(one, np.ndarray) and one.shape[-1] == 3
    is_image = one.ndim in (3, 4) and (is_bytes or one.shape[-3] in (1, 3))
    return to_pixels(one) if is_image else None


def risk_colors(risk: Array, is_dark: bool = False) -> Array:
    """Return red, green and blue (m, 3), as bytes, of risks (m,) on a light or a dark ground."""
    stops = np.array(ON_DARK if is_dark else ON_LIGHT)
    channels = [np.interp(risk, [0, 0.5, 1], channel) for channel in stops.T]
    return np.stack(channels, 1).round().astype(np.uint8)


def grown_boxes(boxes: Array, widths: Array) -> Array:
    """Return boxes (m, 5), x y w l yaw, grown by the half widths (m, 5) of position and size.

    Each side moves by the half width of the position in its direction, and by half of that of the
    size. The half width of the yaw is ignored.
    """
    grown = np.array(boxes, dtype=float)
    c, s = np.abs(np.cos(boxes[:, 4])), np.abs(np.sin(boxes[:, 4]))
    x, y, w, length, _ = widths.T
    grown[:, 2] += 2 * (s * x + c * y) + w
    grown[:, 3] += 2 * (c * x + s * y) + length
    return grown


def side_bands(boxes: Array, widths: Array) -> tuple[Array, Array]:
    """Return the outer and the inner boxes (m, 4), x1 y1 x2 y2, between which the sides lie.

    Inner boxes are NaN where the half widths (m, 4) leave nothing.

    >>> outer, inner = side_bands(np.array([[0.0, 0, 9, 9]]), np.array([[1.0, 1, 2, 5]]))
    >>> outer.tolist(), inner.tolist()
    ([[-1.0, -1.0, 11.0, 14.0]], [[1.0, 1.0, 7.0, 4.0]])
    """
    outward = np.array([-1, -1, 1, 1]) * widths
    inner = boxes - outward
    inner[(inner[:, :2] >= inner[:, 2:]).any(1)] = np.nan
    return boxes + outward, inner


def corners(boxes: Array) -> Array:
    """Return the closed outlines (n, 5, 2) of boxes (n, 5), x y w l yaw, first corner repeated."""
    x, y, w, length, yaw = (boxes[:, i, None] for i in range(5))
    along, across = length / 2 * np.array([1, 1, -1, -1, 1]), w / 2 * np.array([1, -1, -1, 1, 1])
    c, s = np.cos(yaw), np.sin(yaw)
    return np.stack([x + along * c - across * s, y + along * s + across * c], 2)


def outlines_from_above(boxes: Array) -> Array:
    """Return lines (m, 7, 2) of boxes x y w l yaw: from the centre ahead, then around the box."""
    around = corners(boxes)
    front = around[:, :2].mean(1, keepdims=True)
    return np.concatenate([boxes[:, None, :2], front, around], 1)


def upright(boxes: Array) -> Array:
    """Return the closed outlines (m, 5, 2) of boxes x1 y1 x2 y2."""
    return boxes[:, [0, 1, 2, 1, 2, 3, 0, 3, 0, 1]].reshape(-1, 5, 2)


def ellipse(mean: Array, covariance: Array, sigmas: float) -> Array:
    """Return the outline (..., 60, 2) at ``sigmas`` standard deviations of 2D Gaussians.

    mean: (..., 2). covariance: (..., 2, 2).
    """
    values, vectors = np.linalg.eigh(covariance)
    angle = np.linspace(0, 2 * np.pi, 60)
    circle = np.stack([np.cos(angle), np.sin(angle)])
    half_axes = vectors * np.sqrt(values.clip(min=0))[..., None, :]
    return mean[..., None, :] + sigmas * (half_axes @ circle).swapaxes(-1, -2)
