"""Which detection belongs to which object, as in the official evaluations of nuScenes (distance) and COCO (overlap)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcov.evaluate.overlap import iou_2d

Array = NDArray[Any]


def pair_by_distance(
    centres: Array, scores: Array, frame: Array, truth: Array, truth_frame: Array, limit: float
) -> Array:
    """For each detection of one class (n,) the number of the object that it is paired with, or -1.

    By falling score over all frames, each detection takes the nearest object of its frame that is still free, if it lies closer than
    ``limit`` metres in the plane. Centres are (n, 2), objects (k, 2).

    >>> centres, truth = np.array([[0.0, 0.0], [0.3, 0.0]]), np.array([[0.2, 0.0]])
    >>> pair_by_distance(centres, np.array([0.9, 0.8]), np.zeros(2), truth, np.zeros(1), 2.0).tolist()
    [0, -1]
    """

    def nearest(i: int, rivals: Array) -> int:
        distance = np.linalg.norm(truth[rivals] - centres[i], axis=1)
        best = int(distance.argmin())
        return best if distance[best] < limit else -1

    return _greedy(scores, frame, truth_frame, nearest)


def pair_by_iou(
    boxes: Array, scores: Array, frame: Array, truth: Array, truth_frame: Array, limit: float = 0.5
) -> Array:
    """For each detection of one class (n,) the number of the object that it is paired with, or -1.

    By falling score, each detection takes the free object of its frame that it overlaps most, if their IoU is at least ``limit``.
    Boxes are (n, 4) and objects (k, 4), as x1 y1 x2 y2.

    >>> boxes, truth = np.array([[0.0, 0, 4, 4], [0.0, 0, 4, 5]]), np.array([[0.0, 0, 4, 4]])
    >>> pair_by_iou(boxes, np.array([0.8, 0.9]), np.zeros(2), truth, np.zeros(1)).tolist()
    [-1, 0]
    """

    def overlapping(i: int, rivals: Array) -> int:
        iou = iou_2d(np.broadcast_to(boxes[i], (len(rivals), 4)), truth[rivals])
        best = (
            len(iou) - 1 - int(iou[::-1].argmax())
        )  # of equals the last, as COCO's own evaluation has it
        return best if iou[best] >= limit else -1

    return _greedy(scores, frame, truth_frame, overlapping)


def _greedy(
    scores: Array, frame: Array, truth_frame: Array, choose: Callable[[int, Array], int]
) -> Array:
    """By falling score, each detection is given what ``choose`` picks among the free objects of its frame; -1 is none."""
    paired = np.full(len(scores), -1)
    free = np.ones(len(truth_frame), dtype=bool)
    numbers, start = np.unique(np.sort(truth_frame), return_index=True)
    of_frame = dict(
        zip(numbers.tolist(), np.split(np.argsort(truth_frame, kind="stable"), start[1:]))
    )
    nothing = np.zeros(0, dtype=int)
    for i in np.argsort(-scores, kind="stable"):
        rivals = of_frame.get(frame[i], nothing)
        rivals = rivals[free[rivals]]
        chosen = choose(i, rivals) if len(rivals) else -1
        if chosen >= 0:
            paired[i] = rivals[chosen]
            free[rivals[chosen]] = False
    return paired
