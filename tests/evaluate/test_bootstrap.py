from __future__ import annotations

import time

import numpy as np
import pytest

from boxcov.errors import BoxcovError
from boxcov.evaluate.bootstrap import bootstrap, paired_difference, resampled
from boxcov.evaluate.quality import quality


def test_replicates_are_whole_frames() -> None:
    rng = np.random.default_rng(0)
    frame, other = (
        rng.integers(0, 9, 50) * 7,
        np.array([7, 7, 21, 99]),
    )  # 99: a frame that only the other method has
    seen = np.zeros(10)
    for mine, theirs in resampled(frame, other, replicates=400, seed=3):
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


def test_interval_of_a_mean_is_that_of_theory() -> None:
    rng = np.random.default_rng(0)
    frame = np.repeat(np.arange(400), 5)
    shared = np.repeat(
        rng.normal(size=400), 5
    )  # boxes of one frame are alike: their number is no evidence
    found = bootstrap(lambda rows: shared[rows].mean(), frame, replicates=2000)
    width = 2 * 1.96 * shared.std() / 20
    assert float(found.high - found.low) == pytest.approx(width, rel=0.1)
    assert found.low < shared.mean() < found.high


def test_pairing_removes_what_both_share() -> None:
    rng = np.random.default_rng(0)
    frame = np.repeat(np.arange(100), 3)
    shared = np.repeat(rng.normal(size=100), 3)
    a, b = shared + 0.1 + 0.05 * rng.normal(size=300), shared
    found = paired_difference(
        lambda rows: a[rows].mean(), frame, lambda rows: b[rows].mean(), frame
    )
    assert 0.08 < found.low < 0.1 < found.high < 0.12
    alone = bootstrap(lambda rows: a[rows].mean(), frame)
    assert alone.high - alone.low > 10 * (found.high - found.low)


def test_several_numbers_nan_seed_and_nothing() -> None:
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
