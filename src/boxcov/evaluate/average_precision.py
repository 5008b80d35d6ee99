"""Average precision as in nuScenes: pairs by distance of centres, at 0.5, 1, 2 and 4 metres."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcov.detections import Detections
from boxcov.evaluate.ground_truth import GroundTruth
from boxcov.evaluate.matching import pair_classes

Array = NDArray[Any]
DISTANCES = (0.5, 1.0, 2.0, 4.0)
# maximum distance from the sensor in metres per class, as in the official configuration
RANGES: Mapping[str, float] = {
    "pedestrian": 40.0,
    "motorcycle": 40.0,
    "bicycle": 40.0,
    "barrier": 30.0,
    "traffic_cone": 30.0,
}
DEFAULT_RANGE = 50.0


def average_precision(found: Detections, truth: GroundTruth) -> dict[str, dict[float, float]]:
    """Return the AP per class and distance over all frames; NaN for a class without an object.

    The first two numbers of boxes are x and y, relative to the sensor.
    """
    arrays = found.numpy()
    reach = np.array([RANGES.get(name, DEFAULT_RANGE) for name in found.classes])
    near = np.linalg.norm(arrays["boxes"][:, :2].astype(float), axis=1) < reach[arrays["labels"]]
    boxes, scores, labels, frame = (
        arrays[name][near] for name in ("boxes", "scores", "labels", "frame")
    )
    known = (truth.labels >= 0) & (truth.labels < len(reach))
    near = np.linalg.norm(truth.boxes[:, :2], axis=1) < reach[np.where(known, truth.labels, 0)]
    near &= known
    objects = (truth.boxes[near, :2], truth.labels[near], truth.frame[near])
    own = (boxes[:, :2].astype(float), scores, labels, frame)
    hits = {limit: pair_classes(("x", "y"), own, objects, limit) >= 0 for limit in DISTANCES}
    order = np.argsort(-scores, kind="stable")
    table: dict[str, dict[float, float]] = {}
    for label, name in enumerate(found.classes):
        rows, count = order[labels[order] == label], int((objects[1] == label).sum())
        table[name] = {limit: _area(hit[rows], count) for limit, hit in hits.items()}
    return table


def mean_precision(table: Mapping[str, Mapping[float, float]]) -> float:
    """Return the mAP: the mean over distances, then over the classes that occur."""
    rows = [float(np.mean(list(row.values()))) for row in table.values()]
    known = [row for row in rows if not np.isnan(row)]
    return float(np.mean(known)) if known else float("nan")


def _area(hit: Array, objects: int) -> float:
    """Return the area under precision over recall where both exceed 0.1, scaled to [0, 1]."""
    if not objects:
        return float("nan")
    if not hit.any():
        return 0.0
    hits = np.cumsum(hit)
    recall, precision = hits / objects, hits / np.arange(1, len(hit) + 1)
    interpolated = np.interp(np.linspace(0, 1, 101), recall, precision, right=0)
    return float(np.maximum((interpolated[11:] - 0.1) / 0.9, 0).mean())
