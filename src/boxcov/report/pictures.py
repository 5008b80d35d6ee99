"""Pictures of frames by matplotlib: LiDAR frames from above, and images.

Objects are green and predictions red, with ellipses of the covariance and the uncertainty.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcov.detections import Detections
from boxcov.errors import BoxcovError
from boxcov.evaluate.geometry import corners, ellipse
from boxcov.evaluate.matching import PLANE
from boxcov.evaluate.records import Records
from boxcov.files import atomic_write
from boxcov.report.study import Scene, thin_points
from boxcov.report.tables import format_value

Array = NDArray[Any]
OBJECT, PREDICTION, UNCERTAIN = "#2ca02c", "#d62728", "#e07b00"
MANY_BOXES = 40  # from this number on the text is small


def draw_scene(axes: Any, scene: Scene, records: Records, threshold: float | None = None) -> None:
    """Draw points, objects and the predictions of one frame from above, in metres.

    records: the predictions of this frame. Boxes with an uncertainty of ``threshold`` or more are
        dashed and orange.
    """
    plane = [records.fields.index(name) for name in PLANE]
    points = thin_points(scene.points, 60_000)
    axes.scatter(points[:, 0], points[:, 1], s=0.4, color="#8a919c", linewidths=0, rasterized=True)
    truth = scene.truth[:, plane] if len(scene.truth) else np.zeros((0, 5))
    for outline in corners(truth):
        axes.plot(*outline.T, color=OBJECT, linewidth=2)
    boxes, C = records.boxes[:, plane], records.covariance
    size = 8 if len(boxes) <= MANY_BOXES else 5
    for i, (box, u) in enumerate(zip(boxes, records.uncertainty)):
        is_certain = threshold is None or u < threshold
        colour, dash = (PREDICTION, "-") if is_certain else (UNCERTAIN, "--")
        _draw_box(
            axes, box, None if C is None else C[i][np.ix_(plane[:2], plane[:2])], colour, dash
        )
        text = format_value(u, digits=2)
        axes.annotate(text, box[:2] + 1.2, color=colour, fontsize=size, clip_on=True)
    centres = np.concatenate([boxes[:, :2], truth[:, :2], np.zeros((1, 2))])  # the sensor is at 0 0
    low, high = centres.min(0) - 6, centres.max(0) + 6
    middle, half = (low + high) / 2, float((high - low).max()) / 2
    axes.set(
        xlim=(middle[0] - half, middle[0] + half),
        ylim=(middle[1] - half, middle[1] + half),
        aspect="equal",
        xlabel="x [m]",
        ylabel="y [m]",
    )


def _draw_box(axes: Any, box: Array, position: Array | None, colour: str, dash: str) -> None:
    """Draw a box x y w l yaw with its heading, and 1 and 3 sigma ellipses of its position."""
    axes.plot(*corners(box[None])[0].T, color=colour, linewidth=1, linestyle=dash)
    front = box[:2] + box[3] / 2 * np.array([np.cos(box[4]), np.sin(box[4])])
    axes.plot(*np.stack([box[:2], front]).T, color=colour, linewidth=1)
    if position is not None:
        for sigmas, line in ((1, "-"), (3, ":")):
            outline = ellipse(box[:2], position, sigmas)
            axes.plot(*outline.T, color=colour, linewidth=0.8, linestyle=line)


def draw_image(axes: Any, image: Array, found: Detections, truth: Array) -> None:
    """Draw a letterboxed image (3, h, w), BGR, with detections and objects (k, 4) as x1 y1 x2 y2.

    The corners carry 1 sigma ellipses; the number is the root of the trace in percent of the mean
    side.
    """
    axes.imshow(np.clip(image[::-1].transpose(1, 2, 0) / 255, 0, 1))
    for box in truth:
        _draw_upright_box(axes, box, OBJECT, 1.5)
    arrays = found.numpy()
    for box, covariance, label, score in zip(
        arrays["boxes"], arrays["covariance"], arrays["labels"], arrays["scores"]
    ):
        _draw_upright_box(axes, box[:4], PREDICTION, 1.2)
        for first in (0, 2):
            at = slice(first, first + 2)
            outline = ellipse(box[at], covariance[at, at], 1.0)
            axes.plot(*outline.T, color=PREDICTION, linewidth=0.8)
        deviation = float(np.sqrt(np.trace(covariance[:4, :4])))
        side = float(np.sqrt(max((box[2] - box[0]) * (box[3] - box[1]), 1.0)))
        axes.text(
            max(box[0], 0) + 2,
            max(box[1], 0) + 2,
            plain_text(f"{found.classes[int(label)]} {score:.2f}, {100 * deviation / side:.0f} %"),
            color=PREDICTION,
            fontsize=6.5,
            va="top",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5},
            clip_on=True,
        )
    height, width = image.shape[1:]
    axes.set(xlim=(0, width), ylim=(height, 0), xticks=[], yticks=[])


def write_images(
    path: str | Path,
    frames: Sequence[tuple[Array, Detections, Array]],
    titles: Sequence[str] = (),
    columns: int = 3,
) -> None:
    """Write a PNG of frames side by side: image (3, h, w), detections, objects (k, 4)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not frames:
        raise BoxcovError(f"{path}: there are no frames to draw")
    columns = min(columns, len(frames))
    rows = -(-len(frames) // columns)
    figure = Figure(figsize=(4.2 * columns, 4.2 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for number, (image, found, truth) in enumerate(frames):
        axes = figure.add_subplot(rows, columns, number + 1)
        draw_image(axes, image, found, truth)
        axes.set_title(plain_text(titles[number]) if number < len(titles) else "", fontsize=9)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=90, format="png")


def write_cloud(path: str | Path, points: Array, found: Detections, truth: Array) -> None:
    """Write a PNG of a LiDAR frame from above: points (N, 2 or more), detections, objects (k, 7).

    Boxes with a score below 0.3 are dashed and orange.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    plane = [found.fields.index(name) for name in PLANE]
    figure = Figure(figsize=(9, 9), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    points = thin_points(points, 60_000)
    axes.scatter(points[:, 0], points[:, 1], s=0.4, color="#8a919c", linewidths=0)
    for outline in corners(truth[:, plane]):
        axes.plot(*outline.T, color=OBJECT, linewidth=2)
    arrays = found.numpy()
    for box, score in zip(arrays["boxes"][:, plane], arrays["scores"]):
        colour, dash = (PREDICTION, "-") if score >= 0.3 else (UNCERTAIN, "--")
        _draw_box(axes, box, None, colour, dash)
    axes.set(aspect="equal", xlabel="x [m]", ylabel="y [m]", xlim=(-60, 60), ylim=(-60, 60))
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=90, format="png")


def plain_text(name: str) -> str:
    """Return a name that matplotlib draws as it is: $ is no mathematics, control has no glyph.

    >>> plain_text("$x_1$")
    '\\\\$x_1\\\\$'
    """
    shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name)
    return shown.replace("$", r"\$")


def _draw_upright_box(axes: Any, box: Array, colour: str, width: float) -> None:
    x1, y1, x2, y2 = box
    axes.plot([x1, x2, x2, x1, x1], [y1, y1, y2, y2, y1], color=colour, linewidth=width)
