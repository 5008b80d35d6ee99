from __future__ import annotations

import math

import numpy as np
import pytest

from boxcov.evaluate.chance import chance, interval, lift, shuffled
from boxcov.evaluate.quality import METRICS, Partition, partitions, quality
from boxcov.evaluate.ranking import auroc


@pytest.mark.parametrize("error", ["IoU", "l2"])
def test_agrees_with_shuffles_and_with_the_shares(error: str) -> None:
    rng = np.random.default_rng(0)
    n = 80
    iou, u = rng.random(n), rng.gamma(0.7, 1, n)
    l2 = rng.gamma(2, 1, n)
    expected = chance(partitions(iou, l2, u)[error], replicates=4000)
    now = quality(iou, l2, u)
    assert expected["P(A|C)"].mean == now["P(A)"][error]
    assert expected["P(U|I)"].mean == now["P(U)"][error]
    for metric in METRICS:
        found = shuffled(
            lambda v, metric=metric: quality(iou, l2, v)[metric][error], u, replicates=2000, seed=1
        )
        assert found.mean == pytest.approx(expected[metric].mean, abs=0.006)
        # the two may differ by one box of some 30
        assert found.low == pytest.approx(expected[metric].low, abs=0.035)
        assert found.high == pytest.approx(expected[metric].high, abs=0.035)
        assert found.low < found.mean < found.high


def test_ranks_by_chance() -> None:
    rng = np.random.default_rng(0)
    bad, u = rng.random(100) < 0.3, rng.random(100)
    assert shuffled(lambda v: auroc(bad, v), u).mean == pytest.approx(0.5, abs=0.01)
    assert shuffled(lambda v: auroc(bad, v), u) == shuffled(lambda v: auroc(bad, v), u)  # seeded


def test_edges() -> None:
    assert all(math.isnan(x) for found in chance(Partition(0, 0, 0, 0)).values() for x in found)
    all_uncertain = chance(Partition(AC=0, IC=0, AU=3, IU=2))
    assert math.isnan(all_uncertain["P(A|C)"].mean)
    assert math.isnan(all_uncertain["P(A|C)"].low)
    assert all_uncertain["P(U|I)"] == (1, 1, 1)
    assert chance(Partition(1, 0, 0, 0))["AvU"] == (1, 1, 1)
    assert math.isnan(lift(0.0, 0.0))
    assert all(math.isnan(x) for x in interval(np.array([np.nan])))
