"""Confidence intervals by resampling frames: boxes of one frame are seen together, so they are drawn together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from boxcov.errors import BoxcovError
from boxcov.evaluate.chance import interval

Array = NDArray[Any]
Statistic = Callable[
    [Array], ArrayLike
]  # of row numbers (m,), some of them more than once; gives a number, or numbers (K,)


class Interval(NamedTuple):
    """Where the middle 95 % of the replicates lie: plain numbers, or arrays (K,) for a statistic of K numbers."""

    low: Array
    high: Array


def resampled(
    frame: Array, *others: Array, replicates: int = 1000, seed: int = 0
) -> Iterator[tuple[Array, ...]]:
    """Row numbers of each replicate: as many frames as there are, drawn with replacement, and all their rows.

    With several methods' ``frame`` arrays each replicate draws the same frames for all of them. A frame in which none has a box is unknown here.

    >>> rows, = next(resampled(np.array([5, 5, 9]), seed=1))
    >>> rows.tolist() in ([0, 1, 0, 1], [0, 1, 2], [2, 0, 1], [2, 2])
    True
    """
    if replicates < 1:
        raise BoxcovError(f"replicates must be at least 1, got {replicates}")
    methods = (frame, *others)
    numbers = np.unique(np.concatenate(methods))
    tables = []
    for one in methods:
        place = np.searchsorted(numbers, one)
        count = np.bincount(place, minlength=len(numbers))
        tables.append((np.argsort(place, kind="stable"), count, np.cumsum(count) - count))
    rng = np.random.default_rng(seed)
    for _ in range(replicates):
        drawn = rng.integers(0, len(numbers), len(numbers)) if len(numbers) else np.zeros(0, int)
        yield tuple(_rows(order, count[drawn], start[drawn]) for order, count, start in tables)


def bootstrap(
    statistic: Statistic, frame: Array, replicates: int = 1000, seed: int = 0
) -> Interval:
    """The 95 % interval of ``statistic`` over replicates of the frames; replicates where it is NaN do not count.

    >>> hit = np.array([1.0, 0.0, 1.0, 1.0])
    >>> found = bootstrap(lambda rows: hit[rows].mean(), np.arange(4))
    >>> float(found.low) < 0.75 < float(found.high)
    True
    """
    return _interval(
        [statistic(rows) for (rows,) in resampled(frame, replicates=replicates, seed=seed)]
    )


def paired_difference(
    a: Statistic,
    frame_a: Array,
    b: Statistic,
    frame_b: Array,
    replicates: int = 1000,
    seed: int = 0,
) -> Interval:
    """The 95 % interval of ``a - b`` for two methods on the same frames, each replicate drawing the same frames for both.

    >>> error = np.array([1.0, 5.0, 3.0])
    >>> found = paired_difference(lambda r: error[r].mean() + 1, np.arange(3), lambda r: error[r].mean(), np.arange(3))
    >>> round(float(found.low), 9), round(float(found.high), 9)  # one more in each replicate, however the frames differ
    (1.0, 1.0)
    """
    draws = resampled(frame_a, frame_b, replicates=replicates, seed=seed)
    return _interval([np.subtract(a(rows_a), b(rows_b)) for rows_a, rows_b in draws])


def _rows(order: Array, count: Array, start: Array) -> Array:
    """The stretches ``order[start : start + count]`` one after the other."""
    offset = np.cumsum(count) - count
    rows: Array = order[np.repeat(start - offset, count) + np.arange(int(count.sum()))]
    return rows


def _interval(values: list[Any]) -> Interval:
    table = np.asarray(values, dtype=float)  # (replicates,) or (replicates, K)
    shape = table.shape[1:]
    ends = [interval(column) for column in table.reshape(len(table), -1).T]
    low, high = np.array(ends, dtype=float).reshape(-1, 2).T
    return Interval(low.reshape(shape), high.reshape(shape))
