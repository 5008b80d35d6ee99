"""Metrics of the order of u alone, without a threshold: AUROC and AUSE."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcov.errors import BoxcovError

Array = NDArray[Any]


def ranks(values: Array) -> Array:
    """Return the rank (n,) of each value among the distinct values, from 0; equal values share one.

    >>> ranks(np.array([0.5, 0.1, 0.5, 2.0])).tolist()
    [1, 0, 1, 2]
    """
    values = np.asarray(values, dtype=float)
    if np.isnan(values).any():
        raise BoxcovError(
            f"{int(np.isnan(values).sum())} of {len(values)} values to rank are NaN: "
            "remove those predictions"
        )
    return np.unique(values, return_inverse=True)[1].reshape(-1)


def auroc(bad: Array, u: Array) -> float:
    """Return the probability that u is larger for a bad box than for a good one.

    A tie counts one half. NaN if all boxes are bad or none is.

    >>> auroc(np.array([True, False, True, False]), np.array([0.9, 0.1, 0.4, 0.4]))
    0.875
    """
    return auroc_from_ranks(bad, ranks(u))


def auroc_from_ranks(bad: Array, u_ranks: Array) -> float:
    """Return the AUROC given ``ranks`` of u (n,); the ranks may come from a larger array."""
    bad = np.asarray(bad, dtype=bool)
    size = int(u_ranks.max(initial=0)) + 1
    bads = np.bincount(u_ranks[bad], minlength=size)
    goods = np.bincount(u_ranks[~bad], minlength=size)
    pairs = float(bads.sum()) * float(goods.sum())
    return float((bads * (np.cumsum(goods) - goods / 2)).sum()) / pairs if pairs else float("nan")


def ause(error: Array, u: Array) -> float:
    """Return the area between the sparsification curves of u and of the error, over the mean error.

    A sparsification curve is the mean error of the k boxes with the smallest values, for k = n to
    1. Boxes with equal u count with their mean error, so the order of the rows does not matter. 0
    means a perfect order; NaN without boxes; 0 if all errors are 0.

    >>> ause(np.array([1.0, 2.0, 3.0]), np.array([0.1, 0.2, 0.3]))
    0.0
    >>> round(ause(np.array([1.0, 2.0, 3.0]), np.array([0.3, 0.2, 0.1])), 4)
    0.5
    """
    return ause_from_ranks(error, ranks(u), ranks(error))


def ause_from_ranks(error: Array, u_ranks: Array, error_ranks: Array) -> float:
    """Return the AUSE given errors (n,) and ``ranks`` of u and of the errors."""
    if not len(error):
        return float("nan")
    scale = float(np.mean(error))
    area = float(np.mean(_sparsification(error, u_ranks) - _sparsification(error, error_ranks)))
    return area / scale if scale > 0 else 0.0


def _sparsification(error: Array, value_ranks: Array) -> Array:
    """Return the mean error (n,) of the 1, 2, ..., n boxes of lowest rank, averaged over ties."""
    count = np.bincount(value_ranks)
    total = np.bincount(value_ranks, weights=error)
    mean = total / np.maximum(count, 1)
    curve: Array = np.cumsum(np.repeat(mean, count)) / np.arange(1, len(error) + 1)
    return curve
