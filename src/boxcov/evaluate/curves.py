"""The paper's curves: the metrics over a threshold on the quantile of u.

The quantile of u is taken in a Gamma distribution fitted to all u of a method, so that methods with
different scales of u share one axis from 0 to 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from boxcov.errors import BoxcovError, import_package
from boxcov.evaluate.quality import (
    ERRORS,
    IOU_THRESHOLD,
    METRICS,
    SHARES,
    accurate_iou,
    accurate_l2,
    check_arrays,
    partition,
)

Array = NDArray[Any]


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
    iou_threshold: float = IOU_THRESHOLD,
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
    u = check_arrays(errors_iou, errors_l2, uncertainty)
    quantile = quantiles(u) if by_quantile else u
    paired = ~np.isnan(errors_l2)
    cases = {
        "IoU": (accurate_iou(errors_iou, iou_threshold), quantile),
        "l2": (accurate_l2(np.asarray(errors_l2)[paired]), quantile[paired]),
    }
    thresholds = np.linspace(0, 1, points)
    rows = {
        error: [partition(accurate, q >= t).metrics() for t in thresholds]
        for error, (accurate, q) in cases.items()
    }
    values = {
        name: {error: np.array([row[name] for row in rows[error]]) for error in ERRORS}
        for name in METRICS + SHARES
    }
    return Curves(thresholds, values)
