"""The likelihood of errors under ``a Sigma + diag(r)``, a and r of each box given as logarithms, with its slopes and information."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from boxcov.errors import BoxcovError, import_scipy

Array = NDArray[Any]
Loss = Literal["gaussian", "robust"]
_SHARE = 0.9  # of right pairs, that the robust loss takes at their full weight


@dataclass(frozen=True)
class Errors:
    """n errors with their epistemic covariances; a field whose error is NaN is left out of its box (marginalised).

    >>> one = Errors.of(np.array([[1.0, np.nan]]), np.eye(2)[None])
    >>> one.known.tolist(), one.dimensions.tolist()
    ([[True, False]], [1])
    """

    values: Array  # (n, D), 0 where unknown
    covariance: Array  # (n, D, D) Sigma
    known: Array  # (n, D)
    floor: Array  # (D,) variances that are there in any case

    @staticmethod
    def of(errors: Array, covariance: Array, floor: Array | float = 0.0) -> Errors:
        known = ~np.isnan(errors)
        return Errors(
            np.where(known, errors, 0.0),
            np.asarray(covariance, dtype=float),
            known,
            np.broadcast_to(floor, errors.shape[1]),
        )

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: Any) -> Errors:
        return replace(
            self, values=self.values[rows], covariance=self.covariance[rows], known=self.known[rows]
        )

    def field(self, f: int) -> Errors:
        """One field of them by itself."""
        at = slice(f, f + 1)
        return Errors(
            self.values[:, at], self.covariance[:, at, at], self.known[:, at], self.floor[at]
        )

    @property
    def dimensions(self) -> Array:
        """How many fields of each box are known (n,)."""
        count: Array = self.known.sum(1)
        return count


@dataclass(frozen=True)
class Local:
    """Of each box: its loss, and how that changes with the logarithms of a and of the D residual variances, in this order."""

    loss: Array  # (n,)
    slope: Array  # (n, 1 + D)
    information: Array  # (n, 1 + D, 1 + D) never negative: the mean of what Gaussian errors and what these errors say of the curvature
    curvature: Array  # (n, 1 + D, 1 + D) the second derivatives


def evaluate(errors: Errors, log_scale: Array, log_residual: Array, loss: Loss) -> Local:
    """The loss of each error under ``exp(log_scale) Sigma + diag(exp(log_residual) + floor)``; -inf stands for a part that is not there.

    >>> local = evaluate(Errors.of(np.array([[2.0]]), np.ones((1, 1, 1))), np.zeros(1), np.full((1, 1), -np.inf), "gaussian")
    >>> round(float(local.loss[0]), 4), local.slope.tolist()  # log(2 pi) / 2 + 2^2 / 2
    (2.9189, [[-1.5, 0.0]])
    >>> local.information[0, 0, 0].tolist(), local.curvature[0, 0, 0].tolist()
    (1.25, 2.0)
    """
    D = errors.values.shape[1]
    a, r = np.exp(log_scale), np.exp(log_residual) * errors.known  # (n,), (n, D)
    both = errors.known[:, :, None] & errors.known[:, None, :]
    S = a[:, None, None] * errors.covariance * both
    diagonal = np.arange(D)
    C = S.copy()
    C[:, diagonal, diagonal] += r + np.where(
        errors.known, errors.floor, 1.0
    )  # a 1 for what is unknown: no part in the determinant
    P = np.linalg.inv(C) * both
    sign, log_determinant = np.linalg.slogdet(C)
    u = np.einsum("nij,nj->ni", P, errors.values)
    q = np.einsum("ni,ni->n", u, errors.values)
    rho, weight, bend = penalty(q, errors.dimensions, loss)
    nll = 0.5 * (rho + log_determinant + errors.dimensions * np.log(2 * np.pi))
    nll = np.where((sign > 0) & (q >= 0) & np.isfinite(nll), nll, np.inf)
    PS = P @ S
    Su = np.einsum("nij,nj->ni", S, u)
    PSu = np.einsum("nij,nj->ni", P, Su)
    # derivatives of log det C, and of -q, by the logarithms of a and r
    grown = _join(np.trace(PS, axis1=1, axis2=2), r * P[:, diagonal, diagonal])
    fallen = _join(np.einsum("ni,ni->n", u, Su), r * u**2)
    information = _blocks(
        np.einsum("nij,nji->n", PS, PS),
        r * np.einsum("nij,nji->ni", PS, P),
        r[:, :, None] * P**2 * r[:, None, :],
    )
    ru = r * u
    turned = _blocks(np.einsum("ni,ni->n", Su, PSu), ru * PSu, ru[:, :, None] * P * ru[:, None, :])
    every = np.arange(1 + D)
    curvature = (
        weight[:, None, None] * 2 * turned
        - information
        + bend[:, None, None] * fallen[:, :, None] * fallen[:, None, :]
    )
    curvature[:, every, every] += grown - weight[:, None] * fallen
    average = 0.5 * (information + weight[:, None, None] * turned)
    return Local(nll, 0.5 * (grown - weight[:, None] * fallen), 0.5 * average, 0.5 * curvature)


def _join(of_scale: Array, of_residual: Array) -> Array:
    return np.concatenate([of_scale[:, None], of_residual], 1)


def _blocks(scale: Array, mixed: Array, residual: Array) -> Array:
    """(n, 1 + D, 1 + D) from its three distinct parts (n,), (n, D), (n, D, D)."""
    top = _join(scale, mixed)[:, None, :]
    return np.concatenate([top, np.concatenate([mixed[:, :, None], residual], 2)], 1)


def penalty(q: Array, dimensions: Array, loss: Loss) -> tuple[Array, Array, Array]:
    """What a squared Mahalanobis distance costs, its derivative (the weight of the box), and the derivative of that, (n,) each.

    Gaussian: the distance itself, at weight 1. Robust: Huber's estimator of scatter. Past the radius that 90 % of right pairs lie
    within the cost grows with the logarithm of the distance, so that a wrong pair counts no more than a box at that radius. All is then
    scaled so that errors which are Gaussian give the same covariance as under the Gaussian loss.

    >>> rho, weight, _ = penalty(np.array([1.0, 400.0]), np.array([1, 1]), "robust")
    >>> bool(weight[1] < 0.01 * weight[0])
    True
    """
    if loss == "gaussian":
        return q, np.ones_like(q), np.zeros_like(q)
    if loss != "robust":
        raise BoxcovError(f"loss must be one of {', '.join(get_args(Loss))}, got {loss!r}")
    radius, share = np.ones_like(q), np.ones_like(q)
    for d in np.unique(dimensions):
        if d:
            c = import_scipy("stats").chi2.ppf(_SHARE, int(d))
            radius[dimensions == d] = c
            share[dimensions == d] = (
                import_scipy("stats").chi2.cdf(c, int(d) + 2) + c * (1 - _SHARE) / d
            )  # E[weight q] / d where q is chi-squared
    beyond = np.maximum(q / radius, 1.0)
    weight = 1 / (beyond * share)
    return (
        np.minimum(q, radius) / share + radius * np.log(beyond) / share,
        weight,
        np.where(q > radius, -weight / np.maximum(q, radius), 0.0),
    )
