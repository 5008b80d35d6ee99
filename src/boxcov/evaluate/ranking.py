"""Does u put the bad boxes last? AUROC and sparsification, which ask for the order of u alone and for no threshold on it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from boxcov.errors import BoxcovError

Array = NDArray[Any]


def ranks(values: Array) -> Array:
    """The place (n,) of each value among the different values, from 0; equal values share one.

    >>> ranks(np.array([0.5, 0.1, 0.5, 2.0])).tolist()
    [1, 0, 1, 2]
    """
    values = np.asarray(values, dtype=float)
    if np.isnan(values).any():
        raise BoxcovError(
            f"{int(np.isnan(values).sum())} of {len(values)} numbers to be ranked are NaN: leave those predictions out"
        )
    return np.unique(values, return_inverse=True)[1].reshape(-1)


def auroc(bad: Array, u: Array) -> float:
    """The probability that u is larger for a bad box than for a good one; a tie counts one half. NaN if all are bad, or none is.

    >>> auroc(np.array([True, False, True, False]), np.array([0.9, 0.1, 0.4, 0.4]))
    0.875
    """
    return auroc_of_ranks(bad, ranks(u))


def auroc_of_ranks(bad: Array, places: Array) -> float:
    """AUROC from the ``ranks`` of u (n,), or of more numbers than these: without sorting.

    >>> auroc_of_ranks(np.array([True, False]), np.array([7, 3]))
    1.0
    """
    bad = np.asarray(bad, dtype=bool)
    size = int(places.max(initial=0)) + 1
    worse, better = (
        np.bincount(places[bad], minlength=size),
        np.bincount(places[~bad], minlength=size),
    )
    pairs = float(worse.sum()) * float(better.sum())
    return (
        float((worse * (np.cumsum(better) - better / 2)).sum()) / pairs if pairs else float("nan")
    )


def ause(error: Array, u: Array) -> float:
    """The area between the sparsification curves of u and of the error itself, divided by the mean error. 0 is a perfect order.

    The curve is the mean error (n,) of the k boxes of least u, for k = n, ..., 1; boxes of equal u count with their mean error, so that the
    order of the rows does not matter. NaN without boxes; 0 where all errors are 0.

    >>> ause(np.array([1.0, 2.0, 3.0]), np.array([0.1, 0.2, 0.3]))
    0.0
    >>> round(ause(np.array([1.0, 2.0, 3.0]), np.array([0.3, 0.2, 0.1])), 4)  # the worst first
    0.5
    """
    return ause_of_ranks(error, ranks(u), ranks(error))


def ause_of_ranks(error: Array, places: Array, oracle: Array) -> float:
    """AUSE from errors (n,), and the ``ranks`` of u and of the errors, or of more numbers than these: without sorting.

    >>> ause_of_ranks(np.array([1.0, 3.0]), np.array([0, 1]), np.array([0, 1]))
    0.0
    """
    if not len(error):
        return float("nan")
    scale = float(np.mean(error))
    return (
        float(np.mean(_means(error, places) - _means(error, oracle))) / scale if scale > 0 else 0.0
    )


class Sparsification(NamedTuple):
    """Mean errors relative to that of all boxes, (T,) each, after the share ``removed`` of most uncertain boxes is gone."""

    removed: Array
    method: Array
    oracle: Array  # removed by the error itself


def sparsification(error: Array, u: Array, points: int = 101) -> Sparsification:
    """The curves behind ``ause``, at ``points`` shares from 0 up to all boxes but one; NaN without boxes or without error.

    >>> curve = sparsification(np.array([1.0, 2.0, 3.0]), np.array([0.3, 0.2, 0.1]), points=3)
    >>> curve.method.tolist(), curve.oracle.tolist()
    ([1.0, 1.25, 1.5], [1.0, 0.75, 0.5])
    """
    n = len(error)
    if not n:
        return Sparsification(
            np.linspace(0, 1, points), np.full(points, np.nan), np.full(points, np.nan)
        )
    kept = np.round(np.linspace(n, 1, points)).astype(int)
    with np.errstate(invalid="ignore", divide="ignore"):
        method, oracle = (
            _means(error, places)[kept - 1] / np.mean(error) for places in (ranks(u), ranks(error))
        )
    return Sparsification(1 - kept / n, method, oracle)


def _means(error: Array, places: Array) -> Array:
    """The mean error (n,) of the 1, 2, ..., n boxes of lowest place; those of equal place count with their mean."""
    count = np.bincount(places)
    total = np.bincount(places, weights=error)
    share = total / np.maximum(count, 1)
    means: Array = np.cumsum(np.repeat(share, count)) / np.arange(1, len(error) + 1)
    return means
