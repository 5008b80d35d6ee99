"""Log likelihood under heavy tails: a Student's t distribution per field. Used by worth.py.

Its log scale is linear in the features of the box.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import lgamma, log, pi

import numpy as np
from boxcov.error_model.variance_model import FieldModel, VarianceModel
from measures import FOLDS, folds_of, richer
from scipy.optimize import minimize

from boxcov.evaluate.records import Records

FREEDOM = (1.0, 2.0, 4.0, 10.0, 30.0)
STRENGTHS = (100.0, 10.0, 1.0)
_INNER = 3


def student_nats(records: Mapping[str, Records]) -> dict[str, np.ndarray]:
    """Return the held-out negative log density (n, D) of the models of ``measures.nats``.

    Cross-validation inside the training frames chooses each field's degrees of freedom and penalty.
    """
    first = next(iter(records.values()))
    paired = first[first.paired]
    plain = VarianceModel.from_records(paired, "score")
    models = {"score + size": plain, "score + size, richer": richer(plain)}
    for name, rows in records.items():
        models[name] = VarianceModel.from_records(rows[rows.paired], "product")
        models[f"{name}, richer"] = richer(models[name])
    return {name: held_out(model, paired.frame) for name, model in models.items()}


def held_out(model: VarianceModel, frame: np.ndarray) -> np.ndarray:
    """Return the negative log density (n, D) of every error by a fit to other frames."""
    losses = np.full(model.errors.shape, np.nan)
    fold = folds_of(frame)
    for f in range(len(model.fields)):
        known = ~np.isnan(model.errors[:, f])
        field, folds, frames = model.field(f, True)[known], fold[known], frame[known]
        for k in range(FOLDS):
            seen, rest = field[folds != k], field[folds == k]
            freedom, strength = _best(seen, folds_of(frames[folds != k], _INNER, seed=1))
            losses[np.flatnonzero(known)[folds == k], f] = loss(
                rest.clip_to(seen), fit(seen, freedom, strength, None), freedom
            )
    return losses


def _best(field: FieldModel, fold: np.ndarray) -> tuple[float, float]:
    totals: dict[tuple[float, float], float] = {}
    for k in range(_INNER):
        train, test = field[fold != k], field[fold == k].clip_to(field[fold != k])
        for freedom in FREEDOM:
            theta = None
            for strength in STRENGTHS:
                theta = fit(train, freedom, strength, theta)
                total = totals.get((freedom, strength), 0.0)
                totals[freedom, strength] = total + float(loss(test, theta, freedom).sum())
    return min(totals, key=lambda key: totals[key])


def loss(field: FieldModel, theta: np.ndarray, freedom: float) -> np.ndarray:
    """Return the negative log density of every error (n,)."""
    v = field.variances(theta)
    constant = lgamma(freedom / 2) - lgamma((freedom + 1) / 2) + 0.5 * log(freedom * pi)
    tail = 0.5 * (freedom + 1) * np.log1p(field.errors**2 / (freedom * v))
    found: np.ndarray = constant + 0.5 * np.log(v) + tail
    return found


def fit(field: FieldModel, freedom: float, strength: float, start: np.ndarray | None) -> np.ndarray:
    """Return the theta (p,) that minimises the penalised negative log density."""
    weights = np.full(field.X.shape[1], strength)
    weights[0] = 1e-9

    def objective(theta: np.ndarray) -> tuple[float, np.ndarray]:
        v = field.variances(theta)
        q = field.errors**2 / (freedom * v)
        slope = 0.5 * (1 - (freedom + 1) * q / (1 + q)) * (v - field.floor) / v
        value = float(loss(field, theta, freedom).sum() + 0.5 * (weights * theta**2).sum())
        return value, field.X.T @ slope + weights * theta

    if start is None:
        start = np.zeros(field.X.shape[1])
        start[0] = np.log(np.median(field.errors**2) + 1e-12)
    found: np.ndarray = minimize(
        objective,
        np.clip(start, field.low, field.high),
        jac=True,
        method="L-BFGS-B",
        bounds=np.stack([field.low, field.high], 1),
        options={"maxcor": 30, "maxiter": 2000, "ftol": 1e-13},
    ).x
    return found
