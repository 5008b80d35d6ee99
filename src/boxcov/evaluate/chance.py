"""What a metric is worth without knowledge: its value when the same u are dealt out to the boxes at random."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from boxcov.errors import BoxcovError
from boxcov.evaluate.quality import METRICS, Partition

Array = NDArray[Any]


class Chance(NamedTuple):
    """The mean under shuffling, and the interval that holds 95 % of the shuffles."""

    mean: float
    low: float
    high: float


def shuffled(
    metric: Callable[[Array], float], uncertainty: Array, replicates: int = 200, seed: int = 0
) -> Chance:
    """``metric`` of a shuffled u (n,), for any metric.

    >>> first = shuffled(lambda u: float(u[0]), np.array([1.0, 3.0]), replicates=400)
    >>> first.low, round(first.mean), first.high
    (1.0, 2, 3.0)
    """
    if replicates < 1:
        raise BoxcovError(f"replicates must be at least 1, got {replicates}")
    rng = np.random.default_rng(seed)
    values = np.array([metric(rng.permutation(uncertainty)) for _ in range(replicates)])
    return Chance(float(values.mean()), *interval(values))


def chance(part: Partition, replicates: int = 1000, seed: int = 0) -> dict[str, Chance]:
    """AvU, P(A|C) and P(U|I) of a shuffled u, from the partition: as many accurate and as many certain boxes, but at random.

    The mean is exact: P(A) for P(A|C), P(U) for P(U|I), P(A) P(C) + P(I) P(U) for AvU. How many accurate boxes are certain is a
    hypergeometric number; the interval is from draws of it.

    >>> chance(Partition(AC=50, IC=0, AU=0, IU=50))["P(U|I)"].mean
    0.5
    """
    AC, IC, AU, IU = part
    total, now = sum(part), part.metrics()
    A, U = now["P(A)"], now["P(U)"]
    means = {"AvU": A * (1 - U) + (1 - A) * U, "P(A|C)": A, "P(U|I)": U}
    if not total:
        return {name: Chance(*3 * [float("nan")]) for name in METRICS}
    drawn = np.random.default_rng(seed).hypergeometric(AC + AU, IC + IU, AC + IC, replicates)
    table = [
        Partition(int(ac), AC + IC - int(ac), AC + AU - int(ac), IU + int(ac) - AC).metrics()
        for ac in drawn
    ]
    found = {}
    for name in METRICS:
        low, high = interval(np.array([row[name] for row in table]))
        found[name] = Chance(float("nan") if np.isnan(now[name]) else means[name], low, high)
    return found


def lift(value: float, by_chance: float) -> float:
    """How many times better than chance; NaN where chance is nothing.

    >>> lift(0.9, 0.6)
    1.5
    """
    return value / by_chance if by_chance else float("nan")


def interval(values: Array, level: float = 0.95) -> tuple[float, float]:
    """The middle ``level`` of the values that are numbers; NaN without any.

    >>> interval(np.arange(101.0), 0.5)
    (25.0, 75.0)
    """
    known = values[~np.isnan(values)]
    if not len(known):
        return float("nan"), float("nan")
    low, high = np.quantile(known, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
