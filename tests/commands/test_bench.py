from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

import boxcov
from boxcov.commands import benchmarking
from boxcov.errors import BoxcovError
from centerpoint_cases import detector_of, frames, pillar_config


@pytest.fixture(scope="module")
def measured():
    config = pillar_config()
    detector, data = detector_of(config), frames(config)
    found = benchmarking.entries(detector, boxcov.fit(detector, data), samples=[3], seed=0)
    return detector, found, benchmarking._measured(detector, found, [data[0][0]], repeats=2, device="cpu")


def test_every_method_has_its_row(measured) -> None:
    _, _, rows = measured
    assert [row["method"] for row in rows] == ["plain", "exact", "mcglm", "mcglm as published", "mc dropout", "glm as published"]
    for row in rows:
        assert {"method", "device", "boxes", "samples", "ms", "ratio", "peak_mib"} <= set(row)
        assert row["low"] <= row["ms"] <= row["high"]
        assert row["ratio"] == pytest.approx(row["ms"] / rows[0]["ms"])
    assert json.loads(json.dumps(rows)) == rows
    assert "extrapolated" in rows[-1]["note"]
    assert "glm as published" in benchmarking.shown(rows)


def test_the_papers_mcglm_is_its_finite_difference(measured) -> None:
    """The same directions, whole passes: the covariance of ``derivative="fd"``."""
    detector, found, _ = measured
    data = frames(pillar_config())
    published = next(entry for entry in found if entry.method == "mcglm as published")
    posterior = boxcov.fit(detector, data)
    ours = boxcov.MCGLM(detector, posterior, samples=3, seed=0, derivative="jvp")(data[0][0]).covariance
    off = (published.call(data[0][0]) - ours).norm() / ours.norm()
    assert float(off) < 0.05


@pytest.mark.parametrize("count", [6, 30])
def test_a_detector_is_told_how_many_boxes(count: int) -> None:
    config = pillar_config()
    told = benchmarking.reporting(detector_of(config), count)
    assert 0.3 * count <= len(told.detect(frames(config, 1)[0][0])) <= count


def test_no_repeats_are_refused() -> None:
    with pytest.raises(BoxcovError, match="at least one frame and one repeat, got frames 3 and repeats 0"):
        benchmarking.run(repeats=0)


def test_a_ratio_that_worsens_by_more_than_half_is_noticed() -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "regression.py"
    spec = importlib.util.spec_from_file_location("regression", path)
    regression = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(regression)
    row = {"device": "cpu", "method": "exact", "samples": None}
    record = {"cpu, exact, samples None": 2.0}
    assert not regression.worsened([{**row, "ratio": 2.9}], record)
    assert regression.worsened([{**row, "ratio": 3.1}], record) == ["cpu, exact, samples None: 3.10 plain detectors, 2.00 on record"]
    assert not regression.worsened([{**row, "method": "another", "ratio": 9.0}], record)
