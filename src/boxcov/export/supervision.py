"""supervision: boxes of images there and back, and an annotator that draws their regions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from boxcov._files.input_file import MAX_CLASSES
from boxcov._files.plain_text import short_name
from boxcov.box_layout import IMAGE, columns, find_layout
from boxcov.detections import Detections
from boxcov.errors import BoxcovError, import_package
from boxcov.outlines import risk_colors, side_bands
from boxcov.result_check import check_result

_KEY = "boxcov"  # what supervision carries along: metadata["boxcov"], data["boxcov.NAME"]


def to_supervision(detections: Detections) -> Any:
    """Return boxes of images as ``supervision.Detections``.

    Every array of the boxes is in ``data``, as ``boxcov.covariance``, ``boxcov.no_object`` and so
    on, so that it is filtered and tracked with them; ``data["risk"]`` and ``data["class_name"]``
    are for annotators. ``from_supervision`` reads it back.
    """
    check_result(detections, "these detections cannot be exported")
    sv = import_package("supervision")
    arrays, sides = detections.numpy(), _sides(detections)
    labels = arrays["labels"].astype(int)
    data = {f"{_KEY}.{name}": array for name, array in arrays.items()}
    short = [short_name(name) for name in detections.classes]  # numpy takes the longest for all
    data["class_name"] = np.array(short, dtype=str)[labels]
    if detections.no_object is not None:
        data["risk"] = arrays["risk"]
    names = {"fields": detections.fields, "classes": detections.classes}
    return sv.Detections(
        xyxy=arrays["boxes"][:, sides],
        confidence=arrays["scores"],
        class_id=labels,
        data=data,
        metadata={_KEY: {**names, "meta": dict(detections.meta)}},
    )


def _sides(detections: Detections) -> list[int]:
    """Return the columns of x1 y1 x2 y2."""
    find_layout(detections.fields, (IMAGE,), "supervision")
    return columns(detections.fields, IMAGE)


def from_supervision(found: Any) -> Detections:
    """Return ``supervision.Detections`` as ``boxcov.Detections``, with all that boxcov gave them.

    Boxes of another origin have no covariance; their classes are those of ``data["class_name"]``.
    """
    about = found.metadata.get(_KEY)
    if about is not None:
        arrays: dict[str, Any] = {
            name.removeprefix(f"{_KEY}."): torch.as_tensor(np.asarray(array))
            for name, array in found.data.items()
            if name.startswith(f"{_KEY}.")
        }
        for derived in ("uncertainty", "misplaced", "risk"):
            arrays.pop(derived, None)
        return Detections(**arrays, **about)
    m = len(found)
    numbers = np.zeros(m, int) if found.class_id is None else np.asarray(found.class_id, int)
    called = found.data.get("class_name", [f"class {number}" for number in numbers])
    names = dict(zip(numbers.tolist(), map(str, called)))
    count = int(numbers.max()) + 1 if m else 0
    if count > MAX_CLASSES or (m and int(numbers.min()) < 0):
        raise BoxcovError(
            f"class_id from {numbers.min()} to {numbers.max()}: boxcov takes 0 to {MAX_CLASSES - 1}"
        )
    return Detections(
        boxes=torch.as_tensor(np.asarray(found.xyxy, np.float32)),
        scores=torch.as_tensor(
            np.ones(m) if found.confidence is None else np.asarray(found.confidence)
        ).float(),
        labels=torch.as_tensor(numbers),
        frame=torch.zeros(m, dtype=torch.long),
        fields=IMAGE,
        classes=tuple(names.get(number, f"class {number}") for number in range(count)),
    )


class RegionAnnotator:
    """An annotator of supervision: boxes in the colour of their risk, and their regions.

    The region is drawn as two thin outlines, between which a share ``level`` of the sides lies,
    each side by itself. Boxes without a risk are drawn as of risk 0 and without a region.
    """

    requires_mask = False

    def __init__(self, level: float = 0.9, thickness: int = 2) -> None:
        self.level, self.thickness = level, thickness

    def annotate(self, scene: Any, detections: Any) -> Any:
        """Return ``scene`` with the boxes drawn into it.

        scene: bytes (h, w, 3), blue, green and red, as everywhere in supervision; or a Pillow
            image, which is copied.
        """
        from PIL import Image, ImageDraw

        is_array = isinstance(scene, np.ndarray)
        picture = Image.fromarray(scene[:, :, ::-1]) if is_array else scene.convert("RGB")
        draw, limits = ImageDraw.Draw(picture), np.array(2 * picture.size)
        found = from_supervision(detections)
        is_calibrated = found.no_object is not None
        risk = found.risk.numpy() if is_calibrated else np.zeros(len(found))
        colors = [tuple(color) for color in risk_colors(risk, is_dark=True).tolist()]  # of --show
        sides = _sides(found)
        boxes = found.boxes[:, sides].double().numpy()
        rectangles = [(boxes, self.thickness)]
        if is_calibrated:
            widths = found.region(self.level)[:, sides].double().numpy()
            rectangles += [(band, 1) for band in side_bands(boxes, widths)]
        for some, width in rectangles:
            for box, color in zip(some.clip(-width, limits + width), colors):
                if np.isfinite(box).all():
                    corners = np.sort(box.reshape(2, 2).round(), axis=0)  # Pillow wants them so
                    draw.rectangle(corners.flatten().tolist(), outline=color, width=width)
        if not is_array:
            return picture
        scene[:] = np.asarray(picture)[:, :, ::-1]
        return scene
