"""Average precision in the manner of nuScenes: pairs by distance of centres, at 0.5, 1, 2 and 4 metres."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcov.evaluate.pairing import pair_by_distance

Array = NDArray[Any]
DISTANCES = (0.5, 1.0, 2.0, 4.0)
# metres from the sensor within which a class counts, as in the official configuration
RANGES: Mapping[str, float] = {
    "pedestrian": 40.0,
    "motorcycle": 40.0,
    "bicycle": 40.0,
    "barrier": 30.0,
    "traffic_cone": 30.0,
}
FAR = 50.0


@dataclass(frozen=True)
class Boxes:
    """The boxes of one frame: detections with their scores, or objects with the number of points on each."""

    centres: Array  # (n, 2) in the plane, from the sensor
    labels: Array  # (n,)
    weights: Array  # (n,) scores of detections; points of objects


def average_precision(
    found: Sequence[Boxes], truth: Sequence[Boxes], classes: Sequence[str]
) -> dict[str, dict[float, float]]:
    """AP by class and distance over all frames; NaN for a class without an object. Objects without a point do not count.

    >>> car = Boxes(np.zeros((1, 2)), np.zeros(1), np.ones(1))
    >>> average_precision([car], [car], ["car"])["car"][2.0]
    1.0
    """
    table: dict[str, dict[float, float]] = {}
    for label, name in enumerate(classes):
        reach = RANGES.get(name, FAR)
        centres, scores, frame = _of_class(found, label, reach, drop_empty=False)
        objects, _, object_frame = _of_class(truth, label, reach, drop_empty=True)
        row = {}
        for limit in DISTANCES:
            hit = pair_by_distance(centres, scores, frame, objects, object_frame, limit) >= 0
            row[limit] = _area(hit[np.argsort(-scores, kind="stable")], len(objects))
        table[name] = row
    return table


def mean_precision(table: Mapping[str, Mapping[float, float]]) -> float:
    """mAP: over distances, then over the classes that occur.

    >>> mean_precision({"car": {0.5: 0.2, 1.0: 0.4}, "bus": {0.5: float("nan"), 1.0: float("nan")}})
    0.30000000000000004
    """
    rows = [float(np.mean(list(row.values()))) for row in table.values()]
    known = [row for row in rows if not np.isnan(row)]
    return float(np.mean(known)) if known else float("nan")


def _of_class(
    frames: Sequence[Boxes], label: int, reach: float, drop_empty: bool
) -> tuple[Array, Array, Array]:
    centres, weights, number = [np.zeros((0, 2))], [np.zeros(0)], [np.zeros(0)]
    for i, boxes in enumerate(frames):
        mine = (boxes.labels == label) & (np.linalg.norm(boxes.centres, axis=1) < reach)
        if drop_empty:
            mine &= boxes.weights > 0
        centres.append(boxes.centres[mine])
        weights.append(boxes.weights[mine])
        number.append(np.full(int(mine.sum()), i))
    return np.concatenate(centres), np.concatenate(weights), np.concatenate(number)


def _area(hit: Array, objects: int) -> float:
    """The area under precision over recall, both above 0.1, scaled to 1; precision interpolated at 101 recalls."""
    if not objects:
        return float("nan")
    if not hit.any():
        return 0.0
    hits = np.cumsum(hit)
    recall, precision = hits / objects, hits / np.arange(1, len(hit) + 1)
    at = np.interp(np.linspace(0, 1, 101), recall, precision, right=0)
    return float(np.maximum((at[11:] - 0.1) / 0.9, 0).mean())
