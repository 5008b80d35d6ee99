"""FiftyOne: the boxes of one frame as a label field of a sample, with risk and half widths."""

from __future__ import annotations

from typing import Any

from boxcov.box_layout import IMAGE, SPACE, find_layout
from boxcov.concatenation import check_single_frame
from boxcov.detections import Detections
from boxcov.errors import BoxcovError, import_package
from boxcov.export.tables import columns


def to_fiftyone(detections: Detections, size: tuple[float, float] | None = None) -> Any:
    """Return the boxes of one frame as ``fiftyone.Detections``.

    Boxes x1 y1 x2 y2 need ``size``, the width and height of the image in pixels; boxes x y z w l h
    yaw become 3D boxes. Risk, probabilities, scales and half widths at 90 % of calibrated boxes are
    attributes, by the names of ``boxcov.export.tables.columns``; so is ``uncertainty``.
    """
    table = columns(detections)
    fo = import_package("fiftyone")
    check_single_frame(detections, "a sample")
    kept = [n for n in table if n == "uncertainty" or n.startswith(("scale_", "half_width_"))]
    kept += [n for n in ("risk", "no_object", "misplaced", "flipped") if n in table]
    rows = [dict(zip(table, values)) for values in zip(*table.values())]
    boxes = [
        fo.Detection(
            label=row["class"],
            confidence=float(row["score"]),
            **_place(row, detections.fields, size),
            **{name: float(row[name]) for name in kept},
        )
        for row in rows
    ]
    return fo.Detections(detections=boxes)


def _place(
    row: dict[str, Any], fields: tuple[str, ...], size: tuple[float, float] | None
) -> dict[str, Any]:
    """Return the box as FiftyOne has it: relative x y width height, or location, dimensions ..."""
    value = {name: float(row[name]) for name in fields}
    if find_layout(fields, (IMAGE, SPACE), "FiftyOne") == IMAGE:
        if size is None:
            raise BoxcovError("boxes of an image need its size: to_fiftyone((width, height))")
        x1, y1, x2, y2 = (value[name] for name in IMAGE)
        width, height = size
        box = [x1 / width, y1 / height, (x2 - x1) / width, (y2 - y1) / height]
        return {"bounding_box": box}
    return {
        "location": [value["x"], value["y"], value["z"]],
        "dimensions": [value["l"], value["w"], value["h"]],
        "rotation": [0.0, 0.0, value["yaw"]],
    }
