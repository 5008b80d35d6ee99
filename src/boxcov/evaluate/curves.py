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


class Gamma(NamedTuple):
    """A Gamma distribution; an infinite shape means a point mass at the mean."""

    shape: float
    mean: float

    @property
    def scale(self) -> float:
        return self.mean / self.shape

    def quantile(self, uncertainty: Array) -> Array:
        """Return the share (n,) of the distribution below each u; 0.5 at a point mass."""
        u = np.asarray(uncertainty, dtype=float)
        if not np.isfinite(self.shape):
            return np.where(u == self.mean, 0.5, np.where(u < self.mean, 0.0, 1.0))
        return import_package("scipy.special").gammainc(self.shape, self.shape * (u / self.mean))


def fit_gamma(uncertainty: Array) -> Gamma:
    """Return the maximum-likelihood Gamma distribution of u (n,), without zeros and infinities.

    Equal values of u give a point mass; no values at all give NaN.
    """
    u = np.asarray(uncertainty, dtype=float)
    if np.isnan(u).any() or (u < 0).any():
        raise BoxcovError(
            "a Gamma distribution needs uncertainties of 0 or more, got a minimum of "
            f"{np.nanmin(u)} and {np.isnan(u).sum()} NaN"
        )
    positive = u[(u > 0) & np.isfinite(u)]
    if not len(positive):
        return Gamma(float("inf"), 0.0) if len(u) else Gamma(float("nan"), float("nan"))
    top = positive.max()
    if positive.min() == top:
        return Gamma(float("inf"), float(top))
    mean = float((positive / top).mean() * top)
    # log of the mean minus mean of the logs, computed without cancellation
    relative = positive / mean - 1
    near = np.abs(relative) < 0.5
    logs = np.where(near, np.log1p(np.where(near, relative, 0)), np.log(positive) - np.log(mean))
    return Gamma(_gamma_shape(float((relative - logs).mean())), mean)


def _gamma_shape(s: float) -> float:
    """Solve log(a) - digamma(a) = s for a."""
    if s <= 0:
        return float("inf")
    digamma = import_package("scipy.special").digamma

    def excess(log_a: float) -> float:
        a = float(np.exp(log_a))
        if a > 1e4:  # the difference cancels: use its asymptotic series
            return 1 / (2 * a) + 1 / (12 * a**2) - s
        return log_a - float(digamma(a)) - s

    # 1 / (2 a) < log(a) - digamma(a) < 1 / a brackets the solution
    low, high = -np.log(2 * s), -np.log(s)
    margin = 1e-9 * (1 + abs(high))
    brentq = import_package("scipy.optimize").brentq
    return float(np.exp(brentq(excess, low - margin, high + margin, xtol=1e-14)))


def quantiles(uncertainty: Array) -> Array:
    """Return each u (n,) as its quantile in the Gamma distribution fitted to all of them."""
    u = np.asarray(uncertainty, dtype=float)
    return fit_gamma(u).quantile(u) if len(u) else np.zeros(0)


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
