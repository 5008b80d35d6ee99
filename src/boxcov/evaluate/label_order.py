"""Which frames and boxes to label or check first: one number per box, and one per frame."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from boxcov.detections import Detections, to_array
from boxcov.errors import BoxcovError, check_choice

Array = NDArray[Any]
Aggregate = Literal["sum", "mean", "max"]
Measure = Literal["risk", "epistemic"]


def relative_deviation(covariance: Array) -> Array:
    """Return the standard deviations (n,) of boxes relative to typical ones, as one number.

    It is the geometric mean over the fields of the standard deviation over its median, which is
    taken over all boxes (n, D, D). 1 is a typical box, 2 has twice its standard deviations.
    Fields that have no variance in a box, or in most boxes, do not count.

    >>> relative_deviation(np.array([1.0, 4.0, 16.0])[:, None, None] * np.diag([1.0, 100.0]))
    array([0.5, 1. , 2. ])
    """
    variance = np.diagonal(np.asarray(covariance, dtype=float), axis1=1, axis2=2)  # (n, D)
    typical = np.median(variance, axis=0) if len(variance) else np.ones(variance.shape[1])
    known = (variance > 0) & (typical > 0)
    logs = np.log(np.where(known, variance, 1) / np.where(known, typical, 1))
    return np.exp(0.5 * logs.sum(1) / np.maximum(known.sum(1), 1))


def box_values(found: Detections, by: Measure) -> Array:
    """Return the value of each box (m,): the score times its risk, or its relative deviation.

    The score, because a box that the detector itself doubts needs no look: its risk is almost 1.
    """
    check_choice("by", by, Measure)
    arrays = found.numpy()
    if by == "risk":
        value = to_array(found.risk.double())
    elif found.covariance is None:
        raise BoxcovError("these boxes have no covariances: write them with boxcov predict")
    else:
        value = relative_deviation(arrays["covariance"])
    return arrays["scores"] * value


def frame_values(values: Array, frame: Array, count: int, aggregate: Aggregate = "sum") -> Array:
    """Return the sum, mean or maximum of the boxes' values (n,) in each of ``count`` frames.

    The value of a frame without boxes is 0.

    >>> frame_values(np.array([1.0, 2.0, 5.0]), np.array([0, 0, 2]), 3, "mean").tolist()
    [1.5, 0.0, 5.0]
    """
    check_choice("aggregate", aggregate, Aggregate)
    found = np.zeros(count)
    if aggregate == "max":
        np.maximum.at(found, frame, values)
        return found
    np.add.at(found, frame, values)
    if aggregate == "mean":
        found /= np.maximum(np.bincount(frame, minlength=count), 1)
    return found
