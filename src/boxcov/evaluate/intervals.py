"""Confidence intervals by resampling frames, and chance levels by shuffling u.

Boxes of one frame are not independent, so the bootstrap draws whole frames.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from warnings import catch_warnings, simplefilter

import numpy as np
from numpy.typing import ArrayLike, NDArray

from boxcov.errors import check_whole
from boxcov.evaluate.quality import METRICS, Partition

Array = NDArray[Any]


class Interval(NamedTuple):
    """The middle 95 % of the replicates: arrays of shape () or (K,)."""

    low: Array
    high: Array


class Chance(NamedTuple):
    """The mean of a metric over shuffles of u, and the interval that holds 95 % of the shuffles."""

    mean: float
    low: float
    high: float


def bootstrap(
    statistic: Callable[..., ArrayLike], *frames: Array, replicates: int = 1000, seed: int = 0
) -> Interval:
    """Return the 95 % interval of ``statistic`` over resampled frames, ignoring NaN.

    frames: the frame number (n,) of each row, one array per method to compare. Each replicate draws
    the same frames for all methods.
    statistic: a function of row numbers (m,), possibly repeated, one array per method, that returns
    a number or numbers (K,).
    """
    draws = resample_frames(*frames, replicates=replicates, seed=seed)
    return quantile_interval(np.array([statistic(*rows) for rows in draws], dtype=float))


def resample_frames(
    *frames: Array, replicates: int = 1000, seed: int = 0
) -> Iterator[tuple[Array, ...]]:
    """Yield the row numbers of each replicate: frames drawn with replacement, with all their rows.

    Given the frame numbers of several methods, each replicate draws the same frames for all.
    """
    check_whole("replicates", replicates)
    numbers = np.unique(np.concatenate(frames))
    tables = []
    for one in frames:
        place = np.searchsorted(numbers, one)
        count = np.bincount(place, minlength=len(numbers))
        tables.append((np.argsort(place, kind="stable"), count, np.cumsum(count) - count))
    rng = np.random.default_rng(seed)
    for _ in range(replicates):
        drawn = rng.integers(0, len(numbers), len(numbers)) if len(numbers) else np.zeros(0, int)
        yield tuple(_rows(order, count[drawn], start[drawn]) for order, count, start in tables)


def shuffle_chance(
    metric: Callable[[Array], float], uncertainty: Array, replicates: int = 200, seed: int = 0
) -> Chance:
    """Return the chance level of any metric: its values for shuffled u (n,)."""
    check_whole("replicates", replicates)
    rng = np.random.default_rng(seed)
    values = np.array([metric(rng.permutation(uncertainty)) for _ in range(replicates)])
    return Chance(float(values.mean()), *map(float, quantile_interval(values)))


def partition_chance(part: Partition, replicates: int = 1000, seed: int = 0) -> dict[str, Chance]:
    """Return the chance levels of AvU, P(A|C) and P(U|I), computed from the partition alone.

    The means are exact: P(A) for P(A|C), P(U) for P(U|I), P(A) P(C) + P(I) P(U) for AvU. With u
    shuffled, the number of boxes that are accurate and certain is hypergeometric; the intervals
    come from draws of it.
    """
    if not sum(part):
        return dict.fromkeys(METRICS, Chance(*3 * [float("nan")]))
    AC, IC, AU, IU = part
    now = part.metrics()
    A, U = now["P(A)"], now["P(U)"]
    means = {"AvU": A * (1 - U) + (1 - A) * U, "P(A|C)": A, "P(U|I)": U}
    drawn = np.random.default_rng(seed).hypergeometric(AC + AU, IC + IU, AC + IC, replicates)
    table = [
        Partition(int(ac), AC + IC - int(ac), AC + AU - int(ac), IU + int(ac) - AC).metrics()
        for ac in drawn
    ]
    found = {}
    for name in METRICS:
        ends = map(float, quantile_interval(np.array([row[name] for row in table])))
        found[name] = Chance(float("nan") if np.isnan(now[name]) else means[name], *ends)
    return found


def quantile_interval(values: Array) -> Interval:
    """Return the ends of the middle 95 % of values (n,) or (n, K), ignoring NaN; NaN for none."""
    with catch_warnings():
        simplefilter("ignore", RuntimeWarning)  # a column of NaN
        return Interval(*np.nanquantile(values, [0.025, 0.975], axis=0))


def _rows(order: Array, count: Array, start: Array) -> Array:
    """Concatenate the slices ``order[start : start + count]``."""
    offset = np.cumsum(count) - count
    return order[np.repeat(start - offset, count) + np.arange(int(count.sum()))]
