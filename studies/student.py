"""The likelihood under heavy tails: Student's t for every field, its scale log-linear in what is known of a box. For worth.py."""

from __future__ import annotations

from collections.abc import Mapping
from math import lgamma, log, pi

import numpy as np
from measures import FOLDS, folds_of, richer

from boxcov.error_model.newton import minimise
from boxcov.error_model.variances import VarianceModel
from boxcov.evaluate.records import Records

FREEDOM = (1.0, 2.0, 4.0, 10.0, 30.0)
STRENGTHS = (100.0, 10.0, 1.0)
_INNER = 3


def student_nats(records: Mapping[str, Records]) -> dict[str, np.ndarray]:
    """As ``measures.nats``; degrees of freedom and strength of each field by cross-validation inside the training frames."""
    first = next(iter(records.values()))
    paired = first[first.paired]
    plain = VarianceModel.of(paired, "score", "gaussian")
    models = {"score + size": plain, "score + size, richer": richer(plain)}
    for name, rows in records.items():
        models[name] = VarianceModel.of(rows[rows.paired], "product", "gaussian")
        models[f"{name}, richer"] = richer(models[name])
    return {name: held_out(model, paired.frame) for name, model in models.items()}


def held_out(model: VarianceModel, frame: np.ndarray) -> np.ndarray:
    losses = np.full(model.errors.values.shape, np.nan)
    fold = folds_of(frame)
    for f in range(len(model.fields)):
        known = model.errors.known[:, f]
        alone, folds, frames = model.field(f, True)[known], fold[known], frame[known]
        for k in range(FOLDS):
            seen, rest = alone[folds != k], alone[folds == k]
            freedom, strength = _best(seen, folds_of(frames[folds != k], _INNER, seed=1))
            losses[np.flatnonzero(known)[folds == k], f] = loss(
                rest.beside(seen), fitted(seen, freedom, strength, None), freedom
            )
    return losses


def _best(model: VarianceModel, fold: np.ndarray) -> tuple[float, float]:
    totals: dict[tuple[float, float], float] = {}
    for k in range(_INNER):
        for freedom in FREEDOM:
            theta = None
            for strength in STRENGTHS:
                theta = fitted(model[fold != k], freedom, strength, theta)
                totals[freedom, strength] = totals.get((freedom, strength), 0.0) + float(
                    loss(model[fold == k].beside(model[fold != k]), theta, freedom).sum()
                )
    return min(totals, key=lambda key: totals[key])


def loss(model: VarianceModel, theta: np.ndarray, freedom: float) -> np.ndarray:
    """Negative log density of every error (n,)."""
    v = np.exp(model.X @ theta) + model.errors.floor
    constant = lgamma(freedom / 2) - lgamma((freedom + 1) / 2) + 0.5 * log(freedom * pi)
    found: np.ndarray = (
        constant
        + 0.5 * np.log(v)
        + 0.5 * (freedom + 1) * np.log1p(model.errors.values[:, 0] ** 2 / (freedom * v))
    )
    return found


def fitted(
    model: VarianceModel, freedom: float, strength: float, start: np.ndarray | None
) -> np.ndarray:
    X, squares, floor = model.X, model.errors.values[:, 0] ** 2, float(model.errors.floor[0])
    low, high = model.bounds()
    weights = np.full(X.shape[1], strength)
    weights[0] = 1e-9

    def objective(theta: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        r = np.exp(np.minimum(X @ theta, 60.0))
        v = r + floor
        part, q = r / v, squares / (freedom * v)
        slope = 0.5 * (1 - (freedom + 1) * q / (1 + q))
        bend = part**2 * 0.5 * (freedom + 1) * q / (1 + q) ** 2 + slope * part * (1 - part)
        H = X.T @ (bend[:, None] * X) + np.diag(weights)
        if np.linalg.eigvalsh(H)[0] <= 0:  # the information of errors that are so distributed
            H = X.T @ ((part**2 * 0.5 * freedom / (freedom + 3))[:, None] * X) + np.diag(weights)
        value = float(
            (0.5 * np.log(v) + 0.5 * (freedom + 1) * np.log1p(q)).sum()
            + 0.5 * (weights * theta**2).sum()
        )
        return value, X.T @ (part * slope) + weights * theta, H

    if start is None:
        start = np.zeros(X.shape[1])
        start[0] = np.log(np.median(squares) + 1e-12)
    return minimise(objective, start, low, high)
