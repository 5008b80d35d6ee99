"""Average precision as in nuScenes: pairs by distance of centres, at 0.5, 1, 2 and 4 metres."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcov.evaluate.matching import Objects, Predictions, pair_by_distance

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


@dataclass(frozen=True)
class Boxes:
    """The boxes of one frame: detections with scores, or objects with their number of points."""

    centres: Array  # (n, 2) in the plane, relative to the sensor
    labels: Array  # (n,)
    weights: Array  # (n,) scores of detections, number of points of objects


def average_precision(
    found: Sequence[Boxes], truth: Sequence[Boxes], classes: Sequence[str]
) -> dict[str, dict[float, float]]:
    """Return the AP per class and distance over all frames; NaN for a class without an object.

    Objects without a LiDAR point do not count.

    >>> car = Boxes(np.zeros((1, 2)), np.zeros(1), np.ones(1))
    >>> average_precision([car], [car], ["car"])["car"][2.0]
    1.0
    """
    table: dict[str, dict[float, float]] = {}
    for label, name in enumerate(classes):
        max_range = RANGES.get(name, DEFAULT_RANGE)
        found_boxes = Predictions(*_select_class(found, label, max_range, drop_empty=False))
        centres, _, frame = _select_class(truth, label, max_range, drop_empty=True)
        objects = Objects(centres, frame)
        row = {}
        for limit in DISTANCES:
            pairs = pair_by_distance(found_boxes, objects, limit)
            hit = pairs[np.argsort(-found_boxes.scores, kind="stable")] >= 0
            row[limit] = _area(hit, len(centres))
        table[name] = row
    return table


def mean_precision(table: Mapping[str, Mapping[float, float]]) -> float:
    """Return the mAP: the mean over distances, then over the classes that occur.

    >>> nan = float("nan")
    >>> mean_precision({"car": {0.5: 0.25, 1.0: 0.75}, "bus": {0.5: nan, 1.0: nan}})
    0.5
    """
    rows = [float(np.mean(list(row.values()))) for row in table.values()]
    known = [row for row in rows if not np.isnan(row)]
    return float(np.mean(known)) if known else float("nan")


def _select_class(
    frames: Sequence[Boxes], label: int, max_range: float, drop_empty: bool
) -> tuple[Array, Array, Array]:
    """Return centres (n, 2), weights (n,) and frame numbers (n,) of one class over all frames."""
    centres, weights, number = [np.zeros((0, 2))], [np.zeros(0)], [np.zeros(0)]
    for i, boxes in enumerate(frames):
        rows = (boxes.labels == label) & (np.linalg.norm(boxes.centres, axis=1) < max_range)
        if drop_empty:
            rows &= boxes.weights > 0
        centres.append(boxes.centres[rows])
        weights.append(boxes.weights[rows])
        number.append(np.full(int(rows.sum()), i))
    return np.concatenate(centres), np.concatenate(weights), np.concatenate(number)


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
