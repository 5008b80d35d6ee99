"""Are the covariances right? NLL, ENCE, coverage and ANEES of errors under N(0, covariance)."""

from __future__ import annotations

from collections.abc import Sequence
from math import log, pi
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from boxcov.errors import BoxcovError
from boxcov.evaluate.special import chi_square, chi_square_quantile

Array = NDArray[Any]
LEVELS = (0.5, 0.9, 0.95)
# up to here an eigenvalue of a correlation matrix is rounding; a float32 sample covariance of too few samples has +-2e-7 for 0
_ROUNDING, _ROUNDING_SINGLE = 1e-12, 5e-7


class Fit(NamedTuple):
    """Row by row (n,): how well an error fits its covariance."""

    nll: Array  # negative log density, nats; inf where the covariance is singular, NaN where no field is known
    nees: Array  # squared Mahalanobis distance; inf and NaN alike
    dims: Array  # how many fields were known

    @property
    def probability(self) -> Array:
        """How much of its Gaussian (n,) lies nearer than the error: uniform on [0, 1] if the covariances are right."""
        found = np.full(self.nees.shape, np.nan)
        for d in np.unique(self.dims[self.dims > 0]):
            rows = self.dims == d
            found[rows] = chi_square(self.nees[rows], float(d))
        return found

    @property
    def known(self) -> Fit:
        """The rows with at least one known field."""
        rows = self.dims > 0
        return Fit(self.nll[rows], self.nees[rows], self.dims[rows])


def fit_of(errors: Array, covariance: Array) -> Fit:
    """Each error (n, D) under its own covariance (n, D, D). Fields that are NaN are left out of the row: the rest has the sub-covariance.

    A covariance counts as singular where a variance is not positive, a number not finite, or the least eigenvalue of the correlation matrix
    no more than rounding: 1e-12, for arrays in float32 5e-7. Its row has NLL and NEES of infinity, and lies in no ellipsoid.

    >>> fit = fit_of(np.array([[1.0, 2.0], [1.0, np.nan]]), np.array([np.diag([1.0, 4.0]), np.diag([1.0, 4.0])]))
    >>> fit.nees.tolist(), fit.dims.tolist()
    ([2.0, 1.0], [2, 1])
    """
    rounding = _ROUNDING_SINGLE if np.asarray(covariance).dtype == np.float32 else _ROUNDING
    errors, covariance = np.asarray(errors, dtype=float), np.asarray(covariance, dtype=float)
    if covariance.shape != (*errors.shape, errors.shape[-1]):
        raise BoxcovError(
            f"covariance has shape {covariance.shape}, expected {(*errors.shape, errors.shape[-1])} for the errors"
        )
    known = ~np.isnan(errors)
    nll, nees = np.full(len(errors), np.nan), np.full(len(errors), np.nan)
    for pattern in np.unique(
        known, axis=0
    ):  # the few ways in which fields are unknown, not the many rows
        if pattern.any():
            rows = (known == pattern).all(1)
            nll[rows], nees[rows] = _whole(
                errors[np.ix_(rows, pattern)], covariance[np.ix_(rows, pattern, pattern)], rounding
            )
    return Fit(nll, nees, known.sum(1))


def _whole(errors: Array, covariance: Array, rounding: float) -> tuple[Array, Array]:
    """NLL and NEES (n,) without unknown fields; scaled to unit variances first, so that metres and radians are alike."""
    d = errors.shape[1]
    variance = np.diagonal(covariance, axis1=1, axis2=2)
    sound: Array = (
        np.all(np.isfinite(covariance), axis=(1, 2))
        & np.all(variance > 0, axis=1)
        & np.all(np.isfinite(errors), axis=1)
    )
    sd = np.sqrt(np.where(sound[:, None], variance, 1))
    correlation = (
        np.where(sound[:, None, None], covariance, np.eye(d)) / sd[:, :, None] / sd[:, None, :]
    )
    values, vectors = np.linalg.eigh((correlation + correlation.transpose(0, 2, 1)) / 2)
    sound &= values[:, 0] > rounding
    values = np.where(sound[:, None], values, 1)
    away = np.einsum("nij,ni->nj", vectors, np.where(sound[:, None], errors, 0) / sd)
    nees = np.where(sound, (away**2 / values).sum(1), np.inf)
    nll = (nees + np.log(values).sum(1) + 2 * np.log(sd).sum(1) + d * log(2 * pi)) / 2
    return nll, nees


def anees(fit: Fit, level: float = 0.95) -> tuple[float, float, float]:
    """The average NEES per dimension, and the interval that holds it with probability ``level`` if all covariances are right.

    1 is right, more is overconfident. It is the sum of the NEES over the sum of the dimensions, so the interval is a chi-square's. NaN without rows.

    >>> value, low, high = anees(Fit(np.zeros(50), np.full(50, 2.0), np.full(50, 2)))
    >>> value, round(low, 3), round(high, 3)
    (1.0, 0.742, 1.296)
    """
    fit = fit.known
    total = int(fit.dims.sum())
    if not total:
        return float("nan"), float("nan"), float("nan")
    low, high = (chi_square_quantile(p, total) / total for p in ((1 - level) / 2, (1 + level) / 2))
    return float(fit.nees.sum()) / total, low, high


def reliability(fit: Fit, levels: Sequence[float] | Array = LEVELS) -> Array:
    """Observed coverage (T,): the share of errors inside the ellipsoid that should hold ``levels`` (T,) of them. NaN without rows.

    >>> reliability(Fit(np.zeros(4), np.array([0.1, 1.0, 3.0, np.inf]), np.full(4, 2)), [0.5, 0.9]).tolist()
    [0.5, 0.75]
    """
    probability = np.sort(fit.known.probability)
    if not len(probability):
        return np.full(len(levels), np.nan)
    inside: Array = np.searchsorted(probability, np.asarray(levels), side="right") / len(
        probability
    )
    return inside


def ence(errors: Array, variance: Array, bins: int = 10) -> float:
    """The expected normalised calibration error of plain numbers (m,): errors and their predicted variances. 0 is right.

    Sorted by variance into ``bins`` of equal count (equal variances stay together), the mean over bins of |RMV - RMSE| / RMV, with RMV the root
    of the mean variance. Rows with a NaN are left out; NaN without rows; infinite where a bin of zero variance has an error.

    >>> ence(np.array([1.0, -1.0, 3.0, -3.0]), np.array([1.0, 1.0, 4.0, 4.0]), bins=2)
    0.25
    """
    known = ~(np.isnan(errors) | np.isnan(variance))
    errors, variance = errors[known], np.maximum(variance[known], 0)
    if not len(errors):
        return float("nan")
    edges = np.sort(variance)[[len(variance) * k // bins for k in range(1, bins)]]
    number = np.unique(np.searchsorted(edges, variance, side="right"), return_inverse=True)[
        1
    ].reshape(-1)
    count = np.bincount(number)
    rmse, rmv = (
        np.sqrt(np.bincount(number, weights=value) / count) for value in (errors**2, variance)
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.where(rmse == rmv, 0, np.abs(rmv - rmse) / rmv).mean())


def ence_by_field(
    errors: Array, covariance: Array, fields: Sequence[str], bins: int = 10
) -> dict[str, float]:
    """ENCE of each field of errors (n, D) under covariances (n, D, D), and of all of them as one sample under the name "pooled".

    >>> ence_by_field(np.array([[1.0, 2.0], [-1.0, -2.0]]), np.stack([np.eye(2)] * 2), ("x", "y"))
    {'x': 0.0, 'y': 1.0, 'pooled': 0.5811388300841898}
    """
    variance = np.diagonal(covariance, axis1=1, axis2=2)
    by_field = {name: ence(errors[:, i], variance[:, i], bins) for i, name in enumerate(fields)}
    return by_field | {"pooled": ence(errors.reshape(-1), variance.reshape(-1), bins)}


def gaussian(errors: Array, covariance: Array, fields: Sequence[str]) -> dict[str, Any]:
    """All of the above for errors (n, D) and covariances (n, D, D); rows of NaN alone, predictions without an object, do not count.

    >>> found = gaussian(np.array([[1.0], [-1.0], [np.nan]]), np.ones((3, 1, 1)), ("x",))
    >>> found["rows"], found["ANEES"], found["ENCE"], found["coverage"]["0.5"]
    (2, 1.0, 0.0, 0.0)
    """
    fit = fit_of(errors, covariance).known
    by_field = ence_by_field(errors, covariance, fields)
    value, low, high = anees(fit)
    return {
        "rows": len(fit.nll),
        "singular": int(np.isinf(fit.nees).sum()),
        "NLL": float(fit.nll.mean()) if len(fit.nll) else float("nan"),
        "ENCE": by_field.pop("pooled"),
        "ENCE by field": by_field,
        "coverage": {str(level): float(inside) for level, inside in zip(LEVELS, reliability(fit))},
        "ANEES": value,
        "ANEES low": low,
        "ANEES high": high,
    }
