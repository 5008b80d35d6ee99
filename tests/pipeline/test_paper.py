from __future__ import annotations

import numpy as np
import pytest

from boxcov.evaluate.quality import Partition
from boxcov.pipeline.reproduce.paper import bounds, shares


@pytest.mark.parametrize("seed", range(20))
def test_shares_equal_those_of_the_partition(seed) -> None:
    counts = Partition(*(int(n) for n in np.random.default_rng(seed).integers(1, 1000, 4)))
    metrics = counts.metrics()
    found = shares(metrics["AvU"], metrics["P(A|C)"], metrics["P(U|I)"])
    assert pytest.approx((metrics["P(U)"], metrics["P(A)"])) == (found.P_U, found.P_A)


@pytest.mark.parametrize("seed", range(20))
def test_bounds_hold_after_rounding(seed) -> None:
    rng = np.random.default_rng(seed)
    counts = Partition(*(int(n) for n in rng.integers(100, 1000, 4)))
    metrics = counts.metrics()
    low, high = bounds(*(round(metrics[name], 2) for name in ("AvU", "P(A|C)", "P(U|I)")))
    assert low.P_U - 1e-3 <= metrics["P(U)"] <= high.P_U + 1e-3
    assert low.P_A - 1e-3 <= metrics["P(A)"] <= high.P_A + 1e-3
