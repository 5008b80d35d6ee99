from __future__ import annotations

import math
import time

import numpy as np
import pytest

from boxcov.errors import BoxcovError
from boxcov.evaluate.intervals import (
    bootstrap,
    partition_chance,
    quantile_interval,
    resample_frames,
    shuffle_chance,
)
from boxcov.evaluate.quality import METRICS, Partition, auroc, partitions, quality


def test_replicates_are_whole_frames() -> None:
    rng = np.random.default_rng(0)
    frame, other = (
        rng.integers(0, 9, 50) * 7,
        np.array([7, 7, 21, 99]),
    )  # 99: a frame that only the other method has
    seen = np.zeros(10)
    for mine, theirs in resample_frames(frame, other, replicates=400, seed=3):
        count = {
            number: (frame[mine] == number).sum() / (frame == number).sum()
            for number in np.unique(frame)
        }
        assert all(times == int(times) for times in count.values())
        times_99 = (other[theirs] == 99).sum()
        assert sum(count.values()) + times_99 == 10  # as many as there are
        assert (other[theirs] == 7).sum() == 2 * count[7]  # the same frames for both
        assert (other[theirs] == 21).sum() == count[21]
        seen += [*count.values(), times_99]
    assert np.allclose(seen / 400, 1, atol=0.15)


def test_the_interval_of_a_mean_agrees_with_theory() -> None:
    rng = np.random.default_rng(0)
    frame = np.repeat(np.arange(400), 5)
    shared = np.repeat(
        rng.normal(size=400), 5
    )  # boxes of one frame are alike: their number is no evidence
    found = bootstrap(lambda rows: shared[rows].mean(), frame, replicates=2000)
    width = 2 * 1.96 * shared.std() / 20
    assert float(found.high - found.low) == pytest.approx(width, rel=0.1)
    assert found.low < shared.mean() < found.high


def test_shared_variation_cancels_in_differences() -> None:
    rng = np.random.default_rng(0)
    frame = np.repeat(np.arange(100), 3)
    shared = np.repeat(rng.normal(size=100), 3)
    a, b = shared + 0.1 + 0.05 * rng.normal(size=300), shared
    found = bootstrap(lambda mine, theirs: a[mine].mean() - b[theirs].mean(), frame, frame)
    assert 0.08 < found.low < 0.1 < found.high < 0.12
    alone = bootstrap(lambda rows: a[rows].mean(), frame)
    assert alone.high - alone.low > 10 * (found.high - found.low)


def test_vectors_nan_seeds_and_empty_arrays() -> None:
    values = np.array([[1.0, np.nan], [3.0, np.nan]])
    found = bootstrap(lambda rows: values[rows].mean(0), np.arange(2))
    assert found.low.tolist()[0] == 1
    assert np.isnan(found.low[1])
    again, other = (
        bootstrap(lambda rows: np.arange(50)[rows].mean(), np.arange(50), seed=seed)
        for seed in (0, 1)
    )
    assert (
        again == bootstrap(lambda rows: np.arange(50)[rows].mean(), np.arange(50), seed=0) != other
    )
    with pytest.raises(BoxcovError, match="at least 1, got 0"):
        bootstrap(np.mean, np.arange(3), replicates=0)
    assert np.isnan(bootstrap(lambda rows: np.nan if not len(rows) else 1.0, np.zeros(0, int)).low)


def test_a_thousand_replicates_of_many_boxes_take_seconds() -> None:
    rng = np.random.default_rng(0)
    n = 20_000
    iou, l2, u, frame = rng.random(n), rng.random(n), rng.random(n), rng.integers(0, 200, n)

    def statistic(rows):
        found = quality(iou[rows], l2[rows], u[rows])
        return [found["AvU"]["IoU"], found["P(U|I)"]["l2"]]

    start = time.perf_counter()
    found = bootstrap(statistic, frame)
    assert time.perf_counter() - start < 30  # 1.5 s on one core
    assert (found.high - found.low < 0.04).all()


@pytest.mark.parametrize("error", ["IoU", "l2"])
def test_partition_chance_agrees_with_shuffling(error: str) -> None:
    rng = np.random.default_rng(0)
    n = 80
    iou, u = rng.random(n), rng.gamma(0.7, 1, n)
    l2 = rng.gamma(2, 1, n)
    expected = partition_chance(partitions(iou, l2, u)[error], replicates=4000)
    now = quality(iou, l2, u)
    assert expected["P(A|C)"].mean == now["P(A)"][error]
    assert expected["P(U|I)"].mean == now["P(U)"][error]
    for metric in METRICS:
        found = shuffle_chance(
            lambda v, metric=metric: quality(iou, l2, v)[metric][error], u, replicates=2000, seed=1
        )
        assert found.mean == pytest.approx(expected[metric].mean, abs=0.006)
        # the two may differ by one box of some 30
        assert found.low == pytest.approx(expected[metric].low, abs=0.035)
        assert found.high == pytest.approx(expected[metric].high, abs=0.035)
        assert found.low < found.mean < found.high


def test_chance_level_of_the_auroc() -> None:
    rng = np.random.default_rng(0)
    bad, u = rng.random(100) < 0.3, rng.random(100)
    assert shuffle_chance(lambda v: auroc(bad, v), u).mean == pytest.approx(0.5, abs=0.01)
    assert shuffle_chance(lambda v: auroc(bad, v), u) == shuffle_chance(
        lambda v: auroc(bad, v), u
    )  # seeded


def test_edges_of_chance() -> None:
    assert all(
        math.isnan(x) for found in partition_chance(Partition(0, 0, 0, 0)).values() for x in found
    )
    all_uncertain = partition_chance(Partition(AC=0, IC=0, AU=3, IU=2))
    assert math.isnan(all_uncertain["P(A|C)"].mean)
    assert math.isnan(all_uncertain["P(A|C)"].low)
    assert all_uncertain["P(U|I)"] == (1, 1, 1)
    assert partition_chance(Partition(1, 0, 0, 0))["AvU"] == (1, 1, 1)
    assert all(math.isnan(x) for x in quantile_interval(np.array([np.nan])))
