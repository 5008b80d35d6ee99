"""Pictures of detections in images: ground truth green, predictions red, ellipses of the two corners, the uncertainty as a number."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcov.detections import Detections
from boxcov.errors import BoxcovError
from boxcov.evaluate.geometry import ellipse
from boxcov.report.bev import FOUND, TRUTH

Array = NDArray[Any]


def draw(
    axes: Any,
    image: Array,
    found: Detections,
    truth: Array,
    sigmas: float = 1.0,
    relative: bool = True,
) -> None:
    """One letterboxed image (3, h, w), blue first, into matplotlib axes, with its boxes and the objects (k, 4) as x1 y1 x2 y2.

    The number at a box is the root of its uncertainty in pixels or, where ``relative``, in percent of its mean side.
    """
    axes.imshow(np.clip(image[::-1].transpose(1, 2, 0) / 255, 0, 1))
    for box in truth:
        _outline(axes, box, TRUTH, 1.5)
    arrays = found.numpy()
    for box, covariance, label, score in zip(
        arrays["boxes"], arrays["covariance"], arrays["labels"], arrays["scores"]
    ):
        _outline(axes, box[:4], FOUND, 1.2)
        for first in (0, 2):
            axes.plot(
                *ellipse(
                    box[first : first + 2], covariance[first : first + 2, first : first + 2], sigmas
                ).T,
                color=FOUND,
                linewidth=0.8,
            )
        pixels = float(np.sqrt(np.trace(covariance[:4, :4])))
        side = float(np.sqrt(max((box[2] - box[0]) * (box[3] - box[1]), 1.0)))
        said = f"{100 * pixels / side:.0f} %" if relative else f"{pixels:.1f} px"
        text = f"{found.classes[int(label)]} {score:.2f}, {said}"
        under = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5}
        axes.text(
            max(box[0], 0) + 2,
            max(box[1], 0) + 2,
            text,
            color=FOUND,
            fontsize=6.5,
            va="top",
            bbox=under,
            clip_on=True,
        )
    height, width = image.shape[1:]
    axes.set(xlim=(0, width), ylim=(height, 0), xticks=[], yticks=[])


def _outline(axes: Any, box: Array, colour: str, width: float) -> None:
    x1, y1, x2, y2 = box
    axes.plot([x1, x2, x2, x1, x1], [y1, y1, y2, y2, y1], color=colour, linewidth=width)


def picture(
    path: str | Path,
    frames: Sequence[tuple[Array, Detections, Array]],
    titles: Sequence[str] = (),
    columns: int = 3,
) -> None:
    """A PNG of frames side by side: image (3, h, w), detections with a covariance, objects (k, 4)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not frames:
        raise BoxcovError(f"{path}: no frames to draw")
    across = min(columns, len(frames))
    figure = Figure(figsize=(4.2 * across, 4.2 * -(-len(frames) // across)), layout="constrained")
    FigureCanvasAgg(figure)
    for number, (image, found, truth) in enumerate(frames):
        axes = figure.add_subplot(-(-len(frames) // across), across, number + 1)
        draw(axes, image, found, truth)
        axes.set_title(titles[number] if number < len(titles) else "", fontsize=9)
    figure.savefig(Path(path), dpi=90)
