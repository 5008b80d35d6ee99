"""How well covariances describe errors: NLL, ENCE, coverage and ANEES under N(0, covariance).

``student_nll`` is the NLL of the error model, whose errors are not Gaussian. At the end: are its
probabilities and regions right as often as they say?
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log, pi
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from boxcov.errors import BoxcovError, import_package
from boxcov.evaluate.intervals import bootstrap
from boxcov.evaluate.quality import auroc_from_ranks, ranks

Array = NDArray[Any]
LEVELS = (0.5, 0.9, 0.95)
# An eigenvalue of a correlation matrix up to this counts as 0. A sample covariance of too few
# samples has eigenvalues of +-2e-7 in float32 that should be 0.
_ROUNDING, _ROUNDING_FLOAT32 = 1e-12, 5e-7


class GaussianFit(NamedTuple):
    """How well each error (n,) fits its covariance."""

    nll: Array  # negative log density in nats; inf if the covariance is singular
    nees: Array  # squared Mahalanobis distance; inf likewise
    dims: Array  # number of known fields, at least 1

    @property
    def probability(self) -> Array:
        """The probability mass (n,) of each Gaussian inside the ellipsoid through its error.

        Uniform on [0, 1] if the covariances are right.
        """
        return import_package("scipy.special").chdtr(self.dims, self.nees)


def gaussian_fit(errors: Array, covariance: Array) -> GaussianFit:
    """Evaluate each error (n, D) under its own covariance (n, D, D).

    Fields that are NaN are marginalised: the other fields are evaluated under their sub-matrix.
    Rows of NaN only (predictions without an object) are left out. A covariance is singular if a
    variance is not positive, an entry is not finite, or the smallest eigenvalue of the correlation
    matrix is at rounding level (1e-12; 5e-7 for float32 arrays). Its NLL and NEES are infinite, and
    no ellipsoid contains the error.
    """
    rounding = _ROUNDING_FLOAT32 if np.asarray(covariance).dtype == np.float32 else _ROUNDING
    errors, covariance = np.asarray(errors, dtype=float), np.asarray(covariance, dtype=float)
    expected = (*errors.shape, errors.shape[-1])
    if covariance.shape != expected:
        raise BoxcovError(
            f"covariance has shape {covariance.shape}, expected {expected} for the errors"
        )
    has_any = ~np.isnan(errors).all(1)
    errors, covariance = errors[has_any], covariance[has_any]
    known = ~np.isnan(errors)
    nll, nees = np.empty(len(errors)), np.empty(len(errors))
    for pattern in np.unique(known, axis=0):  # few patterns of known fields, many rows
        rows = (known == pattern).all(1)
        nll[rows], nees[rows] = _fit_complete(
            errors[np.ix_(rows, pattern)], covariance[np.ix_(rows, pattern, pattern)], rounding
        )
    return GaussianFit(nll, nees, known.sum(1))


def _fit_complete(errors: Array, covariance: Array, rounding: float) -> tuple[Array, Array]:
    """Return NLL and NEES (n,) of errors without NaN, from the correlation matrices."""
    d = errors.shape[1]
    variance = np.diagonal(covariance, axis1=1, axis2=2)
    sound: Array = np.all(np.isfinite(covariance), axis=(1, 2)) & np.all(variance > 0, axis=1)
    sound &= np.all(np.isfinite(errors), axis=1)
    sd = np.sqrt(np.where(sound[:, None], variance, 1))
    usable = np.where(sound[:, None, None], covariance, np.eye(d))
    correlation = usable / sd[:, :, None] / sd[:, None, :]
    values, vectors = np.linalg.eigh((correlation + correlation.transpose(0, 2, 1)) / 2)
    sound &= values[:, 0] > rounding
    values = np.where(sound[:, None], values, 1)
    rotated = np.einsum("nij,ni->nj", vectors, np.where(sound[:, None], errors, 0) / sd)
    nees = np.where(sound, (rotated**2 / values).sum(1), np.inf)
    nll = (nees + np.log(values).sum(1) + 2 * np.log(sd).sum(1) + d * log(2 * pi)) / 2
    return nll, nees


def coverage(fit: GaussianFit, levels: Sequence[float] | Array = LEVELS) -> Array:
    """Return the share (T,) of errors inside the ellipsoids of probability ``levels`` (T,).

    NaN without rows.
    """
    probability = fit.probability
    if not len(probability):
        return np.full(len(levels), np.nan)
    return (probability[:, None] <= np.asarray(levels)).mean(0)


def ence(errors: Array, variance: Array) -> float:
    """Return the expected normalised calibration error of errors (m,) with variances (m,).

    Rows are sorted by variance into ten bins of equal count; equal variances share a bin. ENCE is
    the mean over bins of |RMV - RMSE| / RMV, with RMV the root mean variance. Rows with a NaN are
    left out. 0 is right; NaN without rows; infinite if a bin of zero variance has an error.
    """
    known = ~(np.isnan(errors) | np.isnan(variance))
    errors, variance = errors[known], np.maximum(variance[known], 0)
    if not len(errors):
        return float("nan")
    number = _equal_bins(variance, 10)
    count = np.bincount(number)
    rmse = np.sqrt(np.bincount(number, weights=errors**2) / count)
    rmv = np.sqrt(np.bincount(number, weights=variance) / count)
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.where(rmse == rmv, 0, np.abs(rmv - rmse) / rmv).mean())


def student_nll(errors: Array, scale: Array, dof: Sequence[float]) -> float:
    """Return the mean NLL per box of errors (n, D) under Student-t distributions, in nats.

    The NLL of a box is the sum over its fields. Unknown errors and scales (n, D) are NaN and left
    out; NaN without rows.

    >>> round(student_nll(np.zeros((2, 1)), np.ones((2, 1)), [1.0]), 4)  # Cauchy: log(pi)
    1.1447
    """
    nll = -import_package("scipy.stats").t.logpdf(errors, np.asarray(dof, float), scale=scale)
    boxes = nll[~np.isnan(nll).all(1)]
    return float(np.nansum(boxes, 1).mean()) if len(boxes) else float("nan")


def covariance_metrics(errors: Array, covariance: Array) -> dict[str, Any]:
    """Return NLL, ENCE, coverage and ANEES of errors (n, D) under covariances (n, D, D).

    ANEES is the mean NEES per dimension: 1 is right, more is overconfident. Without rows all are
    NaN.
    """
    fit = gaussian_fit(errors, covariance)
    variance = np.diagonal(covariance, axis1=1, axis2=2)
    return {
        "rows": len(fit.nll),
        "singular": int(np.isinf(fit.nees).sum()),
        "NLL": float(fit.nll.mean()) if len(fit.nll) else float("nan"),
        "ENCE": ence(errors.reshape(-1), variance.reshape(-1)),
        "coverage": {str(level): float(inside) for level, inside in zip(LEVELS, coverage(fit))},
        "ANEES": float(fit.nees.sum()) / int(fit.dims.sum()) if len(fit.nll) else float("nan"),
    }


# probabilities and regions of the error model


def calibration_error(probability: Array, happened: Array, bins: int = 15) -> float:
    """Return the expected calibration error (ECE) over bins with equal numbers of boxes.

    Equal probabilities share a bin, so the order of the boxes does not matter. NaN without boxes.
    """
    if not len(probability):
        return float("nan")
    number = _equal_bins(probability, bins)
    gaps = np.bincount(number, weights=probability) - np.bincount(number, weights=happened)
    return round(float(np.abs(gaps).sum() / len(probability)), 12)


def _equal_bins(values: Array, bins: int) -> Array:
    """Return the bin (n,) of each value: bins of equal count, in which equal values are together.

    >>> _equal_bins(np.array([0.3, 0.1, 0.3, 0.2]), bins=2).tolist()
    [1, 0, 1, 0]
    """
    edges = np.sort(values)[[len(values) * k // bins for k in range(1, bins)]]
    raw = np.searchsorted(edges, values, side="right")
    return np.unique(raw, return_inverse=True)[1].reshape(-1)


def probability_metrics(
    probability: Array, happened: Array, baseline: Array, frame: Array
) -> dict[str, float]:
    """Return share, AUROC and ECE of a probability (n,), and the AUROC of a baseline (n,).

    "low" and "high" are the 95 % interval, over frames, of the difference of the two AUROCs. All
    are NaN without boxes.
    """
    own, other = ranks(probability), ranks(baseline)

    def gain(rows: Array) -> float:
        bad = happened[rows]
        return auroc_from_ranks(bad, own[rows]) - auroc_from_ranks(bad, other[rows])

    low, high = bootstrap(gain, frame)
    return {
        "share": float(np.mean(happened)) if len(happened) else float("nan"),
        "AUROC": auroc_from_ranks(happened, own),
        "baseline": auroc_from_ranks(happened, other),
        "low": float(low),
        "high": float(high),
        "ECE": calibration_error(probability, happened),
    }


def region_coverage(errors: Array, widths: Array) -> float:
    """Return the share of the errors (n, D) within half widths (n, D); unknown errors are NaN.

    >>> region_coverage(np.array([[0.5, -3.0], [np.nan, 1.0]]), np.full((2, 2), 1.0))
    0.6666666666666666
    """
    known = ~np.isnan(errors)
    return float((np.abs(errors) <= widths)[known].mean()) if known.any() else float("nan")
