from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import boxcov
from boxcov.errors import BoxcovError
from boxcov.evaluate.quality import (
    auroc,
    auroc_from_ranks,
    ause,
    ause_from_ranks,
    curves,
    partition,
    quality,
    ranks,
)

NAN = float("nan")


def slow_quality(iou, l2, u) -> dict:
    """Counting, in fractions, so that a number equal to the mean is known to be."""
    threshold = sum(map(Fraction, u)) / max(len(u), 1)
    paired = [i for i in range(len(u)) if not math.isnan(l2[i])]
    mean_error = sum(Fraction(l2[i]) for i in paired) / max(len(paired), 1)
    cases = {
        "IoU": [(iou[i] >= 0.4, u[i] < threshold) for i in range(len(u))],
        "l2": [(l2[i] < mean_error, u[i] < threshold) for i in paired],
    }
    table: dict = {}
    for error, rows in cases.items():
        AC, IC, AU, IU = (
            rows.count(kind)
            for kind in [(True, True), (False, True), (True, False), (False, False)]
        )
        n = len(rows)
        table[error] = {
            "AvU": (AC + IU) / n if n else NAN,
            "P(A|C)": AC / (AC + IC) if AC + IC else NAN,
            "P(U|I)": IU / (IC + IU) if IC + IU else NAN,
            "P(U)": (AU + IU) / n if n else NAN,
            "P(A)": (AC + AU) / n if n else NAN,
        }
    return {
        metric: {error: table[error][metric] for error in table}
        for metric in ("AvU", "P(A|C)", "P(U|I)", "P(U)", "P(A)")
    }


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 25), st.integers(1, 9), st.floats(0, 1))
def test_equals_brute_force(seed: int, n: int, levels: int, missing: float) -> None:
    rng = np.random.default_rng(seed)
    iou = rng.integers(0, 6, n) / 5
    l2 = np.where(rng.random(n) < missing, NAN, rng.integers(0, levels, n) / 4)
    u = rng.integers(0, levels, n) / 8  # ties, often with the mean itself
    np.testing.assert_equal(
        quality(iou, l2, u), slow_quality(iou.tolist(), l2.tolist(), u.tolist())
    )


def test_public_name() -> None:
    found = boxcov.evaluate.quality(
        errors_iou=np.array([0.9, 0.1]),
        errors_l2=np.array([0.1, 0.9]),
        uncertainty=np.array([1, 2]),
    )
    assert found["AvU"] == {"IoU": 1.0, "l2": 1.0}


def test_empty_partitions_are_nan() -> None:
    all_uncertain = quality(
        np.array([0.9, 0.1, 0.3]), np.full(3, 0.1), np.full(3, 0.1)
    )  # equal u: none below the mean
    assert all_uncertain["P(U)"]["IoU"] == 1
    assert math.isnan(all_uncertain["P(A|C)"]["IoU"])
    assert all_uncertain["P(A)"]["l2"] == 0  # equal distances: none below the mean
    all_accurate = quality(np.full(3, 0.4), np.full(3, NAN), np.arange(3))
    assert math.isnan(all_accurate["P(U|I)"]["IoU"])
    assert all(math.isnan(by_error["l2"]) for by_error in all_accurate.values())
    assert all(
        math.isnan(value)
        for by_error in quality([], [], []).values()
        for value in by_error.values()
    )
    one = quality(np.array([0.0]), np.array([NAN]), np.array([5.0]))
    assert (one["AvU"]["IoU"], one["P(U|I)"]["IoU"]) == (1.0, 1.0)


@pytest.mark.parametrize("form", [torch.from_numpy, np.ndarray.tolist])
def test_tensors_and_lists_are_accepted(form) -> None:
    arrays = (
        np.array([0.8, 0.7, 0.1, 0.0]),
        np.array([0.2, 0.4, 0.9, np.nan]),
        np.array([1.0, 3.0, 2.0, 6.0]),
    )
    given = [form(array) for array in arrays]
    assert quality(*given) == quality(*arrays)
    assert np.array_equal(
        curves(*given).values["AvU"]["l2"], curves(*arrays).values["AvU"]["l2"], equal_nan=True
    )


def test_infinite_and_huge_uncertainties_are_uncertain() -> None:
    for huge in (np.inf, 1.7e308):
        found = quality(
            np.array([0.9, 0.8, 0.1, 0.1]), np.full(4, NAN), np.array([0.1, 1e9, huge, huge])
        )
        assert found["AvU"]["IoU"] == 1.0


def test_partition_counts() -> None:
    accurate, uncertain = np.array([1, 1, 0, 0, 0], bool), np.array([0, 1, 0, 1, 1], bool)
    assert partition(accurate, uncertain)._asdict() == {"AC": 1, "IC": 1, "AU": 1, "IU": 2}
    assert sum(partition(accurate[:0], uncertain[:0])) == 0


def test_mistakes_are_named() -> None:
    with pytest.raises(BoxcovError, match="1 of 2 uncertainties are NaN"):
        quality(np.zeros(2), np.zeros(2), np.array([1.0, NAN]))
    with pytest.raises(BoxcovError, match="same length"):
        quality(np.zeros(2), np.zeros(2), np.zeros(3))
    with pytest.raises(BoxcovError, match="IoU is NaN"):
        quality(np.array([NAN]), np.zeros(1), np.zeros(1))


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
