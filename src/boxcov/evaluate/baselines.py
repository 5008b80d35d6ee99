"""Baselines without a covariance: 1 - score, and logistic regressions on what is free.

Free are score, size, range and class, and the detector's own ``signals``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from boxcov.box_layout import has_layout, log_variances, sides
from boxcov.errors import BoxcovError, import_package
from boxcov.evaluate.quality import accurate_iou
from boxcov.evaluate.records import Records

Array = NDArray[Any]
PENALTIES = (1.0, 30.0, 1000.0)
MAX_ROWS = 5000  # for the choice of a penalty


def one_minus_score(records: Records) -> Records:
    """Return the same boxes with u = 1 - score and without a covariance."""
    return records.without_covariance(1 - np.asarray(records.scores, dtype=float))


def score_and_size(records: Records, extra: Array | None = None, seed: int = 0) -> Records:
    """Return the same boxes with u = P(inaccurate) by a cross-validated logistic regression.

    The regression reads ``features`` and the ``extra`` columns (n, c), such as
    ``covariance_features`` or ``signal_features``. Inaccurate means an IoU below 0.4. The value of
    each box comes from a fit on other frames.
    """
    columns = features(records) if extra is None else np.concatenate([features(records), extra], 1)
    bad = ~accurate_iou(records.iou)
    return records.without_covariance(out_of_fold(columns, bad, records.frame, kept=1, seed=seed))


def signals_alone(records: Records, seed: int = 0) -> Records:
    """Return the same boxes with u = P(inaccurate) by a regression on the detector's signals."""
    bad = ~accurate_iou(records.iou)
    p = out_of_fold(signal_features(records), bad, records.frame, seed=seed)
    return records.without_covariance(p)


def signal_features(records: Records) -> Array:
    """Return the detector's signals (n, S), with bounds against absurd values."""
    if records.signals is None:
        raise BoxcovError("these records have no signals")
    values = np.nan_to_num(np.asarray(records.signals, dtype=float))
    return np.clip(values, -1e6, 1e6)


def features(records: Records) -> Array:
    """Return score logit, log sizes, range (if any) and a one-hot class as columns (n, c)."""
    score = np.clip(np.asarray(records.scores, dtype=float), 1e-6, 1 - 1e-6)
    columns = [np.log(score / (1 - score))]
    sizes = sides(dict(zip(records.fields, records.boxes.T))).values()
    columns += [np.log(np.clip(np.nan_to_num(size), 1e-6, 1e6)) for size in sizes]
    if has_layout(records.fields, ("x", "y")):
        # clipped, so that one absurd box does not spoil the fit of all others
        columns.append(np.clip(np.nan_to_num(records.range), 0, 1e3))
    classes = range(len(records.classes))
    return np.stack([*columns, *((records.labels == c).astype(float) for c in classes)], 1)


def covariance_features(records: Records) -> Array:
    """Return the log variances of the fields, and of the score logit if known, as columns (n, c).

    A side clipped at the image border, which has none, takes the mean of the box's other sides.
    """
    if records.covariance is None:
        raise BoxcovError("these records have no covariance to take variances from")
    variances = np.diagonal(np.asarray(records.covariance, dtype=float), axis1=1, axis2=2)
    variances = np.clip(variances, 1e-30, 1e30)
    logs = log_variances(records.fields, torch.tensor(variances), torch.tensor(records.clipped))
    if records.score_variance is None:
        return logs.numpy()
    score = np.clip(np.asarray(records.score_variance, dtype=float), 1e-30, 1e30)
    return np.concatenate([logs.numpy(), np.log(score)[:, None]], 1)


def out_of_fold(
    columns: Array, bad: Array, frame: Array, *, kept: int = 0, folds: int = 5, seed: int = 0
) -> Array:
    """Return P(bad) (n,) for each row of ``columns`` (n, c), by a regression on other frames.

    Frames are assigned to ``folds`` at random. The penalty of all columns but the first ``kept``
    is the one of ``PENALTIES`` with the best likelihood within the other frames, so that many
    columns of little use do not spoil a few good ones. Where the other frames have only good or
    only bad rows, the probability is their share of bad rows with one half added to each count.
    """
    bad = np.asarray(bad, dtype=bool)
    numbers, place = np.unique(frame, return_inverse=True)
    rng = np.random.default_rng(seed)
    fold = rng.permutation(len(numbers))[place.reshape(-1)] % max(folds, 2)
    penalties = [np.where(np.arange(columns.shape[1]) < kept, 1.0, p) for p in PENALTIES]
    log_odds = np.full(len(bad), np.nan)
    for number in np.unique(fold):
        test = fold == number
        others = np.flatnonzero(~test)
        if len(others) > MAX_ROWS:
            others = rng.choice(others, MAX_ROWS, replace=False)
        losses = [_loss(columns[others], bad[others], fold[others], p) for p in penalties]
        best = penalties[int(np.argmin(losses))]
        log_odds[test] = _held_out_log_odds(columns, bad, test, best)
    return logistic(log_odds)


def _loss(columns: Array, bad: Array, fold: Array, penalty: Array) -> float:
    """Return the negative log likelihood of each fold's rows by regressions on the other folds."""
    total = 0.0
    for number in np.unique(fold):
        test = fold == number
        z = _held_out_log_odds(columns, bad, test, penalty)
        total += float(np.logaddexp(0, np.where(bad[test], -z, z)).sum())
    return total


def _held_out_log_odds(columns: Array, bad: Array, test: Array, penalty: Array) -> Array:
    """Return the log-odds of the rows ``test`` by a regression on the others."""
    train = ~test
    if bad[train].all() or not bad[train].any():
        share = (bad[train].sum() + 0.5) / (train.sum() + 1)
        return np.full(int(test.sum()), np.log(share / (1 - share)))
    mean, sd = columns[train].mean(0), columns[train].std(0)
    # A column of zeros and ones is not scaled: scaling would free a rare class of the penalty.
    is_indicator = ((columns == 0) | (columns == 1)).all(0)
    scaled = (columns - mean) / np.where(is_indicator | (sd == 0), 1, sd)
    weights = logistic_regression(scaled[train], bad[train], penalty)
    return scaled[test] @ weights[1:] + weights[0]


def logistic_regression(columns: Array, bad: Array, penalty: float | Array = 1.0) -> Array:
    """Return intercept and weights (1 + c,) of an L2-penalised logistic regression.

    Minimises the negative log likelihood plus ``penalty / 2``, of all columns or of each (c,),
    times the squared weights. The intercept is not penalised, so ``bad`` (n,) must contain both
    values.
    """
    X = np.concatenate([np.ones((len(columns), 1)), columns], 1)
    y = np.asarray(bad, dtype=float)
    ridge = np.concatenate([[0.0], np.broadcast_to(penalty, columns.shape[1])])

    def loss_and_gradient(w: Array) -> tuple[float, Array]:
        z = X @ w
        loss = float(np.logaddexp(0, z).sum() - y @ z + (ridge * w**2).sum() / 2)
        return loss, X.T @ (logistic(z) - y) + ridge * w

    def hessian(w: Array) -> Array:
        p = logistic(X @ w)
        return (X * (p * (1 - p))[:, None]).T @ X + np.diag(ridge)

    start = np.zeros(X.shape[1])
    start[0] = np.log(y.sum() / (len(y) - y.sum()))
    result = import_package("scipy.optimize").minimize(
        loss_and_gradient,
        start,
        jac=True,
        hess=hessian,
        method="trust-exact",
        options={"gtol": 1e-5, "maxiter": 100},
    )
    return result.x


def logistic(z: Array) -> Array:
    """Return the probability (n,) for log-odds z (n,)."""
    return np.exp(-np.logaddexp(0, -z))
