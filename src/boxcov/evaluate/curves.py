"""The paper's curves: u replaced by its quantile in a Gamma distribution fitted to all u, and the threshold swept over [0, 1]."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from boxcov.errors import BoxcovError
from boxcov.evaluate.quality import (
    ERRORS,
    IOU_THRESHOLD,
    METRICS,
    SHARES,
    accurate_iou,
    accurate_l2,
    checked,
    partition,
)
from boxcov.evaluate.special import incomplete_gamma, log_minus_digamma, trigamma

Array = NDArray[Any]


class Gamma(NamedTuple):
    """A Gamma distribution. A shape of infinity stands for one value only, the mean."""

    shape: float
    mean: float

    @property
    def scale(self) -> float:
        return self.mean / self.shape

    def quantile(self, uncertainty: Array) -> Array:
        """How much of the distribution (n,) lies below each u: 0 at u = 0, 1 at infinity. Where there is one value only it is at 0.5.

        >>> Gamma(shape=1.0, mean=2.0).quantile(np.array([0.0, 2.0])).round(4).tolist()
        [0.0, 0.6321]
        """
        u = np.asarray(uncertainty, dtype=float)
        if not np.isfinite(self.shape):
            return np.where(u == self.mean, 0.5, np.where(u < self.mean, 0.0, 1.0))
        return incomplete_gamma(self.shape, self.shape * (u / self.mean))


def fit_gamma(uncertainty: Array) -> Gamma:
    """The Gamma distribution under which the u (n,) are most likely; zeros and infinities are left out, for no Gamma allows them.

    All u equal (or one, or only zeros): a distribution of that one value. No u at all: NaN.

    >>> fit_gamma(np.array([1.0, 2.0, 3.0, 6.0])).shape.__round__(3)
    2.621
    >>> fit_gamma(np.array([0.3, 0.3]))
    Gamma(shape=inf, mean=0.3)
    """
    u = np.asarray(uncertainty, dtype=float)
    if np.isnan(u).any() or (u < 0).any():
        raise BoxcovError(
            f"a Gamma distribution needs uncertainties of 0 or more, got {np.nanmin(u)} as the least, {np.isnan(u).sum()} NaN"
        )
    positive = u[(u > 0) & np.isfinite(u)]
    if not len(positive):
        return Gamma(float("inf"), 0.0) if len(u) else Gamma(float("nan"), float("nan"))
    top = positive.max()
    if positive.min() == top:
        return Gamma(float("inf"), float(top))
    mean = float((positive / top).mean() * top)
    away = positive / mean - 1
    near = np.abs(away) < 0.5
    logs = np.where(near, np.log1p(np.where(near, away, 0)), np.log(positive) - np.log(mean))
    return Gamma(
        _shape(float((away - logs).mean())), mean
    )  # log of the mean minus mean of the logs, without their cancellation


def _shape(s: float) -> float:
    """The a with log a - digamma(a) = s, by Newton's method on 1 / a."""
    if s <= 0:
        return float("inf")
    a: float = (3 - s + ((s - 3) ** 2 + 24 * s) ** 0.5) / (12 * s)
    for _ in range(100):
        slope = 1 / a - float(trigamma(a))  # of log a - digamma(a): always negative
        following = 1 / (1 / a + (s - float(log_minus_digamma(a))) / (-slope * a**2))
        if not following > 0 or abs(following - a) <= 1e-14 * a:
            break
        a = following
    return a


def quantiles(uncertainty: Array) -> Array:
    """Each u (n,) as its quantile in the Gamma distribution fitted to all of them: all methods on one scale from 0 to 1.

    >>> quantiles(np.array([1.0, 2.0, 3.0, 6.0])).round(3).tolist()
    [0.1, 0.344, 0.582, 0.928]
    """
    u = np.asarray(uncertainty, dtype=float)
    return fit_gamma(u).quantile(u) if len(u) else np.zeros(0)


class Curves(NamedTuple):
    """The metrics over thresholds (T,): ``values["P(U|I)"]["IoU"]`` is (T,), NaN where there is nothing to divide by."""

    thresholds: Array
    values: dict[str, dict[str, Array]]


def curves(
    errors_iou: Array,
    errors_l2: Array,
    uncertainty: Array,
    points: int = 101,
    iou_threshold: float = IOU_THRESHOLD,
) -> Curves:
    """AvU, P(A|C), P(U|I), P(U) and P(A) at ``points`` thresholds from 0 to 1 on the quantile of u; uncertain from the threshold on.

    The arrays (n,) are those of ``quality``.

    >>> found = curves(np.array([0.8, 0.1]), np.array([0.2, 0.9]), np.array([1.0, 2.0]), points=3)
    >>> found.thresholds.tolist(), found.values["AvU"]["IoU"].tolist()
    ([0.0, 0.5, 1.0], [0.5, 1.0, 0.5])
    """
    place = quantiles(checked(errors_iou, errors_l2, uncertainty))
    paired = ~np.isnan(errors_l2)
    cases = {
        "IoU": (accurate_iou(errors_iou, iou_threshold), place),
        "l2": (accurate_l2(np.asarray(errors_l2)[paired]), place[paired]),
    }
    thresholds = np.linspace(0, 1, points)
    rows = {
        error: [partition(accurate, q >= t).metrics() for t in thresholds]
        for error, (accurate, q) in cases.items()
    }
    names = METRICS + SHARES
    return Curves(
        thresholds,
        {
            name: {error: np.array([row[name] for row in rows[error]]) for error in ERRORS}
            for name in names
        },
    )
