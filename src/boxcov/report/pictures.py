"""Pictures of frames by matplotlib: LiDAR frames from above, and images.

Objects are green. Calibrated boxes have the colour of their risk and a dashed outline: the box
grown by the half widths of its region. Boxes with a risk above 50 % are thin and have no outline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcov.box_layout import IMAGE, PLANE, columns, find_layout
from boxcov.concatenation import check_single_frame
from boxcov.detections import Detections
from boxcov.errors import BoxcovError, import_package
from boxcov.evaluate.covariance_metrics import LEVELS
from boxcov.evaluate.records import Records
from boxcov.files import atomic_write
from boxcov.outlines import (
    DOUBTFUL,
    background_of,
    corners,
    ellipse,
    grown_boxes,
    risk_colors,
    side_bands,
)
from boxcov.plain_text import MAX_NAME, short_name
from boxcov.report.study import thin_points

Array = NDArray[Any]
OBJECT, PREDICTION, UNCERTAIN = "#2ca02c", "#d62728", "#e07b00"
OBJECT_FILL = (0.17, 0.63, 0.17)
POINTS = "#8a919c"
MANY_BOXES = 40  # from this number on the text is small
MAX_BOXES = 1000  # in one picture: more take minutes, and nobody can tell them apart
LOW_SCORE = 0.3  # boxes without a risk are dashed below it
GAUSS = float(np.sqrt(-2 * np.log(1 - 0.9)))  # sigmas of the ellipse that holds 90 %


@dataclass(frozen=True)
class Shown:
    """What a picture shows of the boxes of one frame."""

    fields: tuple[str, ...]
    boxes: Array  # (m, D)
    scores: Array  # (m,)
    risk: Array | None = None  # (m,)
    widths: Array | None = None  # (m, D) half widths of the region
    covariance: Array | None = None  # (m, D, D) drawn where there are no half widths
    names: Sequence[str] = ()  # m classes
    total: int = 0  # boxes of the frame, of which m are shown

    @staticmethod
    def of(found: Detections | Records, level: float = 0.9) -> Shown:
        """Return what is shown of detections, or of records at the first level above ``level``.

        Of more than ``MAX_BOXES`` boxes those of the highest scores are shown.
        """
        total = len(found)
        if total > MAX_BOXES:
            scores = found.scores if isinstance(found, Records) else found.numpy()["scores"]
            found = found[np.sort(np.argsort(-scores, kind="stable")[:MAX_BOXES])]
        classes = [found.classes[int(label)] for label in found.labels]
        if isinstance(found, Records):
            widths = found.regions
            if widths is not None:
                widths = widths[:, next(i for i, one in enumerate(LEVELS) if one >= level)]
            arrays = (found.boxes, found.scores, found.risk, widths, found.covariance)
            return Shown(found.fields, *arrays, classes, total)
        of = found.numpy()
        has_region = found.region_widths is not None
        widths = found.region(level).detach().cpu().numpy() if has_region else None
        arrays = (of["boxes"], of["scores"], of.get("risk"), widths, of.get("covariance"))
        return Shown(found.fields, *arrays, classes, total)

    @property
    def colors(self) -> list[Any]:
        if self.risk is not None:
            return [tuple(color) for color in risk_colors(self.risk) / 255]
        return [PREDICTION if score >= LOW_SCORE else UNCERTAIN for score in self.scores]

    @property
    def is_doubtful(self) -> Array:
        """Which boxes (m,) are probably bad, and so drawn thin, without region and text."""
        return np.zeros(len(self.scores), bool) if self.risk is None else self.risk > DOUBTFUL

    @property
    def texts(self) -> list[str]:
        """The number beside each box: its risk, or its score."""
        if self.risk is not None:
            return ["" if risk > DOUBTFUL else f"{100 * risk:.0f} %" for risk in self.risk]
        return [f"{score:.2f}" for score in self.scores]


def plot(
    detections: Detections,
    inputs: Any = None,
    targets: Sequence[Mapping[str, Any]] | None = None,
    axes: Any = None,
    level: float = 0.9,
) -> Any:
    """Draw the boxes of one frame, see ``Detections.plot``; return the axes."""
    check_single_frame(detections, "a plot")
    axes = new_axes(7, 7) if axes is None else axes
    truth = np.zeros((0, len(detections.fields)))
    if targets:
        boxes = targets[0]["boxes"].detach().cpu().numpy()
        truth = boxes[:, : len(detections.fields)]
    shown, background = Shown.of(detections, level), background_of(inputs)
    if find_layout(detections.fields, (PLANE, IMAGE), "a plot") == IMAGE:
        draw_image(axes, shown, background, truth)
        return axes
    if inputs is not None and (background is None or background.ndim != 2):
        raise BoxcovError(
            "these inputs are no point cloud (n, 2 or more): give the frame's own inputs, or None"
        )
    draw_from_above(axes, shown, np.zeros((0, 2)) if background is None else background, truth)
    return axes


def new_axes(width: float, height: float) -> Any:
    """Return the axes of a new figure of pyplot, which a notebook shows; size in inches."""
    import_package("matplotlib")
    from matplotlib import pyplot as plt

    return plt.subplots(figsize=(width, height), layout="constrained")[1]


def draw_from_above(axes: Any, shown: Shown, points: Array, truth: Array) -> None:
    """Draw points (n, 2 or more), objects (k, D) and boxes from above, in metres."""
    plane = columns(shown.fields, PLANE)
    points = thin_points(points, 60_000)
    axes.scatter(points[:, 0], points[:, 1], s=0.4, color=POINTS, linewidths=0, rasterized=True)
    truth = truth[:, plane] if len(truth) else np.zeros((0, 5))
    for outline in corners(truth):
        axes.fill(*outline.T, facecolor=(*OBJECT_FILL, 0.22), edgecolor=OBJECT, linewidth=1)
    boxes = np.asarray(shown.boxes, dtype=float)[:, plane]
    for box, color, score, is_thin in zip(boxes, shown.colors, shown.scores, shown.is_doubtful):
        is_low = shown.risk is None and score < LOW_SCORE
        _draw_box(axes, box, color, "--" if is_low else "-", 0.5 if is_thin else 1.2)
    regions = zip(_regions_from_above(shown, boxes, plane), shown.colors, shown.is_doubtful)
    for outline, color, is_thin in regions:
        if not is_thin:
            axes.plot(*outline.T, color=color, linewidth=0.8, linestyle=(0, (3, 2)))
    size = 8 if int((~shown.is_doubtful).sum()) <= MANY_BOXES else 5
    for outline, text, color in zip(corners(boxes), shown.texts, shown.colors):
        axes.annotate(text, outline.max(0) + 0.4, color=color, fontsize=size, clip_on=True)
    centres = np.concatenate([boxes[:, :2], truth[:, :2], np.zeros((1, 2))])  # the sensor is at 0 0
    low, high = centres.min(0) - 6, centres.max(0) + 6
    middle, half = (low + high) / 2, float((high - low).max()) / 2
    limits = {"xlim": middle[0] + [-half, half], "ylim": middle[1] + [-half, half]}
    axes.set(**limits, aspect="equal", xlabel="x [m]", ylabel="y [m]")
    _say_total(axes, shown)


def _say_total(axes: Any, shown: Shown) -> None:
    """Write into the picture that it does not show all boxes."""
    if shown.total > len(shown.scores):
        text = f"the {len(shown.scores):,} boxes of the highest scores, of {shown.total:,}"
        axes.annotate(text, (0.01, 0.01), xycoords="axes fraction", fontsize=8)


def _draw_box(axes: Any, box: Array, color: Any, dash: str, width: float) -> None:
    """Draw a box x y w l yaw with its heading."""
    axes.plot(*corners(box[None])[0].T, color=color, linewidth=width, linestyle=dash)
    front = box[:2] + box[3] / 2 * np.array([np.cos(box[4]), np.sin(box[4])])
    axes.plot(*np.stack([box[:2], front]).T, color=color, linewidth=width)


def _regions_from_above(shown: Shown, boxes: Array, plane: list[int]) -> list[Array]:
    """Return outlines: grown boxes, or the 90 % ellipses of the centres, or nothing."""
    if shown.widths is not None:
        return list(corners(grown_boxes(boxes, shown.widths[:, plane])))
    if shown.covariance is None:
        return []
    C = np.asarray(shown.covariance, dtype=float)[:, plane[:2]][:, :, plane[:2]]
    return list(ellipse(boxes[:, :2], C, GAUSS))


def draw_image(axes: Any, shown: Shown, image: Array | None, truth: Array) -> None:
    """Draw an image (h, w, 3), red, green and blue, with boxes and objects (k, 4), x1 y1 x2 y2.

    Without half widths the corners have the 90 % ellipses of their covariance.
    """
    if image is not None:
        axes.imshow(image)
        height, width = image.shape[:2]
        axes.set(xlim=(0, width), ylim=(height, 0), xticks=[], yticks=[])
    elif not axes.yaxis_inverted():
        axes.invert_yaxis()
    for box in truth:
        _draw_upright_box(axes, box, OBJECT, 1.5)
    _say_total(axes, shown)
    sides = columns(shown.fields, IMAGE)
    boxes = np.asarray(shown.boxes, dtype=float)[:, sides]
    for box, color, text, name in zip(boxes, shown.colors, shown.texts, shown.names):
        _draw_upright_box(axes, box, color, 1.8 if text else 0.5)
        if text:
            _annotate(axes, box, f"{escape_math(name)} {text}", color)
    if shown.widths is not None:
        widths = np.where(shown.is_doubtful[:, None], np.nan, shown.widths[:, sides])
        for band in side_bands(boxes, widths):
            for box, color in zip(band, shown.colors):
                _draw_upright_box(axes, box, color, 1.0, (0, (3, 2)))
    elif shown.covariance is not None:
        for box, C, color in zip(boxes, shown.covariance, shown.colors):
            for at in (slice(0, 2), slice(2, 4)):
                axes.plot(*ellipse(box[at], C[at, at], GAUSS).T, color=color, linewidth=0.8)


def _annotate(axes: Any, box: Array, text: str, color: Any) -> None:
    axes.text(
        max(box[0], 0) + 2,
        max(box[1], 0) + 2,
        text,
        color=color,
        fontsize=6.5,
        va="top",
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5},
        clip_on=True,
    )


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


def escape_math(name: str, length: int = MAX_NAME) -> str:
    """Return a short name that matplotlib draws as it is: $ is no mathematics."""
    return short_name(name, length).replace("$", r"\$")


def _draw_upright_box(axes: Any, box: Array, color: Any, width: float, dash: Any = "-") -> None:
    x1, y1, x2, y2 = box[:4]
    x, y = [x1, x2, x2, x1, x1], [y1, y1, y2, y2, y1]
    axes.plot(x, y, color=color, linewidth=width, linestyle=dash)
