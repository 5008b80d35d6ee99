from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from boxcov.errors import BoxcovError
from boxcov.evaluate.quality import (
    auroc,
    auroc_from_ranks,
    ause,
    ause_from_ranks,
    ranks,
)


def slow_auroc(bad, u) -> float:
    wins = [
        0.5 if x == y else float(x > y)
        for x, p in zip(u, bad)
        if p
        for y, q in zip(u, bad)
        if not q
    ]
    return sum(wins) / len(wins) if wins else float("nan")


def slow_curve(error, u) -> list[float]:
    """The mean error of the k most certain, averaged over every order that the ties allow."""
    orders = [
        o
        for o in itertools.permutations(range(len(u)))
        if all(u[a] <= u[b] for a, b in itertools.pairwise(o))
    ]
    return [
        float(np.mean([np.mean([error[i] for i in o[:k]]) for o in orders]))
        for k in range(1, len(u) + 1)
    ]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 40), st.integers(1, 12))
def test_auroc_equals_all_pairs(seed: int, n: int, levels: int) -> None:
    rng = np.random.default_rng(seed)
    bad, u = rng.random(n) < 0.3, rng.integers(0, levels, n) / 3
    assert auroc(bad, u) == pytest.approx(slow_auroc(bad, u), nan_ok=True)
    some = rng.random(n) < 0.6
    assert auroc_from_ranks(bad[some], ranks(u)[some]) == pytest.approx(
        slow_auroc(bad[some], u[some]), nan_ok=True
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 5))
def test_ause_equals_the_average_over_orders(seed: int, n: int, levels: int) -> None:
    rng = np.random.default_rng(seed)
    error, u = rng.integers(0, 4, n) / 2, rng.integers(0, levels, n).astype(float)
    expected = np.mean(np.array(slow_curve(error, u)) - np.array(slow_curve(error, error)))
    expected = expected / error.mean() if error.mean() else 0.0
    assert ause(error, u) == pytest.approx(expected, abs=1e-12)
    rows = rng.integers(0, n, 5)
    assert ause_from_ranks(error[rows], ranks(u)[rows], ranks(error)[rows]) == pytest.approx(
        ause(error[rows], u[rows]), abs=1e-12
    )


def test_bounds_and_edges() -> None:
    rng = np.random.default_rng(0)
    error = rng.random(200)
    assert ause(error, error) == 0
    assert ause(error, 3 * error**3) == pytest.approx(0)  # the order alone matters
    assert (
        ause(error, -error)
        > ause(error, rng.random(200))
        > ause(error, error + 0.3 * rng.random(200))
        > 0
    )
    assert math.isnan(auroc(np.ones(3, bool), np.arange(3)))
    assert math.isnan(auroc(np.zeros(3, bool), np.arange(3)))
    assert math.isnan(auroc(np.zeros(0, bool), np.zeros(0)))
    assert math.isnan(ause(np.zeros(0), np.zeros(0)))
    assert (ause(np.ones(1), np.ones(1)), ause(np.zeros(4), np.arange(4))) == (0, 0)
    assert auroc(np.array([True, False]), np.array([np.inf, 1.0])) == 1
    with pytest.raises(BoxcovError, match="NaN"):
        auroc(np.array([True, False]), np.array([np.nan, 1.0]))
