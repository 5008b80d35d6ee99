"""Metrics of one number u per box, for the errors IoU and l2: AvU, P(A|C), P(U|I), AUROC, AUSE.

The first three, the paper's, need a threshold of u; AUROC and AUSE depend on its order alone. The
paper's curves show them over a threshold on the quantile of u, taken in a Gamma distribution fitted
to all u of a method, so that methods with different scales of u share one axis from 0 to 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from boxcov.errors import BoxcovError, import_package

Array = NDArray[Any]
METRICS = ("AvU", "P(A|C)", "P(U|I)")
SHARES = ("P(U)", "P(A)")  # chance levels of P(U|I) and P(A|C)
ERRORS = ("IoU", "l2")
IOU_THRESHOLD = 0.4


class Partition(NamedTuple):
    """Counts of accurate (A) or inaccurate (I) and certain (C) or uncertain (U) predictions."""

    AC: int
    IC: int
    AU: int
    IU: int

    def metrics(self) -> dict[str, float]:
        """Return AvU, P(A|C), P(U|I), P(U) and P(A); NaN where the denominator is 0.

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
    """Count the four combinations of two masks (n,).

    >>> partition(np.array([True, True, False]), np.array([False, True, True]))
    Partition(AC=1, IC=0, AU=1, IU=1)
    """
    total, a, u = len(accurate), int(np.count_nonzero(accurate)), int(np.count_nonzero(uncertain))
    both = int(np.count_nonzero(np.logical_and(accurate, uncertain)))
    return Partition(AC=a - both, IC=total - a - u + both, AU=both, IU=u - both)


def quality(errors_iou: Array, errors_l2: Array, uncertainty: Array) -> dict[str, dict[str, float]]:
    """Return AvU, P(A|C), P(U|I) and the shares P(U) and P(A) for both errors.

    errors_iou: (n,) IoU of each prediction with its object, 0 without an object. A prediction is
        accurate if its IoU is at least 0.4.
    errors_l2: (n,) distance between the centres, NaN without an object. Only predictions with an
        object count; they are accurate if the distance is below the mean distance.
    uncertainty: (n,) a prediction is certain if its value is below the mean over all predictions.

    A metric is NaN where its denominator is 0.

    >>> iou, l2 = np.array([0.8, 0.7, 0.1, 0.0]), np.array([0.2, 0.4, 0.9, np.nan])
    >>> found = quality(iou, l2, uncertainty=np.array([1.0, 3.0, 2.0, 6.0]))
    >>> found["P(U|I)"]
    {'IoU': 0.5, 'l2': 0.0}
    """
    parts = partitions(errors_iou, errors_l2, uncertainty)
    by_error = {error: part.metrics() for error, part in parts.items()}
    return {
        metric: {error: by_error[error][metric] for error in ERRORS} for metric in METRICS + SHARES
    }


def partitions(errors_iou: Array, errors_l2: Array, uncertainty: Array) -> dict[str, Partition]:
    """Return the partition behind ``quality`` for each error."""
    iou, l2, u = _check_arrays(errors_iou, errors_l2, uncertainty)
    cases = _cases(iou, l2, ~(u < clipped_mean(u)))
    return {error: partition(accurate, uncertain) for error, (accurate, uncertain) in cases.items()}


def _cases(iou: Array, l2: Array, values: Array) -> dict[str, tuple[Array, Array]]:
    """Return which boxes are accurate, and their values, for each error; for l2 the paired ones."""
    paired = ~np.isnan(l2)
    return {"IoU": (accurate_iou(iou), values), "l2": (accurate_l2(l2[paired]), values[paired])}


def accurate_iou(iou: Array) -> Array:
    """Return which predictions (n,) have an IoU of at least 0.4."""
    return np.asarray(iou) >= IOU_THRESHOLD


def accurate_l2(distance: Array) -> Array:
    """Return which predictions (n,) are closer to their object than the mean distance."""
    return np.asarray(distance) < clipped_mean(distance)


def clipped_mean(values: Array) -> float:
    """Return the mean, clipped to the range of the values; NaN for an empty array.

    Rounding can put the mean of equal values above them, and then all would be below their mean.

    >>> clipped_mean(np.full(3, 0.1)) == 0.1, float(np.mean(np.full(3, 0.1))) == 0.1
    (True, False)
    """
    if not len(values):
        return float("nan")
    with np.errstate(over="ignore"):
        return float(np.clip(np.mean(values), np.min(values), np.max(values)))


def _check_arrays(
    errors_iou: Array, errors_l2: Array, uncertainty: Array
) -> tuple[Array, Array, Array]:
    """Check shapes and NaN, and return the three as floats (n,); tensors are accepted, too."""
    given = (errors_iou, errors_l2, uncertainty)
    iou, l2, u = (np.asarray(values, dtype=float) for values in given)
    if u.ndim != 1 or not iou.shape == l2.shape == u.shape:
        shapes = f"{iou.shape}, {l2.shape} and {u.shape}"
        raise BoxcovError(
            f"IoU, l2 and uncertainty must have the same length (n,), got shapes {shapes}"
        )
    _check_known(u, "uncertainties")
    if np.isnan(iou).any():
        raise BoxcovError("an IoU is NaN: pass 0 for a prediction without an object")
    return iou, l2, u


def _check_known(values: Array, what: str) -> None:
    if np.isnan(values).any():
        raise BoxcovError(
            f"{int(np.isnan(values).sum())} of {len(values)} {what} are NaN: "
            "remove those predictions"
        )


def _share(part: int, whole: int) -> float:
    return part / whole if whole else float("nan")


# without a threshold


def ranks(values: Array) -> Array:
    """Return the rank (n,) of each value among the distinct values, from 0; equal ones share it."""
    values = np.asarray(values, dtype=float)
    _check_known(values, "values to rank")
    return np.unique(values, return_inverse=True)[1].reshape(-1)


def auroc(bad: Array, u: Array) -> float:
    """Return the probability that u is larger for a bad box than for a good one.

    A tie counts one half. NaN if all boxes are bad or none is.

    >>> auroc(np.array([True, False, True, False]), np.array([0.9, 0.1, 0.4, 0.4]))
    0.875
    """
    return auroc_from_ranks(bad, ranks(u))


def auroc_from_ranks(bad: Array, u_ranks: Array) -> float:
    """Return the AUROC given ``ranks`` of u (n,); the ranks may come from a larger array."""
    bad = np.asarray(bad, dtype=bool)
    size = int(u_ranks.max(initial=0)) + 1
    bads = np.bincount(u_ranks[bad], minlength=size)
    goods = np.bincount(u_ranks[~bad], minlength=size)
    pairs = float(bads.sum()) * float(goods.sum())
    return float((bads * (np.cumsum(goods) - goods / 2)).sum()) / pairs if pairs else float("nan")


def ause(error: Array, u: Array) -> float:
    """Return the area between the sparsification curves of u and of the error, over the mean error.

    A sparsification curve is the mean error of the k boxes with the smallest values, for k = n to
    1. Boxes with equal u count with their mean error, so the order of the rows does not matter. 0
    means a perfect order; NaN without boxes; 0 if all errors are 0.
    """
    return ause_from_ranks(error, ranks(u), ranks(error))


def ause_from_ranks(error: Array, u_ranks: Array, error_ranks: Array) -> float:
    """Return the AUSE given errors (n,) and ``ranks`` of u and of the errors."""
    if not len(error):
        return float("nan")
    scale = float(np.mean(error))
    area = float(np.mean(_sparsification(error, u_ranks) - _sparsification(error, error_ranks)))
    return area / scale if scale > 0 else 0.0


def _sparsification(error: Array, value_ranks: Array) -> Array:
    """Return the mean error (n,) of the 1, 2, ..., n boxes of lowest rank, averaged over ties."""
    count = np.bincount(value_ranks)
    total = np.bincount(value_ranks, weights=error)
    mean = total / np.maximum(count, 1)
    return np.cumsum(np.repeat(mean, count)) / np.arange(1, len(error) + 1)


# curves over a threshold


def quantiles(uncertainty: Array) -> Array:
    """Return each u (n,) as its quantile in the Gamma distribution fitted to all of them.

    The fit is the most likely one, without zeros and infinities. If the other values are equal,
    their quantile is 0.5.
    """
    u = np.asarray(uncertainty, dtype=float)
    if np.isnan(u).any() or (u < 0).any():
        raise BoxcovError(
            "a Gamma distribution needs uncertainties of 0 or more, got a minimum of "
            f"{np.nanmin(u)} and {np.isnan(u).sum()} NaN"
        )
    top = u[np.isfinite(u)].max(initial=0)
    u = u / (top or 1)  # so that sums do not overflow
    positive = u[(u > 0) & np.isfinite(u)]
    spread = np.ptp(positive) if len(positive) else 0
    if not spread:
        value = float(top > 0)  # 1 after the division, or 0
        return np.where(u == value, 0.5, u > value)
    gamma = import_package("scipy.stats").gamma
    if spread > 1e-4:
        shape, _, scale = gamma.fit(positive, floc=0)
    else:  # the likelihood cancels, and the moments give the same fit
        scale = positive.var() / positive.mean()
        shape = positive.mean() / scale
    return gamma.cdf(u, shape, scale=scale)


class Curves(NamedTuple):
    """The metrics over thresholds (T,): ``values["P(U|I)"]["IoU"]`` is (T,)."""

    thresholds: Array
    values: dict[str, dict[str, Array]]


def curves(
    errors_iou: Array,
    errors_l2: Array,
    uncertainty: Array,
    *,
    points: int = 101,
    by_quantile: bool = True,
) -> Curves:
    """Return AvU, P(A|C), P(U|I), P(U) and P(A) at ``points`` thresholds from 0 to 1.

    A prediction is uncertain if the quantile of its u is at least the threshold. The arrays (n,)
    are those of ``quality``; a metric is NaN where its denominator is 0. by_quantile: False for a u
    that is a probability, such as the risk, which is then compared with the threshold itself.

    >>> iou, l2, u = np.array([0.8, 0.1]), np.array([0.2, 0.9]), np.array([1.0, 2.0])
    >>> found = curves(iou, l2, u, points=3)
    >>> found.thresholds.tolist(), found.values["AvU"]["IoU"].tolist()
    ([0.0, 0.5, 1.0], [0.5, 1.0, 0.5])
    """
    iou, l2, u = _check_arrays(errors_iou, errors_l2, uncertainty)
    thresholds = np.linspace(0, 1, points)
    rows = {
        error: [partition(accurate, q >= t).metrics() for t in thresholds]
        for error, (accurate, q) in _cases(iou, l2, quantiles(u) if by_quantile else u).items()
    }
    values = {
        name: {error: np.array([row[name] for row in rows[error]]) for error in ERRORS}
        for name in METRICS + SHARES
    }
    return Curves(thresholds, values)
