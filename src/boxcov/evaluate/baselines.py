"""What is known without any covariance: 1 - score, and a small logistic regression on score, size, range and class; and what to add to it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcov.errors import BoxcovError
from boxcov.evaluate.quality import accurate_iou
from boxcov.evaluate.records import Records

Array = NDArray[Any]


def one_minus_score(records: Records) -> Records:
    """The same boxes with u = 1 - score, and without a covariance.

    >>> from boxcov.evaluate.matching import match
    >>> car, one = np.array([[0.0, 0.0, 4.0, 4.0]]), np.zeros(1, int)
    >>> found = match(car, np.array([0.75]), one, one, car, one, one, ("x1", "y1", "x2", "y2"), ("car",), np.ones(1))
    >>> one_minus_score(found).uncertainty.tolist()
    [0.25]
    """
    return records.without_covariance(1 - np.asarray(records.scores, dtype=float))


def score_and_size(
    records: Records, extra: Array | None = None, folds: int = 5, seed: int = 0
) -> Records:
    """The same boxes with u = the probability of being inaccurate (IoU below 0.4), learnt on other frames of the same records.

    The regression sees ``features``, and ``extra`` columns (n, c) such as ``covariance_features``. Every box gets its number from a fit
    without its frame.

    >>> from boxcov.evaluate.matching import match
    >>> car, one = np.array([[0.0, 0.0, 4.0, 4.0]]), np.zeros(1, int)
    >>> found = match(car, np.array([0.75]), one, one, car, one, one, ("x1", "y1", "x2", "y2"), ("car",), np.ones(1))
    >>> score_and_size(found).uncertainty.tolist()  # nothing to learn from
    [0.5]
    """
    columns = features(records) if extra is None else np.concatenate([features(records), extra], 1)
    return records.without_covariance(
        out_of_fold(columns, ~accurate_iou(records.iou), records.frame, folds=folds, seed=seed)
    )


def features(records: Records) -> Array:
    """Columns (n, c): the logit of the score, the log of each size, the range where there is one, and one column a class.

    >>> from boxcov.evaluate.matching import match
    >>> car, one = np.array([[3.0, 4.0, 1.0, 1.0, 0.0]]), np.zeros(1, int)
    >>> features(match(car, np.array([0.5]), one, one, car, one, one, ("x", "y", "w", "l", "yaw"), ("car",), np.ones(1))).tolist()
    [[0.0, 0.0, 0.0, 5.0, 1.0]]
    """
    return np.stack(list(named_features(records).values()), 1)


def named_features(records: Records) -> dict[str, Array]:
    """The columns (n,) of ``features`` by name.

    >>> from boxcov.evaluate.matching import match
    >>> car, one = np.array([[3.0, 4.0, 1.0, 1.0, 0.0]]), np.zeros(1, int)
    >>> list(named_features(match(car, np.array([0.5]), one, one, car, one, one, ("x", "y", "w", "l", "yaw"), ("car",), np.ones(1))))
    ['score', 'w', 'l', 'range', 'class car']
    """
    score = np.clip(np.asarray(records.scores, dtype=float), 1e-6, 1 - 1e-6)
    named = {"score": np.log(score / (1 - score))}
    named |= {
        name: np.log(np.clip(np.nan_to_num(size), 1e-6, 1e6))
        for name, size in _sizes(records).items()
    }
    if "x" in records.fields and "y" in records.fields:
        named["range"] = np.clip(
            np.nan_to_num(records.range), 0, 1e3
        )  # a box gone wild must not spoil the fit for all others
    return named | {
        f"class {name}": (records.labels == label).astype(float)
        for label, name in enumerate(records.classes)
    }


def covariance_features(records: Records) -> Array:
    """Columns (n, D), or (n, D + 1): the log of each variance, and of that of the score's logit where there is one.

    >>> from boxcov.evaluate.matching import match
    >>> car, one = np.array([[0.0, 0.0, 4.0, 4.0]]), np.zeros(1, int)
    >>> found = match(car, np.array([0.75]), one, one, car, one, one, ("x1", "y1", "x2", "y2"), ("car",), np.ones(1), np.eye(4)[None])
    >>> covariance_features(found).tolist()
    [[0.0, 0.0, 0.0, 0.0]]
    """
    return np.stack(list(named_covariance_features(records).values()), 1)


def named_covariance_features(records: Records) -> dict[str, Array]:
    """The columns (n,) of ``covariance_features`` by name.

    >>> from boxcov.evaluate.matching import match
    >>> car, one = np.array([[0.0, 0.0, 4.0, 4.0]]), np.zeros(1, int)
    >>> found = match(car, np.array([0.75]), one, one, car, one, one, ("x1", "y1", "x2", "y2"), ("car",), np.ones(1), np.eye(4)[None])
    >>> list(named_covariance_features(found))
    ['variance x1', 'variance y1', 'variance x2', 'variance y2']
    """
    if records.covariance is None:
        raise BoxcovError("these records have no covariance to take variances from")
    variances = np.diagonal(np.asarray(records.covariance, dtype=float), axis1=1, axis2=2)
    named = {f"variance {name}": variances[:, i] for i, name in enumerate(records.fields)}
    if records.score_variance is not None:
        named["variance of the score"] = np.asarray(records.score_variance, dtype=float)
    return {name: np.log(np.clip(value, 1e-30, 1e30)) for name, value in named.items()}


def out_of_fold(
    columns: Array, bad: Array, frame: Array, folds: int = 5, penalty: float = 1.0, seed: int = 0
) -> Array:
    """The probability of ``bad`` (n,) for each row of ``columns`` (n, c), by a logistic regression fitted on other frames.

    Frames are dealt into ``folds`` at random (one each, if there are fewer). Where the other frames have only good or only bad rows, the probability
    is their share of bad ones, with one half added to each kind.

    >>> frame, x = np.repeat(np.arange(10), 2), np.tile([0.0, 1.0], 10)
    >>> p = out_of_fold(x[:, None], x > 0.5, frame)
    >>> bool(p[x > 0.5].min() > 0.8 > 0.2 > p[x < 0.5].max())
    True
    """
    bad = np.asarray(bad, dtype=bool)
    numbers, place = np.unique(frame, return_inverse=True)
    fold = np.random.default_rng(seed).permutation(len(numbers))[place.reshape(-1)] % max(folds, 2)
    probability = np.full(len(bad), np.nan)
    for number in np.unique(fold):
        held, rest = fold == number, fold != number
        if bad[rest].all() or not bad[rest].any():
            probability[held] = (bad[rest].sum() + 0.5) / (rest.sum() + 1)
            continue
        mean, sd = columns[rest].mean(0), columns[rest].std(0)
        scaled = (columns - mean) / np.where(sd > 0, sd, 1)
        weights = logistic_regression(scaled[rest], bad[rest], penalty)
        probability[held] = logistic(scaled[held] @ weights[1:] + weights[0])
    return probability


def logistic_regression(columns: Array, bad: Array, penalty: float = 1.0) -> Array:
    """Intercept and weights (1 + c,) that minimise the negative log likelihood plus ``penalty / 2`` times the squared weights.

    Newton's method, with a step halved until it improves; the intercept is not penalised, so both kinds must occur.

    >>> logistic_regression(np.zeros((4, 1)), np.array([True, False, False, False])).round(4).tolist()  # log(1/3)
    [-1.0986, 0.0]
    """
    X = np.concatenate([np.ones((len(columns), 1)), columns], 1)
    y, ridge = np.asarray(bad, dtype=float), penalty * np.eye(X.shape[1])
    ridge[0, 0] = 0

    def loss(w: Array) -> float:
        z = X @ w
        return float(np.logaddexp(0, z).sum() - y @ z + w @ ridge @ w / 2)

    weights = np.zeros(X.shape[1])
    weights[0] = np.log(y.sum() / (len(y) - y.sum()))
    now = loss(weights)
    for _ in range(100):
        p = logistic(X @ weights)
        gradient = X.T @ (p - y) + ridge @ weights
        step = np.linalg.solve(
            (X * (p * (1 - p))[:, None]).T @ X + ridge + 1e-12 * np.eye(len(weights)), gradient
        )
        size = 1.0
        while size > 1e-10 and not loss(weights - size * step) < now:
            size /= 2
        if size <= 1e-10:  # no way down is left
            break
        weights = weights - size * step
        now = loss(weights)
    return weights


def logistic(z: Array) -> Array:
    """The probability (n,) of a log-odds.

    >>> logistic(np.array([0.0, 800.0, -800.0])).tolist()
    [0.5, 1.0, 0.0]
    """
    value: Array = np.exp(-np.logaddexp(0, -z))
    return value


def _sizes(records: Records) -> dict[str, Array]:
    at = {name: records.boxes[:, i] for i, name in enumerate(records.fields)}
    if "x1" in at:
        return {"width": at["x2"] - at["x1"], "height": at["y2"] - at["y1"]}
    return {name: at[name] for name in ("w", "l", "h") if name in at}
