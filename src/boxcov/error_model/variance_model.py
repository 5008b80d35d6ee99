"""Variance of a field's error, log-linear in class and features of the box, and its fit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcov.errors import import_scipy
from boxcov.evaluate.records import Records
from boxcov.posterior.calibration import (
    VARIANCE,
    Feature,
    Kind,
    box_features,
    feature_names,
    variance_features,
)

Array = NDArray[Any]
# The standard deviation of a box is at least this share of the field's root mean square error,
# even in a class whose boxes show no error.
MIN_SHARE = 1e-3
# signs of slopes: variance never rises with the score, never falls with range or a variance
_BOUNDS: dict[Feature, tuple[float, float]] = {"score": (-np.inf, 0.0), "range": (0.0, np.inf)}
_VARIANCE_BOUNDS = (0.0, np.inf)


@dataclass(frozen=True)
class VarianceModel:
    """The design of the variance models of all fields, and the errors to fit them to."""

    fields: tuple[str, ...]
    classes: tuple[str, ...]
    features: tuple[Feature, ...]
    X: Array  # (n, 1 + C + P): 1, one column per class, standardised features
    errors: Array  # (n, D), NaN where unknown
    floor: Array  # (D,) added to every variance
    centre: Array  # (P,) means of the features
    spread: Array  # (P,) standard deviations of the features
    limits: Array  # (P, 2) smallest and largest value of each feature

    @staticmethod
    def from_records(paired: Records, kind: Kind) -> VarianceModel:
        """Build the design for the errors of paired boxes."""
        n = len(paired)
        classes = np.eye(len(paired.classes))[paired.labels]
        names = feature_names(paired.fields)
        if kind == "product":
            names += variance_features(paired.fields)
        boxes, scores = paired.boxes.astype(float), paired.scores.astype(float)
        covariance = np.asarray(paired.covariance, dtype=float)
        values = box_features(names, paired.fields, boxes, scores, covariance)
        centre, spread = values.mean(0), np.maximum(values.std(0), 1e-6)
        errors = paired.errors.astype(float)
        known = ~np.isnan(errors)
        mean_square = (np.nan_to_num(errors) ** 2).sum(0) / np.maximum(known.sum(0), 1)
        return VarianceModel(
            fields=paired.fields,
            classes=paired.classes,
            features=names,
            X=np.concatenate([np.ones((n, 1)), classes, (values - centre) / spread], 1),
            errors=errors,
            floor=MIN_SHARE**2 * np.maximum(mean_square, 1e-12),
            centre=centre,
            spread=spread,
            limits=np.stack([values.min(0), values.max(0)], 1),
        )

    def __getitem__(self, rows: Any) -> VarianceModel:
        return replace(self, X=self.X[rows], errors=self.errors[rows])

    def field(self, f: int, with_variances: bool) -> FieldModel:
        """Return the model of field number ``f``, with or without variances as features."""
        low, high = np.full(self.X.shape[1], -np.inf), np.full(self.X.shape[1], np.inf)
        low[0] = np.log(1e-3 * max(float(self.floor[f]), 1e-15))
        for column, name in enumerate(self.features, start=1 + len(self.classes)):
            if name.startswith(VARIANCE):
                low[column], high[column] = _VARIANCE_BOUNDS if with_variances else (0.0, 0.0)
            else:
                low[column], high[column] = _BOUNDS.get(name, (-np.inf, np.inf))
        return FieldModel(self.X, self.errors[:, f], float(self.floor[f]), low, high)


@dataclass(frozen=True)
class FieldModel:
    """Errors ~ N(0, exp(X theta) + floor), with bounds on theta.

    >>> low, high = np.full(1, -np.inf), np.full(1, np.inf)
    >>> model = FieldModel(np.ones((50, 1)), np.full(50, 3.0), 0.0, low, high)
    >>> np.exp(model.fit(strength=1.0)).round(4).tolist()  # the squared error
    [9.0]
    """

    X: Array  # (n, p)
    errors: Array  # (n,), NaN where unknown
    floor: float
    low: Array  # (p,)
    high: Array  # (p,)

    def __getitem__(self, rows: Any) -> FieldModel:
        return replace(self, X=self.X[rows], errors=self.errors[rows])

    def clip_to(self, seen: FieldModel) -> FieldModel:
        """Return the model with features clipped to the range of ``seen``, like a calibration."""
        return replace(self, X=np.clip(self.X, seen.X.min(0), seen.X.max(0)))

    def variances(self, theta: Array) -> Array:
        """Return the variance (n,) of each error."""
        v: Array = np.exp(np.clip(self.X @ theta, -700, 700)) + self.floor
        return v

    def nll(self, theta: Array) -> Array:
        """Return the negative log density (n,) of each error; 0 where it is unknown."""
        v = self.variances(theta)
        nll = 0.5 * (np.log(v) + self.errors**2 / v + np.log(2 * np.pi))
        return np.where(np.isnan(self.errors), 0.0, nll)

    def objective(self, theta: Array, strength: float) -> tuple[float, Array]:
        """Return the penalised NLL and its gradient (p,). The first column is not penalised."""
        penalty = np.full(len(theta), strength)
        penalty[0] = 1e-9  # keeps the optimum unique if no error is known
        v = self.variances(theta)
        known = ~np.isnan(self.errors)
        ratio = np.where(known, np.nan_to_num(self.errors) ** 2 / v, 1.0)
        slope = 0.5 * (1 - ratio) * (v - self.floor) / v
        value = float(self.nll(theta).sum() + 0.5 * (penalty * theta**2).sum())
        return value, self.X.T @ slope + penalty * theta

    def fit(self, strength: float, start: Array | None = None) -> Array:
        """Return the theta (p,) of least penalised NLL; ``strength`` is that of the L2 penalty."""
        if start is None:
            start = np.zeros(self.X.shape[1])
            start[0] = np.log(max(self.floor / MIN_SHARE**2, 1e-12))
        result = import_scipy("optimize").minimize(
            self.objective,
            np.clip(start, self.low, self.high),
            args=(strength,),
            jac=True,
            method="L-BFGS-B",
            bounds=np.stack([self.low, self.high], 1),
            options={"maxcor": 30, "maxiter": 2000, "ftol": 1e-14, "gtol": 1e-6},
        )
        theta: Array = result.x
        return theta
