"""One number per box from its covariance, to use as u in tables, thresholds and alarms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from boxcov.errors import BoxcovError
from boxcov.evaluate.expected_iou import expected_iou, relative_covariance
from boxcov.evaluate.records import Records

Array = NDArray[Any]
ScalarUncertainty = Literal["trace", "expected-iou", "relative", "logdet", "score-variance"]
MIN_EIGENVALUE = 1e-6  # one millimetre, squared


def trace(covariance: Array) -> Array:
    """Return the trace (n,) of covariances (n, D, D): the paper's u. It adds up different units."""
    return np.trace(np.asarray(covariance, dtype=float), axis1=1, axis2=2)


def relative_trace(boxes: Array, covariance: Array, fields: Sequence[str]) -> Array:
    """Return the variances of position over squared size plus those of the log sizes (n,).

    The position is taken along and across the heading, in lengths and widths; for boxes
    x1 y1 x2 y2 it is the centre. Yaw and velocity are ignored. Infinite if a size is not positive.
    """
    sizes, C = relative_covariance(boxes, covariance, fields)
    if C.shape[1] == 4:  # edges: the centre is their mean, the size their difference
        J = np.array([[0.5, 0, 0.5, 0], [0, 0.5, 0, 0.5], [-1, 0, 1, 0], [0, -1, 0, 1]])
        C = J @ C @ J.T
    count = 2 * sizes.shape[1]
    found: Array = np.trace(C[:, :count, :count], axis1=1, axis2=2)
    return np.where((sizes > 0).all(1), found, np.where(np.isnan(sizes).any(1), np.nan, np.inf))


def log_determinant(covariance: Array, min_eigenvalue: float = MIN_EIGENVALUE) -> Array:
    """Return the log determinant (n,) of covariances (n, D, D), with a floor on the eigenvalues.

    The floor gives singular covariances a finite value.
    """
    if not min_eigenvalue > 0:
        raise BoxcovError(f"min_eigenvalue must be above 0, got {min_eigenvalue}")
    C = np.asarray(covariance, dtype=float)
    sound = np.isfinite(C).all((1, 2))
    values = np.linalg.eigvalsh((C + C.transpose(0, 2, 1))[sound] / 2)
    found = np.full(len(C), np.nan)
    found[sound] = np.log(np.maximum(values, min_eigenvalue)).sum(1)
    return found


def uncertainty_of(records: Records, kind: ScalarUncertainty = "trace") -> Array:
    """Return a scalar uncertainty (n,) by name, never negative; see ``Records.with_uncertainty``.

    "trace": the paper's u. "expected-iou": 1 - expected IoU. "relative": ``relative_trace``.
    "logdet": the D-th root of the determinant. "score-variance": variance of the score logit.

    >>> from boxcov.evaluate.matching import match
    >>> car, zero = np.array([[0.0, 0.0, 4.0, 4.0]]), np.zeros(1, int)
    >>> fields, u, covariance = ("x1", "y1", "x2", "y2"), np.ones(1), np.eye(4)[None] / 4
    >>> found = match(
    ...     car, np.ones(1), zero, zero, car, zero, zero, fields, ("car",), u, covariance
    ... )
    >>> {kind: uncertainty_of(found, kind).item() for kind in ("trace", "relative")}
    {'trace': 1.0, 'relative': 0.078125}
    """
    if kind not in get_args(ScalarUncertainty):
        raise BoxcovError(
            f"unknown uncertainty {kind!r}: choose from {', '.join(get_args(ScalarUncertainty))}"
        )
    if kind == "score-variance":
        if records.score_variance is None:
            raise BoxcovError(
                "these records have no variance of the score: predict with with_logit=True, "
                "or boxcov predict --with-logit"
            )
        return records.score_variance
    C = records.covariance
    if C is None:
        raise BoxcovError(f"these records have no covariance to compute {kind} from")
    if kind == "trace":
        return trace(C)
    if kind == "relative":
        return relative_trace(records.boxes, C, records.fields)
    if kind == "logdet":
        return np.exp(log_determinant(C) / len(records.fields))
    return 1 - expected_iou(records.boxes, C, records.fields)
