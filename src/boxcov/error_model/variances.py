"""The model behind a calibration: ``a Sigma + diag(r)`` with log a and log r linear in class and features, and its optimum on some errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcov.error_model.likelihood import Errors, Local, Loss, evaluate
from boxcov.error_model.newton import minimise
from boxcov.evaluate.records import Records
from boxcov.posterior.calibration import (
    VARIANCE,
    Calibration,
    Feature,
    Kind,
    features,
    features_of,
    variance_features,
)

Array = NDArray[Any]
Strength = float | Array  # of the penalty: one for all, or one a field (D,)
LITTLE = 1e-3  # of a field's root mean square error: no box is known better than that, whatever a class that never errs may say
NOTHING = 1e-6  # of the scale that would explain all errors: below, a is 0
# how the residual must change with a feature: never up with the score, never down with the range or a variance
_SIGNS: dict[Feature, tuple[float, float]] = {"score": (-np.inf, 0.0), "range": (0.0, np.inf)}
_SIGN_OF_VARIANCE = (0.0, np.inf)


@dataclass(frozen=True)
class VarianceModel:
    """``log a = Z alpha`` and ``log r_f = X beta_f``; the unknowns theta are alpha, then beta field by field.

    >>> n = np.ones(50)
    >>> records = Records(
    ...     fields=("x",), classes=("car",), boxes=3 * n[:, None], uncertainty=n, scores=n, labels=np.zeros(50, int), frame=np.zeros(50, int),
    ...     truth=0 * n[:, None], iou=n, l2=n, covariance=n[:, None, None],
    ... )
    >>> model = VarianceModel.of(records, "scale", "gaussian")
    >>> theta = model.fitted(strength=1.0)
    >>> np.exp(model.Z @ theta)[0].round(4)  # the square of the error
    np.float64(9.0)
    """

    kind: Kind
    loss: Loss
    fields: tuple[str, ...]
    classes: tuple[str, ...]
    errors: Errors
    Z: Array  # (n, 1 + C): 1, a column a class; fewer where a is the same for all, or 0
    X: Array  # (n, 1 + C + P): 1, a column a class, features standardised; none where r = 0
    features: tuple[Feature, ...]
    centre: Array  # (P,)
    spread: Array  # (P,)
    limits: Array  # (P, 2)
    told: tuple[
        bool, ...
    ] = ()  # (D,) which fields' residuals may depend on variances; all where empty

    @staticmethod
    def of(
        paired: Records, kind: Kind, loss: Loss, names: Sequence[Feature] | None = None
    ) -> VarianceModel:
        """The model of this kind for the errors of paired boxes, with these features or all that such boxes have."""
        assert paired.covariance is not None
        n = len(paired)
        classes = np.concatenate([np.ones((n, 1)), np.eye(len(paired.classes))[paired.labels]], 1)
        names = (
            tuple(features_of(paired.fields) if names is None else names)
            if kind in ("residual", "score", "product")
            else ()
        )
        names += variance_features(paired.fields) if kind == "product" else ()
        values = (
            paired.boxes.astype(float),
            paired.scores.astype(float),
            np.asarray(paired.covariance, dtype=float),
        )
        seen = features(names, paired.fields, *values) if names else np.zeros((n, 0))
        centre, spread = seen.mean(0), np.maximum(seen.std(0), 1e-6)
        errors = paired.errors.astype(float)
        floor = 0.0 if kind == "scale" else LITTLE**2 * _mean_square(errors)
        return VarianceModel(
            kind=kind,
            loss=loss,
            fields=paired.fields,
            classes=paired.classes,
            errors=Errors.of(errors, paired.covariance, floor),
            Z=classes[:, : {"score": 0, "product": 0, "residual": 1}.get(kind)],
            X=classes[:, :0]
            if kind == "scale"
            else np.concatenate([classes, (seen - centre) / spread], 1),
            features=names,
            centre=centre,
            spread=spread,
            limits=np.stack([seen.min(0), seen.max(0)], 1),
        )

    def __getitem__(self, rows: Any) -> VarianceModel:
        return replace(self, errors=self.errors[rows], Z=self.Z[rows], X=self.X[rows])

    def beside(self, seen: VarianceModel) -> VarianceModel:
        """The same boxes with features no further out than those of ``seen``, as a calibration takes boxes beyond what its fit has seen."""
        return (
            replace(self, X=np.clip(self.X, seen.X.min(0), seen.X.max(0))) if seen.X.size else self
        )

    def field(self, f: int, told: bool) -> VarianceModel:
        """The model of one field by itself, where all fields are independent; ``told``: of the variances."""
        return replace(
            self, fields=self.fields[f : f + 1], errors=self.errors.field(f), told=(told,)
        )

    # likelihood

    def local(self, theta: Array, loss: Loss) -> Local:
        """The loss of every box at theta."""
        alpha, beta = self.split(theta)
        log_scale = self.Z @ alpha if len(alpha) else np.full(len(self.errors), -np.inf)
        log_residual = self.X @ beta.T if beta.size else np.full(self.errors.values.shape, -np.inf)
        return evaluate(self.errors, log_scale, log_residual, loss)

    def objective(self, theta: Array, strength: Strength) -> tuple[float, Array, Array]:
        """Loss and penalty over all boxes, the gradient (p,), and the curvature (p, p), or one that is never negative in its place."""
        local = self.local(theta, self.loss)
        weights = self._weights(strength)
        value = float(local.loss.sum() + 0.5 * (weights * theta**2).sum())
        if not np.isfinite(value):
            return np.inf, np.zeros(len(theta)), np.eye(len(theta))
        return (
            value,
            self._gradients(local.slope).sum(0) + weights * theta,
            self._curvature(local, weights),
        )

    def fitted(self, strength: Strength, start: Array | None = None) -> Array:
        """The optimum. With a and r there may be two, so the search starts from a large and from a small share of a."""
        low, high = self.bounds()
        shares = (0.5, 0.01) if self.Z.size and self.X.size else (1.0,)
        starts = [self._start(share) for share in shares] if start is None else [start]
        found = [
            minimise(lambda theta: self.objective(theta, strength), begin, low, high)
            for begin in starts
        ]
        return min(found, key=lambda theta: self.objective(theta, strength)[0])

    def covariances(self, theta: Array, strength: Strength, frames: Array) -> tuple[Array, Array]:
        """Two covariances (p, p) of the optimum: as if all boxes were independent and the model right, from the curvature; and from how
        the gradient scatters over frames, which needs neither (a sandwich), but many frames. What is not told has none."""
        local = self.local(theta, self.loss)
        low, high = self.bounds()
        free = np.ix_(low < high, low < high)
        inverse = np.zeros((len(theta), len(theta)))
        inverse[free] = np.linalg.pinv(
            self._curvature(local, self._weights(strength))[free], hermitian=True
        )
        count = int(frames.max()) + 1
        G = np.zeros((count, len(theta)))
        np.add.at(G, frames, self._gradients(local.slope))
        G -= G.mean(0)
        scatter = G.T @ G * (count / max(count - 1, 1))
        return inverse, inverse @ scatter @ inverse

    # unknowns

    def split(self, theta: Array) -> tuple[Array, Array]:
        """alpha (q,) and beta (D, p), or (0, 0)."""
        q, D = self.Z.shape[1], len(self.fields)
        return theta[:q], theta[q:].reshape(D, self.X.shape[1])

    def join(self, alpha: Array, beta: Array) -> Array:
        return np.concatenate([alpha, beta.ravel()])

    def bounds(self) -> tuple[Array, Array]:
        """Least and greatest theta: a and r not far below what can be told from nothing, slopes of the right sign."""
        alpha, beta = self.split(self._start(1.0))
        low_a, low_b = np.full_like(alpha, -np.inf), np.full_like(beta, -np.inf)
        high_b = np.full_like(beta, np.inf)
        low_a[:1] = alpha[:1] + np.log(NOTHING)
        if beta.size:
            low_b[:, 0] = np.log(1e-3 * np.maximum(self.errors.floor, 1e-15))
            first = 1 + len(self.classes)
            for p, name in enumerate(self.features):
                told = name.startswith(VARIANCE)
                low_b[:, first + p], high_b[:, first + p] = (
                    _SIGN_OF_VARIANCE if told else _SIGNS.get(name, (-np.inf, np.inf))
                )
                if told and self.told:
                    high_b[:, first + p] = np.where(self.told, np.inf, 0.0)
        return self.join(low_a, low_b), self.join(np.full_like(alpha, np.inf), high_b)

    def calibration(self, theta: Array, errors: tuple[Array, Array], estimator: str) -> Calibration:
        """What the optimum says in the terms of a calibration."""
        (alpha, beta), known = self.split(theta), np.any(self.errors.known, axis=0)
        C, D, P = len(self.classes), len(self.fields), len(self.features)
        each = np.concatenate(
            [np.ones((C, 1)), np.eye(C)], 1
        )  # (C, 1 + C): what a class adds up from
        log_scale, log_residual, slopes = (
            np.full(C, -np.inf),
            np.full((C, D), -np.inf),
            np.zeros((D, P)),
        )
        if len(alpha) and alpha[0] > self.bounds()[0][0]:
            log_scale = each[:, : len(alpha)] @ alpha
        if beta.size:
            log_residual = np.where(known, each @ beta[:, : 1 + C].T, -np.inf)
            slopes = np.where(np.reshape(known, (D, 1)), beta[:, 1 + C :], 0.0)
        error_scale, error_residual, error_slopes = self._standard_errors(errors, each)
        return Calibration(
            kind=self.kind,
            fields=self.fields,
            classes=self.classes,
            estimator=estimator,
            log_scale=_tuples(log_scale),
            log_residual=_tuples(log_residual),
            features=self.features,
            slopes=_tuples(slopes),
            centre=_tuples(self.centre),
            spread=_tuples(self.spread),
            limits=_tuples(self.limits),
            floor=_tuples(np.where(known, self.errors.floor, 0.0)),
            error_scale=_tuples(error_scale),
            error_residual=_tuples(error_residual),
            error_slopes=_tuples(error_slopes),
        )

    def _standard_errors(
        self, covariances: tuple[Array, Array], each: Array
    ) -> tuple[Array, Array, Array]:
        """Of log a by class (C,), log r (C, D) and the slopes (D, P): the larger of the two estimates."""
        q, p, D, C = self.Z.shape[1], self.X.shape[1], len(self.fields), len(self.classes)
        scale, residual, slopes = np.zeros(C), np.zeros((C, D)), np.zeros((D, len(self.features)))
        for V in covariances:
            if q:
                scale = np.maximum(scale, _deviations(each[:, :q], V[:q, :q]))
            for f in range(D if p else 0):
                block = V[q + f * p : q + (f + 1) * p, q + f * p : q + (f + 1) * p]
                residual[:, f] = np.maximum(
                    residual[:, f], _deviations(each, block[: 1 + C, : 1 + C])
                )
                slopes[f] = np.maximum(slopes[f], np.sqrt(np.maximum(block.diagonal()[1 + C :], 0)))
        return scale, residual, slopes

    def _start(self, share: float) -> Array:
        """a pooled, such that Sigma alone would explain ``share`` of the errors, and r the mean square error of each field."""
        alpha, beta = np.zeros(self.Z.shape[1]), np.zeros((len(self.fields), self.X.shape[1]))
        if beta.size:
            beta[:, 0] = np.log(np.maximum(self.errors.floor / LITTLE**2, 1e-12))
        if len(alpha):
            variances = np.diagonal(self.errors.covariance, axis1=1, axis2=2)
            ratio = self.errors.values**2 / np.maximum(variances, 1e-300)
            usable = self.errors.known & (variances > 0)
            alpha[0] = (
                np.log(share * max(float(np.median(ratio[usable])), 1e-12)) if usable.any() else 0.0
            )
        return self.join(alpha, beta)

    def _weights(self, strength: Strength) -> Array:
        """The penalty on each unknown (p,): none on what all classes have in common, at mean features, but enough to hold an unknown that
        no error speaks of."""
        by_field = np.broadcast_to(strength, len(self.fields))
        alpha, beta = (
            np.full(self.Z.shape[1], by_field[0]),
            np.repeat(by_field[:, None], self.X.shape[1], 1).astype(float),
        )
        alpha[:1], beta[:, :1] = 1e-9, 1e-9
        return self.join(alpha, beta)

    # from what a box's a and r do to what theta does

    def _gradients(self, slope: Array) -> Array:
        """(n, p) from slopes (n, 1 + D)."""
        n = len(slope)
        of_r = slope[:, 1:, None] * self.X[:, None, :]  # (n, D, p)
        return np.concatenate([slope[:, :1] * self.Z, of_r.reshape(n, -1)], 1)

    def _curvature(self, local: Local, weights: Array) -> Array:
        try:
            H: Array = self._square(local.curvature) + np.diag(weights)
            np.linalg.cholesky(H)
        except np.linalg.LinAlgError:  # far from the optimum, or where a bound holds it
            H = self._square(local.information) + np.diag(weights)
        return H

    def _square(self, local: Array) -> Array:
        """(p, p), summed over boxes, from (n, 1 + D, 1 + D)."""
        D, Z, X = len(self.fields), self.Z, self.X
        p = X.shape[1]
        of_a = Z.T @ (local[:, 0, :1] * Z)
        mixed = [Z.T @ (local[:, 0, j, None] * X) for j in range(1, 1 + D)]
        of_r = np.empty((D, p, D, p))
        for i in range(D):
            for j in range(i + 1):
                of_r[i, :, j] = X.T @ (local[:, 1 + i, 1 + j, None] * X)
                of_r[j, :, i] = of_r[i, :, j].T
        top = np.concatenate([of_a, *mixed], 1)
        return np.concatenate(
            [top, np.concatenate([top[:, Z.shape[1] :].T, of_r.reshape(D * p, D * p)], 1)], 0
        )


def _mean_square(errors: Array) -> Array:
    """Of each field (D,), and a millionth squared at least."""
    known = ~np.isnan(errors)
    square: Array = (np.where(known, errors, 0.0) ** 2).sum(0) / np.maximum(known.sum(0), 1)
    return np.maximum(square, 1e-12)


def _deviations(rows: Array, covariance: Array) -> Array:
    variances: Array = np.einsum("ci,ij,cj->c", rows, covariance, rows)
    return np.sqrt(np.maximum(variances, 0))


def _tuples(values: Array) -> Any:
    return tuple(_tuples(row) for row in values) if values.ndim > 1 else tuple(values.tolist())
