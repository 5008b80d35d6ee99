"""Plots of one frame by matplotlib: LiDAR frames from above, and images.

Objects are green. Calibrated boxes have the colour of their risk. Their regions are dashed: the box
grown by the half widths, seen from above, and the bands of all four sides in an image. Uncalibrated
boxes have the ellipse of their covariance. Boxes with a risk above 50 % are thin and have neither
region nor text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcov._files.output_file import atomic_write
from boxcov._files.plain_text import short_name
from boxcov.box_layout import IMAGE, PLANE, columns, find_layout
from boxcov.concatenation import check_single_frame
from boxcov.detections import Detections, to_array
from boxcov.errors import BoxcovError, import_package
from boxcov.evaluate.ground_truth import GroundTruth
from boxcov.outlines import (
    DOUBTFUL,
    background_of,
    corners,
    ellipse,
    grown_boxes,
    outlines_from_above,
    risk_colors,
    side_bands,
    upright,
)
from boxcov.report.study import thin_points

Array = NDArray[Any]
OBJECT, PREDICTION, POINTS = "#2ca02c", "#d62728", "#8a919c"
MANY_BOXES = 40  # plots from above of more boxes have small text
MAX_BOXES = 1000  # in one picture: more take minutes, and nobody can tell them apart


def plot(
    detections: Detections,
    inputs: Any = None,
    targets: Sequence[Mapping[str, Any]] | None = None,
    axes: Any = None,
    level: float = 0.9,
) -> Any:
    """Draw the boxes of one frame, see ``Detections.plot``; return the axes."""
    check_single_frame(detections, "a plot")
    layout = find_layout(detections.fields, (PLANE, IMAGE), "a plot")
    background, place = background_of(inputs), columns(detections.fields, layout)
    truth = np.zeros((0, len(layout)))
    if targets:
        truth = _objects(targets[0], detections.fields, layout)
    is_cloud = background is not None and background.ndim == 2
    if layout == PLANE and inputs is not None and not is_cloud:
        raise BoxcovError(
            "these inputs are no point cloud (n, 2 or more): give the frame's own inputs, or None"
        )
    axes = new_axes(7, 7) if axes is None else axes
    best = detections.scores.argsort(descending=True, stable=True)[:MAX_BOXES]
    shown = detections[best.sort().values]
    boxes = shown.numpy()["boxes"][:, place].astype(float)
    if layout == IMAGE:
        _draw_image(axes, background, truth)
    else:
        draw_points(axes, background, truth, boxes)
    _draw_boxes(axes, shown, boxes, _regions(shown, boxes, place, level))
    say_total(axes, len(shown), len(detections))
    return axes


def _objects(target: Mapping[str, Any], fields: tuple[str, ...], layout: tuple[str, ...]) -> Array:
    """Return the objects (k, 4 or 5) of a frame; they may have other fields than the detector."""
    boxes = target["boxes"]
    objects = GroundTruth.from_frames([((), [{"boxes": boxes, "labels": [0] * len(boxes)}])])
    names = fields if objects.boxes.shape[1] == len(fields) else layout
    return objects.columns(names)[:, columns(names, layout)]


def say_total(axes: Any, shown: int, total: int) -> None:
    """Write into the picture that it does not show all boxes."""
    if shown < total:
        text = f"the {shown:,} boxes of the highest scores, of {total:,}"
        axes.annotate(text, (0.01, 0.01), xycoords="axes fraction", fontsize=8)


def new_axes(width: float, height: float) -> Any:
    """Return the axes of a new figure of pyplot, which a notebook shows; size in inches."""
    import_package("matplotlib")
    from matplotlib import pyplot as plt

    return plt.subplots(figsize=(width, height), layout="constrained")[1]


def draw_points(axes: Any, points: Array | None, truth: Array, boxes: Array) -> None:
    """Draw points (n, 2 or more) and objects (k, 5) from above, in metres, around all boxes."""
    points = thin_points(np.zeros((0, 2)) if points is None else points, 60_000)
    axes.scatter(points[:, 0], points[:, 1], s=0.4, color=POINTS, linewidths=0, rasterized=True)
    for outline in corners(truth):
        axes.fill(*outline.T, facecolor=f"{OBJECT}38", edgecolor=OBJECT, linewidth=1)
    centres = np.concatenate([boxes[:, :2], truth[:, :2], np.zeros((1, 2))])  # the sensor is at 0 0
    low, high = centres.min(0) - 6, centres.max(0) + 6
    middle, half = (low + high) / 2, float((high - low).max()) / 2
    limits = {"xlim": middle[0] + [-half, half], "ylim": middle[1] + [-half, half]}
    axes.set(**limits, aspect="equal", xlabel="x [m]", ylabel="y [m]")


def _draw_image(axes: Any, image: Array | None, truth: Array) -> None:
    """Draw an image (h, w, 3), red, green and blue, and objects (k, 4), x1 y1 x2 y2."""
    if image is not None:
        axes.imshow(image)
        height, width = image.shape[:2]
        axes.set(xlim=(0, width), ylim=(height, 0), xticks=[], yticks=[])
    else:
        axes.set(xlabel="x [px]", ylabel="y [px]")
        if not axes.yaxis_inverted():
            axes.invert_yaxis()
    for outline in upright(truth):
        axes.plot(*outline.T, color=OBJECT, linewidth=1.5)


def _regions(found: Detections, boxes: Array, place: list[int], level: float) -> list[Array]:
    """Return outlines (m, k, 2) of the regions, or the ellipses of uncalibrated boxes."""
    is_image = len(place) == len(IMAGE)
    if found.region_widths is not None:
        widths = to_array(found.region(level))[:, place]
        if is_image:
            return [upright(band) for band in side_bands(boxes, widths)]
        return [corners(grown_boxes(boxes, widths))]
    if found.covariance is None:
        return []
    C = found.numpy()["covariance"].astype(float)[:, place][:, :, place]
    points = (0, 2) if is_image else (0,)  # both corners, or the centre
    sigmas = float(np.sqrt(-2 * np.log(1 - level)))  # an ellipse of a Gaussian that holds the level
    return [ellipse(boxes[:, i : i + 2], C[:, i : i + 2, i : i + 2], sigmas) for i in points]


def _draw_boxes(axes: Any, found: Detections, boxes: Array, regions: Sequence[Array]) -> None:
    """Draw boxes (m, 4 or 5) with their regions and numbers, unless they are doubtful."""
    is_image, texts = boxes.shape[1] == len(IMAGE), [f"{one:.2f}" for one in found.scores.tolist()]
    is_doubtful, colors = np.zeros(len(found), bool), [PREDICTION] * len(found)
    if found.no_object is not None:
        risk = to_array(found.risk)
        is_doubtful, colors = risk > DOUBTFUL, (risk_colors(risk) / 255).tolist()
        texts = [f"{100 * one:.0f} %" for one in risk]
    if is_image:
        names = [escape_math(found.classes[label]) for label in found.labels.tolist()]
        texts = [f"{name} {text}" for name, text in zip(names, texts)]
    outlines = upright(boxes) if is_image else outlines_from_above(boxes)
    size = 8 if int((~is_doubtful).sum()) <= MANY_BOXES else 5
    for i, (outline, color) in enumerate(zip(outlines, colors)):
        axes.plot(*outline.T, color=color, linewidth=0.5 if is_doubtful[i] else 1.4)
        if is_doubtful[i]:
            continue
        for region in regions:
            axes.plot(*region[i].T, color=color, linewidth=0.8, linestyle=(0, (3, 2)))
        if is_image:
            at, box = np.maximum(boxes[i, :2], 0) + 2, {"facecolor": "white", "alpha": 0.7}
            box |= {"edgecolor": "none", "pad": 0.5}
            axes.text(*at, texts[i], color=color, fontsize=6.5, va="top", bbox=box, clip_on=True)
        else:
            at = outline.max(0) + 0.4
            axes.annotate(texts[i], at, color=color, fontsize=size, clip_on=True)


def write_plot(
    path: str | Path,
    detections: Detections,
    inputs: Any = None,
    targets: Sequence[Mapping[str, Any]] | None = None,
) -> None:
    """Write what ``plot`` draws as a PNG, without a window."""
    figure = new_figure(9, 9)
    plot(detections, inputs, targets, figure.add_subplot())
    save_figure(path, figure, dpi=90)


def new_figure(width: float, height: float) -> Any:
    """Return a figure that no window shows; size in inches."""
    import_package("matplotlib")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(path: str | Path, figure: Any, **options: Any) -> None:
    """Write a figure as a PNG."""
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format="png", **options)


def escape_math(name: str) -> str:
    """Return a short name that matplotlib draws as it is: $ does not start a formula."""
    return short_name(name).replace("$", r"\$")
