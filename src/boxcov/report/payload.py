"""What the page's viewer needs of a study, packed: JSON with base64 arrays, each different array once."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcov.evaluate.quality import ERRORS, accurate_iou, accurate_l2, clipped_mean
from boxcov.evaluate.records import Records
from boxcov.report.study import Method, Scene, Study

Array = NDArray[Any]
POINTS, POINTS_A_SCENE = (
    100_000,
    20_000,
)  # drawn at most: more would hardly be seen, and would weigh more than all else
PLANE, IMAGE = ("x", "y", "w", "l", "yaw"), ("x1", "y1", "x2", "y2")
CENTIMETRES = 100  # points are kept as whole centimetres: two bytes a coordinate up to 327 m


class Blobs:
    """Arrays as base64 text. Equal arrays, like the boxes of two methods of one detector, are stored once.

    >>> blobs = Blobs()
    >>> blobs.add(np.zeros(3), "<f4"), blobs.add(np.ones(3), "<f4"), blobs.add(np.zeros(3), "<f4")
    (0, 1, 0)
    >>> len(blobs.texts)
    2
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def add(self, array: Array, dtype: str) -> int:
        text = base64.b64encode(np.ascontiguousarray(array, dtype).tobytes()).decode()
        return self._numbers.setdefault(text, len(self._numbers))

    @property
    def texts(self) -> list[str]:
        return list(self._numbers)


def pack(study: Study) -> dict[str, Any]:
    """The viewer's data: plain dicts, lists, numbers and text.

    >>> pack(Study("Nothing yet"))["scenes"]
    []
    """
    blobs = Blobs()
    plane = plane_of(study.fields)
    scenes = sorted(study.scenes.items()) if plane else []
    share = min(POINTS // max(len(scenes), 1), POINTS_A_SCENE)
    return {
        "fields": list(study.fields),
        "units": units_of(study.fields),
        "classes": list(study.classes),
        "plane": plane,
        "image": plane is not None and len(plane) == len(IMAGE),
        "scenes": [_scene(blobs, number, scene, share) for number, scene in scenes],
        "methods": [
            _method(blobs, method, [number for number, _ in scenes]) for method in study.methods
        ],
        "blobs": blobs.texts,
    }


def plane_of(fields: Sequence[str]) -> list[int] | None:
    """The columns that say where a box is: of x y w l yaw, or in an image of x1 y1 x2 y2; None for boxes of another kind.

    >>> plane_of(("x", "y", "z", "w", "l", "h", "yaw", "vx", "vy")), plane_of(("x1", "y1", "x2", "y2")), plane_of(("a", "b"))
    ([0, 1, 3, 4, 6], [0, 1, 2, 3], None)
    """
    for names in (PLANE, IMAGE):
        if all(name in fields for name in names):
            return [fields.index(name) for name in names]
    return None


def units_of(fields: Sequence[str]) -> list[str]:
    """Metres, radians and metres a second; pixels in an image.

    >>> units_of(("x", "yaw", "vx")), units_of(("x1", "y2"))
    (['m', 'rad', 'm/s'], ['px', 'px'])
    """
    return [
        {"yaw": "rad", "vx": "m/s", "vy": "m/s"}.get(name, "px" if name in IMAGE else "m")
        for name in fields
    ]


def thinned(points: Array, count: int) -> Array:
    """At most ``count`` of the points (p, 2), spread evenly over the list: the same ones every time.

    >>> thinned(np.arange(20.0).reshape(10, 2), 3)[:, 0].tolist()
    [0.0, 8.0, 18.0]
    """
    if len(points) <= count:
        return points
    kept: Array = points[np.linspace(0, len(points) - 1, count).astype(int)]
    return kept


def _scene(blobs: Blobs, number: int, scene: Scene, share: int) -> dict[str, Any]:
    points = scene.points[:, :2]
    points = thinned(
        points[np.isfinite(points).all(1) & (np.abs(points) < 32767 / CENTIMETRES).all(1)], share
    )
    return {
        "frame": int(number),
        "name": scene.name,
        "pointsTotal": len(scene.points),
        "points": blobs.add(np.round(points * CENTIMETRES), "<i2"),
        "truth": blobs.add(scene.truth, "<f4"),
        "truthLabels": blobs.add(scene.truth_labels, "<i2"),
    }


def _method(blobs: Blobs, method: Method, frames: Sequence[int]) -> dict[str, Any]:
    records = method.records
    u = np.asarray(records.uncertainty, dtype=float)
    return {
        "name": method.name,
        "note": method.note,
        "threshold": _finite(clipped_mean(u)),  # the paper's
        "uncertainty": blobs.add(u, "<f8"),  # whole: the page must count as Python counts
        "accurate": {name: blobs.add(kinds, "<i1") for name, kinds in kinds_of(records).items()},
        "frame": blobs.add(records.frame, "<i4"),
        "shown": {str(frame): _shown(blobs, records[records.frame == frame]) for frame in frames},
    }


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None  # JSON has no other way


def kinds_of(records: Records) -> dict[str, Array]:
    """For each error which rows (n,) are accurate (1), inaccurate (0) or not counted (-1): l2 needs a pair.

    >>> n, nothing = np.zeros(3), np.zeros((3, 0))
    >>> found = Records((), ("car",), nothing, n, n, n, n, nothing, iou=np.array([0.8, 0.1, 0.0]), l2=np.array([0.1, 0.9, np.nan]))
    >>> {error: kinds.tolist() for error, kinds in kinds_of(found).items()}
    {'IoU': [1, 0, 0], 'l2': [1, 0, -1]}
    """
    by_distance = np.full(len(records), -1)
    by_distance[records.paired] = accurate_l2(records.l2[records.paired])
    return dict(zip(ERRORS, (accurate_iou(records.iou).astype(int), by_distance)))


def _shown(blobs: Blobs, cut: Records) -> dict[str, Any]:
    """The boxes of one frame, for drawing and for reading."""
    packed = {
        "boxes": blobs.add(cut.boxes, "<f4"),
        "errors": blobs.add(cut.errors, "<f4"),
        "scores": blobs.add(cut.scores, "<f4"),
        "labels": blobs.add(cut.labels, "<i2"),
        "iou": blobs.add(cut.iou, "<f4"),
        "l2": blobs.add(cut.l2, "<f4"),
    }
    if cut.covariance is not None:
        deviations, correlations = readable(cut.covariance)
        packed |= {
            "std": blobs.add(deviations, "<f4"),
            "correlations": blobs.add(np.round(correlations * 32767), "<i2"),
        }
    if cut.predictive is not None:
        packed["predictive"] = blobs.add(readable(cut.predictive)[0], "<f4")
    return packed


def readable(covariance: Array) -> tuple[Array, Array]:
    """Standard deviations (n, D) and correlations below the diagonal (n, D (D - 1) / 2), row by row, of covariances (n, D, D).

    A field without variance has no correlation: 0. What is not finite becomes NaN in the deviations and 0 in the correlations.

    >>> deviations, correlations = readable(np.array([[[4.0, 3.0], [3.0, 9.0]]]))
    >>> deviations.tolist(), correlations.tolist()
    ([[2.0, 3.0]], [[0.5]])
    """
    variances = np.diagonal(covariance, axis1=1, axis2=2)
    deviations = np.sqrt(np.where(variances >= 0, variances, np.nan))
    row, column = np.tril_indices(covariance.shape[1], -1)
    scale = deviations[:, row] * deviations[:, column]
    with np.errstate(invalid="ignore", divide="ignore"):
        correlations = covariance[:, row, column] / scale
    return deviations, np.where(np.isfinite(correlations), correlations, 0.0).clip(-1, 1)
