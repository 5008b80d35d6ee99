"""Bird's-eye pictures: ground truth green, predictions red, 1 and 3 sigma ellipses of the position, the uncertainty as a number."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcov.detections import Detections

Array = NDArray[Any]
TRUTH, FOUND = "#2ca02c", "#d62728"


def corners(boxes: Array) -> Array:
    """Corners (n, 5, 2) of boxes (n, 5) as x y w l yaw, the first one repeated; the length lies along the heading.

    >>> corners(np.array([[0.0, 0.0, 2.0, 4.0, 0.0]]))[0, 0].tolist()
    [2.0, 1.0]
    """
    x, y, w, length, yaw = (boxes[:, i, None] for i in range(5))
    along, across = length / 2 * np.array([1, 1, -1, -1, 1]), w / 2 * np.array([1, -1, -1, 1, 1])
    return np.stack([x + along * np.cos(yaw) - across * np.sin(yaw), y + along * np.sin(yaw) + across * np.cos(yaw)], 2)


def ellipse(mean: Array, covariance: Array, sigmas: float, points: int = 60) -> Array:
    """The line (points, 2) at ``sigmas`` standard deviations of a Gaussian in the plane.

    >>> np.abs(ellipse(np.zeros(2), np.eye(2), 3.0)).max().round(2).item()
    3.0
    """
    values, vectors = np.linalg.eigh(covariance)
    angle = np.linspace(0, 2 * np.pi, points)
    circle = np.stack([np.cos(angle), np.sin(angle)])
    line: Array = mean + sigmas * (vectors @ (np.sqrt(values.clip(min=0))[:, None] * circle)).T
    return line


def draw(axes: Any, found: Detections, truth: Array) -> None:
    """One frame into matplotlib axes; ``truth`` is (n, 5) as x y w l yaw."""
    names = ("x", "y", "w", "l", "yaw")
    arrays = found.numpy()
    plane = [found.fields.index(name) for name in names]
    for corner in corners(truth):
        axes.plot(*corner.T, color=TRUTH, linewidth=2)
    for box, covariance, u in zip(arrays["boxes"][:, plane], arrays["covariance"], arrays["uncertainty"]):
        axes.plot(*corners(box[None])[0].T, color=FOUND, linewidth=1)
        front = box[:2] + box[3] / 2 * np.array([np.cos(box[4]), np.sin(box[4])])
        axes.plot(*np.stack([box[:2], front]).T, color=FOUND, linewidth=1)
        position = covariance[np.ix_(plane[:2], plane[:2])]
        for sigmas, style in ((1, "-"), (3, ":")):
            axes.plot(*ellipse(box[:2], position, sigmas).T, color=FOUND, linewidth=0.8, linestyle=style)
        axes.annotate(f"{u:.2g}", box[:2] + 1.2, color=FOUND, fontsize=8, clip_on=True)


def picture(path: str | Path, frames: Sequence[tuple[Array, Detections, Array]], metres: float) -> None:
    """Frames side by side as a PNG: (image, detections, truth) each, on a square of ``metres``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(frames), figsize=(5 * len(frames), 5.8), squeeze=False)
    for ax, (image, found, truth) in zip(axes[0], frames):
        ax.imshow(image, cmap="Greys", origin="lower", extent=(0, metres, 0, metres), vmin=0, vmax=3)
        draw(ax, found, truth)
        ax.set(xlim=(0, metres), ylim=(0, metres), xlabel="x [m]", aspect="equal")
    axes[0][0].set_ylabel("y [m]")
    figure.suptitle("green: ground truth   red: detections, 1 and 3 sigma of the position, uncertainty (trace) as a number", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)
