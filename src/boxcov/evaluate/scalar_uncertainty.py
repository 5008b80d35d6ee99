"""One number a box from its covariance: what a table, a threshold or an alarm can use as u, each for ``Records.with_uncertainty``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from boxcov.errors import BoxcovError
from boxcov.evaluate.expected_iou import expected_iou, relative
from boxcov.evaluate.records import Records

__all__ = [
    "FLOOR",
    "Summary",
    "expected_iou",
    "log_determinant",
    "relative_trace",
    "trace",
    "uncertainty_of",
]

Array = NDArray[Any]
Summary = Literal["trace", "expected-iou", "relative", "logdet", "score-variance"]
FLOOR = 1e-6  # of an eigenvalue: a millimetre, squared


def trace(covariance: Array) -> Array:
    """The sum of the variances (n,) of covariances (n, D, D): the paper's u. Metres, radians and metres a second are added up as they are.

    >>> trace(np.eye(3)[None]).tolist()
    [3.0]
    """
    found: Array = np.trace(np.asarray(covariance, dtype=float), axis1=1, axis2=2)
    return found


def relative_trace(boxes: Array, covariance: Array, fields: Sequence[str]) -> Array:
    """The variances of position over size squared, plus those of the logarithms of the sizes (n,): no unit is left.

    The position is taken along and across the heading, in lengths and widths; for boxes x1 y1 x2 y2 it is the centre. Yaw and velocity play no part.
    Infinite where a size is not positive.

    >>> car = np.array([[10.0, 5.0, 2.0, 4.0, 0.0]])
    >>> relative_trace(car, np.diag([4.0, 1.0, 0.04, 0.16, 1.0])[None], ("x", "y", "w", "l", "yaw")).round(6).tolist()  # 1/4 + 1/4 + 2/100
    [0.52]
    """
    sizes, C = relative(boxes, covariance, fields)
    if C.shape[1] == 4:  # edges: the centre is the mean of two, the size their difference
        J = np.array([[0.5, 0, 0.5, 0], [0, 0.5, 0, 0.5], [-1, 0, 1, 0], [0, -1, 0, 1]])
        C = J @ C @ J.T
    part = 2 * sizes.shape[1]
    found: Array = np.trace(C[:, :part, :part], axis1=1, axis2=2)
    return np.where((sizes > 0).all(1), found, np.where(np.isnan(sizes).any(1), np.nan, np.inf))


def log_determinant(
    covariance: Array,
    fields: Sequence[str],
    block: Sequence[str] | None = None,
    floor: float = FLOOR,
) -> Array:
    """The logarithm of the determinant (n,) of the ``block`` of fields of covariances (n, D, D), of all fields unless given.

    Eigenvalues below ``floor`` count as ``floor``, so that a singular covariance has a number, too.

    >>> log_determinant(np.diag([1.0, np.e, 0.0])[None], ("x", "y", "z"), block=("x", "y")).round(6).tolist()
    [1.0]
    """
    fields, covariance = tuple(fields), np.asarray(covariance, dtype=float)
    names = fields if block is None else tuple(block)
    unknown = [name for name in names if name not in fields]
    if unknown or not names:
        raise BoxcovError(
            f"no field {', '.join(unknown) or 'at all'} to take the determinant of: the boxes have {', '.join(fields)}"
        )
    if not floor > 0:
        raise BoxcovError(f"floor must be above 0, got {floor}")
    at = [fields.index(name) for name in names]
    C = covariance[:, at][:, :, at]
    sound = np.isfinite(C).all((1, 2))
    values = np.linalg.eigvalsh((C + C.transpose(0, 2, 1))[sound] / 2)
    found = np.full(len(C), np.nan)
    found[sound] = np.log(np.maximum(values, floor)).sum(1)
    return found


def uncertainty_of(records: Records, summary: Summary = "trace") -> Array:
    """u (n,) by name, never negative: for a table, or for ``records.with_uncertainty``.

    "expected-iou" is 1 - the expected IoU; "relative" the ``relative_trace``; "logdet" the root of the determinant of all fields, as a mean
    variance (its logarithm may be negative, its order is the same); "score-variance" that of the score's logit.

    >>> from boxcov.evaluate.matching import match
    >>> car, one = np.array([[0.0, 0.0, 4.0, 4.0]]), np.zeros(1, int)
    >>> found = match(car, np.ones(1), one, one, car, one, one, ("x1", "y1", "x2", "y2"), ("car",), np.ones(1), np.eye(4)[None] / 4)
    >>> {name: round(float(uncertainty_of(found, name)[0]), 3) for name in ("trace", "relative", "logdet")}
    {'trace': 1.0, 'relative': 0.078, 'logdet': 0.25}
    """
    if summary not in get_args(Summary):
        raise BoxcovError(
            f"no summary {summary!r} of a covariance: there are {', '.join(get_args(Summary))}"
        )
    if summary == "score-variance":
        if records.score_variance is None:
            raise BoxcovError(
                "these records have no variance of the score: make the detections with score=True, or boxcov predict --score"
            )
        return records.score_variance
    C = records.covariance
    if C is None:
        raise BoxcovError(f"these records have no covariance to take {summary} from")
    if summary == "trace":
        return trace(C)
    if summary == "relative":
        return relative_trace(records.boxes, C, records.fields)
    if summary == "logdet":
        root: Array = np.exp(log_determinant(C, records.fields) / len(records.fields))
        return root
    return 1 - expected_iou(records.boxes, C, records.fields)
