"""The paper's metrics of uncertainty: AvU, P(A|C) and P(U|I), for the errors IoU and l2."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from boxcov.errors import BoxcovError

Array = NDArray[Any]
METRICS = ("AvU", "P(A|C)", "P(U|I)")  # the paper's
SHARES = (
    "P(U)",
    "P(A)",
)  # what the metrics are worth without any knowledge of the boxes: see chance.py
ERRORS = ("IoU", "l2")
IOU_THRESHOLD = 0.4


class Partition(NamedTuple):
    """How many predictions are accurate (A) or inaccurate (I), and certain (C) or uncertain (U)."""

    AC: int
    IC: int
    AU: int
    IU: int

    def metrics(self) -> dict[str, float]:
        """AvU, P(A|C), P(U|I), P(U) and P(A); NaN where there is nothing to divide by.

        >>> Partition(AC=6, IC=1, AU=2, IU=3).metrics()["P(U|I)"]
        0.75
        """
        AC, IC, AU, IU = self
        total = sum(self)
        return {
            "AvU": _share(AC + IU, total),
            "P(A|C)": _share(AC, AC + IC),
            "P(U|I)": _share(IU, IC + IU),
            "P(U)": _share(AU + IU, total),
            "P(A)": _share(AC + AU, total),
        }


def partition(accurate: Array, uncertain: Array) -> Partition:
    """The counts of the four kinds, from two masks (n,).

    >>> partition(np.array([True, True, False]), np.array([False, True, True]))
    Partition(AC=1, IC=0, AU=1, IU=1)
    """
    total, a, u = len(accurate), int(np.count_nonzero(accurate)), int(np.count_nonzero(uncertain))
    both = int(np.count_nonzero(np.logical_and(accurate, uncertain)))
    return Partition(AC=a - both, IC=total - a - u + both, AU=both, IU=u - both)


def quality(
    errors_iou: Array, errors_l2: Array, uncertainty: Array, iou_threshold: float = IOU_THRESHOLD
) -> dict[str, dict[str, float]]:
    """AvU, P(A|C), P(U|I), and the shares P(U) and P(A), for both errors, from plain arrays (n,).

    ``errors_iou`` is the IoU of each prediction with its object, 0 where it has none: accurate from ``iou_threshold`` on. ``errors_l2`` is
    the distance of the centres, NaN where there is no object: such rows are left out; accurate below the mean distance. Uncertain
    from the mean of ``uncertainty`` over all predictions on. NaN where a metric has nothing to divide by.

    >>> found = quality(np.array([0.8, 0.7, 0.1, 0.0]), np.array([0.2, 0.4, 0.9, np.nan]), np.array([1.0, 3.0, 2.0, 6.0]))
    >>> found["P(U|I)"]
    {'IoU': 0.5, 'l2': 0.0}
    >>> found["AvU"]["IoU"]
    0.5
    """
    parts = partitions(errors_iou, errors_l2, uncertainty, iou_threshold)
    by_error = {error: part.metrics() for error, part in parts.items()}
    return {
        metric: {error: by_error[error][metric] for error in ERRORS} for metric in METRICS + SHARES
    }


def partitions(
    errors_iou: Array, errors_l2: Array, uncertainty: Array, iou_threshold: float = IOU_THRESHOLD
) -> dict[str, Partition]:
    """The partition behind ``quality`` for each error.

    >>> partitions(np.array([0.8, 0.0]), np.array([0.2, np.nan]), np.array([1.0, 3.0]))["IoU"]
    Partition(AC=1, IC=0, AU=0, IU=1)
    """
    u = checked(errors_iou, errors_l2, uncertainty)
    uncertain = ~(u < mean_within(u))
    paired = ~np.isnan(errors_l2)
    return {
        "IoU": partition(accurate_iou(errors_iou, iou_threshold), uncertain),
        "l2": partition(accurate_l2(np.asarray(errors_l2)[paired]), uncertain[paired]),
    }


def accurate_iou(iou: Array, threshold: float = IOU_THRESHOLD) -> Array:
    """Which predictions (n,) overlap their object enough.

    >>> accurate_iou(np.array([0.4, 0.39])).tolist()
    [True, False]
    """
    accurate: Array = np.asarray(iou) >= threshold
    return accurate


def accurate_l2(distance: Array) -> Array:
    """Which paired predictions (n,) lie closer to their object than the mean of all of them.

    >>> accurate_l2(np.array([0.1, 0.1, 1.0])).tolist()
    [True, True, False]
    """
    accurate: Array = np.asarray(distance) < mean_within(distance)
    return accurate


def mean_within(values: Array) -> float:
    """The mean, never outside the values for its rounding: of equal values none is below it. NaN of none.

    >>> mean_within(np.full(3, 0.1)) == 0.1, float(np.mean(np.full(3, 0.1))) == 0.1
    (True, False)
    """
    if not len(values):
        return float("nan")
    with np.errstate(over="ignore"):
        return float(np.clip(np.mean(values), np.min(values), np.max(values)))


def checked(errors_iou: Array, errors_l2: Array, uncertainty: Array) -> Array:
    """The uncertainties as floats (n,), after a look at the shapes and at NaN.

    >>> checked(np.zeros(2), np.zeros(2), np.array([1, 2])).tolist()
    [1.0, 2.0]
    """
    u = np.asarray(uncertainty, dtype=float)
    if u.ndim != 1 or not np.shape(errors_iou) == np.shape(errors_l2) == u.shape:
        shapes = f"{np.shape(errors_iou)}, {np.shape(errors_l2)} and {u.shape}"
        raise BoxcovError(
            f"IoU, l2 and uncertainty must be of one length, one number a prediction; got shapes {shapes}"
        )
    if np.isnan(u).any():
        raise BoxcovError(
            f"{int(np.isnan(u).sum())} of {len(u)} uncertainties are NaN: leave those predictions out, or find out why"
        )
    if np.isnan(errors_iou).any():
        raise BoxcovError("an IoU is NaN: give 0 for a prediction without an object")
    return u


def _share(part: int, whole: int) -> float:
    return part / whole if whole else float("nan")
