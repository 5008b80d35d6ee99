"""The data of the page's interactive viewer; ``assets`` holds its HTML and its script."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcov.box_layout import IMAGE, PLANE, columns, has_layout
from boxcov.evaluate.covariance_metrics import LEVELS
from boxcov.evaluate.records import Records
from boxcov.report.study import Method, Scene, Study, thin_points
from boxcov.report.verdict import LEVEL, display_unit

Array = NDArray[Any]
# points of all scenes and of one, which would dominate the size of the page; a scene keeps some
MAX_POINTS, MAX_POINTS_PER_SCENE, MIN_POINTS_PER_SCENE = 100_000, 20_000, 2_000
MAX_SIDE = 800  # pixels of an image
MAX_BOXES = 2000  # of one scene: a browser would stall with more
CENTIMETRES = 100  # points are stored in whole centimetres: two bytes per coordinate up to 327 m


class Blobs:
    """Arrays as base64 text; equal arrays, such as the boxes of two methods, are stored once."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def add(self, array: Array, dtype: str) -> int:
        """Return the number of the array."""
        with np.errstate(over="ignore"):  # beyond float32
            content = np.ascontiguousarray(array, dtype).tobytes()
        text = base64.b64encode(content).decode()
        return self._numbers.setdefault(text, len(self._numbers))

    @property
    def texts(self) -> list[str]:
        return list(self._numbers)


def pack(study: Study) -> dict[str, Any]:
    """Return the data of the viewer as plain dicts, lists, numbers and text."""
    blobs = Blobs()
    plane = plane_columns(study.fields)
    scenes = sorted(study.scenes.items()) if plane else []
    points = MAX_POINTS // max(len(scenes), 1)
    points = min(max(points, MIN_POINTS_PER_SCENE), MAX_POINTS_PER_SCENE)
    frames = [number for number, _ in scenes]
    units = [display_unit(name) for name in study.fields]
    return {
        "fields": list(study.fields),
        "units": [unit for unit, _ in units],
        "factors": [factor for _, factor in units],
        "classes": list(study.classes),
        "plane": plane,
        "image": plane is not None and len(plane) == len(IMAGE),
        "scenes": [_pack_scene(blobs, number, scene, points) for number, scene in scenes],
        "methods": [_pack_method(blobs, method, frames) for method in viewer_methods(study)],
        "blobs": blobs.texts,
    }


def viewer_methods(study: Study) -> list[Method]:
    """Return the methods with a covariance; all methods if none has one."""
    methods = [method for method in study.methods if method.records.covariance is not None]
    return methods or list(study.methods)


def plane_columns(fields: Sequence[str]) -> list[int] | None:
    """Return the columns of x y w l yaw, or of x1 y1 x2 y2; None if the fields have neither."""
    layouts = (names for names in (PLANE, IMAGE) if has_layout(fields, names))
    return next((columns(fields, names) for names in layouts), None)


def _pack_scene(blobs: Blobs, number: int, scene: Scene, max_points: int) -> dict[str, Any]:
    points = scene.points[:, :2]
    in_range = (np.abs(points) < 32767 / CENTIMETRES).all(1)  # False for NaN
    points = thin_points(points[in_range], max_points)
    return {
        "frame": int(number),
        "name": scene.name,
        "pointsTotal": len(scene.points),
        "points": blobs.add(np.round(points * CENTIMETRES), "<i2"),
        "truth": blobs.add(scene.truth, "<f4"),
        "truthLabels": blobs.add(scene.truth_labels, "<i2"),
        "image": None if scene.image is None else _pack_image(scene.image),
    }


def _pack_image(image: Array) -> dict[str, Any]:
    """Return the image as a JPEG of at most ``MAX_SIDE`` pixels, with its own size."""
    from PIL import Image

    picture = Image.fromarray(image)
    picture.thumbnail((MAX_SIDE, MAX_SIDE))
    file = BytesIO()
    picture.save(file, "JPEG", quality=75)
    text = base64.b64encode(file.getvalue()).decode()
    height, width = image.shape[:2]
    return {"href": f"data:image/jpeg;base64,{text}", "width": width, "height": height}


def _pack_method(blobs: Blobs, method: Method, frames: Sequence[int]) -> dict[str, Any]:
    records = method.records
    name, unit, values = box_values(records)
    parts = {number: np.flatnonzero(records.frame == number) for number in frames}
    return {
        "name": method.name,
        "note": method.note,
        "value": {"name": name, "unit": unit},
        "regions": records.regions is not None,
        "shown": {str(n): _pack_boxes(blobs, records, values, r) for n, r in parts.items()},
    }


def box_values(records: Records) -> tuple[str, str, Array]:
    """Return name, unit and values (n,) of the number that boxes are coloured and sorted by.

    The risk; without one the standard deviation of the position, never a sum of different units.
    """
    if records.risk is not None:
        return "risk", "", records.risk
    plane = plane_columns(records.fields)
    if records.covariance is None or plane is None:
        return "u", "", records.uncertainty
    variances = np.diagonal(records.covariance, axis1=1, axis2=2)
    if len(plane) == len(IMAGE):
        return "σ of the sides", "px", np.sqrt(np.maximum(variances[:, plane].mean(1), 0))
    return "σ of the position", "m", np.sqrt(np.maximum(variances[:, plane[:2]].sum(1), 0))


def _pack_boxes(blobs: Blobs, every: Records, values: Array, rows: Array) -> dict[str, Any]:
    """Return the boxes of some rows; of more than ``MAX_BOXES`` those of the highest scores."""
    total = len(rows)
    rows = np.sort(rows[np.argsort(-every.scores[rows], kind="stable")[:MAX_BOXES]])
    records = every[rows]
    errors = records.errors if records.regions is None else records.as_axes().errors
    arrays = {"value": values[rows], "boxes": records.boxes, "errors": errors}
    arrays |= {"scores": records.scores, "iou": records.iou, "l2": records.l2}
    packed = {name: blobs.add(array, "<f4") for name, array in arrays.items()}
    packed |= {"labels": blobs.add(records.labels, "<i2"), "bad": blobs.add(records.bad, "<i1")}
    packed["total"] = total
    if records.covariance is not None:
        deviations, correlations = deviations_and_correlations(records.covariance)
        packed["std"] = blobs.add(deviations, "<f4")
        packed["correlations"] = blobs.add(np.round(correlations * 32767), "<i2")
    if records.predictive is not None:
        deviations, _ = deviations_and_correlations(records.predictive)
        packed["predictive"] = blobs.add(deviations, "<f4")
    if records.regions is not None:
        packed["region"] = blobs.add(records.regions[:, LEVELS.index(LEVEL)], "<f4")
    return packed


def deviations_and_correlations(covariance: Array) -> tuple[Array, Array]:
    """Return standard deviations (n, D) and the correlations below the diagonal, row by row.

    A negative or NaN variance has a deviation of NaN. Undefined correlations are 0.
    """
    variances = np.diagonal(covariance, axis1=1, axis2=2)
    deviations = np.sqrt(np.where(variances >= 0, variances, np.nan))
    row, column = np.tril_indices(covariance.shape[1], -1)
    with np.errstate(invalid="ignore", divide="ignore"):
        correlations = covariance[:, row, column] / (deviations[:, row] * deviations[:, column])
    return deviations, np.where(np.isfinite(correlations), correlations, 0.0).clip(-1, 1)
