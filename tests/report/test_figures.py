from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from boxcov.evaluate.covariance_metrics import coverage, gaussian_fit
from boxcov.evaluate.curves import curves
from boxcov.evaluate.geometry import corners
from boxcov.report.charts import bar_chart, line_chart
from boxcov.report.figures import write_figures
from boxcov.report.series import (
    COVERAGES,
    Bar,
    Line,
    reliability_lines,
    runtime_bars,
    threshold_lines,
)
from boxcov.report.study import Method, Scene, Study
from helpers.studies import random_records, random_study


def size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")


def test_figures_are_written(tmp_path: Path) -> None:
    made = write_figures(tmp_path / "new" / "folder", random_study(frames=6))
    assert [path.name for path in made] == [
        "curves.png",
        "reliability.png",
        "runtime.png",
        "bev-0.png",
        "bev-1.png",
        "bev-2.png",
    ]
    assert all(min(size(path)) > 300 for path in made)
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == sorted(
        path.name for path in made
    )


def test_figures_of_little(tmp_path: Path) -> None:
    assert write_figures(tmp_path, Study("Nothing")) == []
    empty = Scene("empty", np.zeros((0, 2)), np.zeros((0, 9)), np.zeros(0, int))
    bare = Study(
        "Bare",
        methods=[Method("_hidden $x$", random_records(0, covariance=False)[:0])],
        scenes={7: empty},
    )
    assert [path.name for path in write_figures(tmp_path, bare)] == ["bev-7.png"]
    plain = Study(
        "Plain",
        methods=[Method("$\\frac{", random_records(0, covariance=False))],
        scenes={0: empty},
    )
    assert [path.name for path in write_figures(tmp_path, plain)] == ["curves.png", "bev-0.png"]
    images = Study(
        "Images",
        methods=[Method("m", random_records(0, fields=("x1", "y1", "x2", "y2")))],
        scenes={0: empty},
    )
    assert [path.name for path in write_figures(tmp_path, images)] == [
        "curves.png",
        "reliability.png",
    ]


def test_lines_are_those_of_evaluate() -> None:
    study = random_study(seed=2)
    records = study.methods[1].records
    line = threshold_lines(study)["P(U|I)", "l2"][1]
    assert line.name == "sampled"
    np.testing.assert_array_equal(
        line.y, curves(records.iou, records.l2, records.uncertainty).values["P(U|I)"]["l2"]
    )
    panels = reliability_lines(study)
    assert [line.name for line in panels["Covariance from the weights"]] == [
        "exact",
        "sampled",
    ]  # the baseline has none
    observed = coverage(gaussian_fit(records.errors, records.covariance), COVERAGES)
    np.testing.assert_array_equal(panels["Covariance from the weights"][1].y, observed)
    assert [line.style for line in panels["Covariance from the weights"]] == [0, 1]


def test_a_line_has_gaps_where_nothing_is_known() -> None:
    y = np.array([np.nan, 0.0, 0.5, np.nan, 1.0])
    drawn = line_chart("t", "x", [Line("a", np.linspace(0, 1, 5), y, 0)])
    path = drawn.split("<title>a</title>")[1].split('d="')[1].split('"')[0]
    assert path.count("M") == 2
    assert path.count("L") == 1
    assert "nan" not in drawn


def test_bars_are_in_proportion() -> None:
    drawn = bar_chart(
        "t", [Bar("a", 1.0, "", 0), Bar("b", 4.0, "", 1), Bar("c", float("nan"), "not measured", 2)]
    )
    widths = [
        float(part.split('"')[0])
        for part in drawn.split("<rect ")[1:]
        for part in [part.split('width="')[1]]
    ]
    assert widths[1] == pytest.approx(4 * widths[0], abs=0.3)
    assert widths[2] < 2


def test_runtime_names_and_colours() -> None:
    rows = [
        {"method": "new", "device": "gpu", "samples": 10, "ms": 2000.0},
        {"method": "MC-GLM, k = 10", "device": "gpu", "samples": 10},
        {"method": "new", "ms": 3},
    ]
    bars = runtime_bars(Study("x", methods=[Method("exact", random_records(0))], runtime=rows))
    assert [bar.name for bar in bars["gpu"]] == ["new, k = 10", "MC-GLM, k = 10"]
    assert [bar.text for bar in bars["gpu"]] == ["2,000 ms", "not measured"]
    assert bars["gpu"][0].style == bars[""][0].style == 1  # 0 is that of exact


def test_corners_turn_with_the_heading() -> None:
    (corner,) = corners(np.array([[1.0, 2.0, 2.0, 4.0, np.pi / 2]]))
    np.testing.assert_allclose(corner, [[0, 4], [2, 4], [2, 0], [0, 0], [0, 4]], atol=1e-12)
