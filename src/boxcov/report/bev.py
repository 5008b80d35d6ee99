"""Bird's-eye pictures: ground truth green, predictions red, 1 and 3 sigma ellipses of the position, the uncertainty as a number."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcov.evaluate.geometry import corners, ellipse
from boxcov.evaluate.records import Records
from boxcov.report.payload import PLANE, thinned
from boxcov.report.study import Scene
from boxcov.report.tables import shown

Array = NDArray[Any]
TRUTH, FOUND, DOUBT = "#2ca02c", "#d62728", "#e07b00"
CROWD = 40  # boxes from which on the numbers are small


def draw(
    axes: Any,
    boxes: Array,
    uncertainty: Array,
    position: Array | None,
    truth: Array,
    threshold: float | None = None,
) -> None:
    """One frame into matplotlib axes: ``boxes`` (n, 5) and ``truth`` (k, 5) as x y w l yaw, ``position`` (n, 2, 2) the covariance of x y.

    Boxes with an uncertainty (n,) of ``threshold`` or more are dashed and orange.
    """
    for corner in corners(truth):
        axes.plot(*corner.T, color=TRUTH, linewidth=2)
    size = 8 if len(boxes) <= CROWD else 5
    for i, (box, u) in enumerate(zip(boxes, uncertainty)):
        colour, style = (FOUND, "-") if threshold is None or u < threshold else (DOUBT, "--")
        axes.plot(*corners(box[None])[0].T, color=colour, linewidth=1, linestyle=style)
        front = box[:2] + box[3] / 2 * np.array([np.cos(box[4]), np.sin(box[4])])
        axes.plot(*np.stack([box[:2], front]).T, color=colour, linewidth=1)
        if position is not None:
            for sigmas, line in ((1, "-"), (3, ":")):
                axes.plot(
                    *ellipse(box[:2], position[i], sigmas).T,
                    color=colour,
                    linewidth=0.8,
                    linestyle=line,
                )
        axes.annotate(shown(u, digits=2), box[:2] + 1.2, color=colour, fontsize=size, clip_on=True)


def draw_scene(axes: Any, scene: Scene, records: Records, threshold: float | None = None) -> None:
    """The points, the objects and one method's boxes of a frame: ``records`` are those of this frame alone. Metres on both axes."""
    plane = [records.fields.index(name) for name in PLANE]
    points = thinned(scene.points, 60_000)
    axes.scatter(points[:, 0], points[:, 1], s=0.4, color="#8a919c", linewidths=0, rasterized=True)
    truth = scene.truth[:, plane] if len(scene.truth) else np.zeros((0, 5))
    position = (
        None if records.covariance is None else records.covariance[:, plane[:2]][:, :, plane[:2]]
    )
    draw(axes, records.boxes[:, plane], records.uncertainty, position, truth, threshold)
    centres = np.concatenate(
        [records.boxes[:, plane[:2]], truth[:, :2], np.zeros((1, 2))]
    )  # the sensor is at 0 0
    low, high = centres.min(0) - 6, centres.max(0) + 6
    middle, half = (low + high) / 2, float((high - low).max()) / 2
    axes.set(
        xlim=(middle[0] - half, middle[0] + half),
        ylim=(middle[1] - half, middle[1] + half),
        aspect="equal",
    )
    axes.set(xlabel="x [m]", ylabel="y [m]")
