"""The numbers of studies/monitor.py."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("scipy", reason="scipy is not installed")


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "studies"))
    import monitor

    yield monitor
    for name in ("monitor", "frame_results"):
        sys.modules.pop(name, None)


def test_median_delay_has_an_interval_by_ranks(study: Any) -> None:
    """Of 30 numbers, those of the ranks 10 and 21 hold the median with 95.7 %."""
    assert study.median_text([float(n) for n in range(10, 0, -1)], 40) == "6 [2, 9]"
    assert study.median_text([float(n) for n in range(30, 0, -1)], 60) == "16 [10, 21]"
    assert study.median_text([4.0] * 30, 60) == "4"
    late = [float(n) for n in range(1, 21)] + [inf] * 10
    assert study.median_text(late, 60) == "16 [10, above 60]"
    assert study.median_text([inf] * 30, 60) == "above 60"
