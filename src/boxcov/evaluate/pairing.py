"""Which detection belongs to which object, as in the official evaluation of nuScenes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def pair_by_distance(centres: Array, scores: Array, frame: Array, truth: Array, truth_frame: Array, limit: float) -> Array:
    """For each detection of one class (n,) the number of the object that it is paired with, or -1.

    By falling score over all frames, each detection takes the nearest object of its frame that is still free, if it lies closer than
    ``limit`` metres in the plane. Centres are (n, 2), objects (k, 2).

    >>> centres, truth = np.array([[0.0, 0.0], [0.3, 0.0]]), np.array([[0.2, 0.0]])
    >>> pair_by_distance(centres, np.array([0.9, 0.8]), np.zeros(2), truth, np.zeros(1), 2.0).tolist()
    [0, -1]
    """
    paired = np.full(len(centres), -1)
    free = np.ones(len(truth), dtype=bool)
    of_frame = {number: np.flatnonzero(truth_frame == number) for number in np.unique(truth_frame)}
    nothing = np.zeros(0, dtype=int)
    for i in np.argsort(-scores, kind="stable"):
        rivals = of_frame.get(frame[i], nothing)
        rivals = rivals[free[rivals]]
        if not len(rivals):
            continue
        distance = np.linalg.norm(truth[rivals] - centres[i], axis=1)
        nearest = int(distance.argmin())
        if distance[nearest] < limit:
            paired[i] = rivals[nearest]
            free[rivals[nearest]] = False
    return paired
