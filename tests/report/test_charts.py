from __future__ import annotations

import numpy as np
import pytest

from boxcov.evaluate.covariance_metrics import coverage, gaussian_fit
from boxcov.evaluate.curves import curves
from boxcov.report.charts import (
    COVERAGES,
    Bar,
    BarChart,
    Line,
    LineChart,
    reliability_charts,
    runtime_charts,
    threshold_charts,
)
from boxcov.report.study import Method, Study
from boxcov.report.svg import draw_bar_chart, draw_line_chart, legend
from helpers.studies import random_records, random_study


def test_threshold_charts_show_the_curves() -> None:
    study = random_study(seed=2)
    records = study.methods[1].records
    charts = {chart.title: chart for chart in threshold_charts(study)}
    assert list(charts)[:4] == ["AvU, IoU", "P(A|C), IoU", "P(U|I), IoU", "AvU, ℓ₂"]
    line = charts["P(U|I), ℓ₂"].lines[1]
    assert line.name == "sampled"
    np.testing.assert_array_equal(
        line.y, curves(records.iou, records.l2, records.uncertainty).values["P(U|I)"]["l2"]
    )


def test_reliability_charts_show_the_coverage() -> None:
    study = random_study(seed=2)
    records = study.methods[1].records
    (chart,) = reliability_charts(study)
    assert chart.title == "Epistemic covariance"
    assert [line.name for line in chart.lines] == ["exact", "sampled"]  # the baseline has none
    observed = coverage(gaussian_fit(records.errors, records.covariance), COVERAGES)
    np.testing.assert_array_equal(chart.lines[1].y, observed)
    assert [line.style for line in chart.lines] == [0, 1]


def test_an_empty_study_has_no_charts() -> None:
    empty = Study("Empty")
    assert threshold_charts(empty) == reliability_charts(empty) == runtime_charts(empty) == []


def test_a_line_has_gaps_where_values_are_nan() -> None:
    y = np.array([np.nan, 0.0, 0.5, np.nan, 1.0])
    drawn = draw_line_chart(LineChart("t", "x", [Line("a < b", np.linspace(0, 1, 5), y, 0)]))
    path = drawn.split("<title>a &lt; b</title>")[1].split('d="')[1].split('"')[0]
    assert path.count("M") == 2
    assert path.count("L") == 1
    assert "nan" not in drawn
    assert "a < b" not in drawn


def test_bars_are_in_proportion() -> None:
    bars = [Bar("a", 1.0, "", 0), Bar("b", 4.0, "", 1), Bar("c", float("nan"), "not measured", 2)]
    drawn = draw_bar_chart(BarChart("t", bars))
    widths = [float(rect.split('width="')[1].split('"')[0]) for rect in drawn.split("<rect ")[1:]]
    assert widths[1] == pytest.approx(4 * widths[0], abs=0.3)
    assert widths[2] < 2


def test_runtime_names_and_colours() -> None:
    rows = [
        {"method": "new", "device": "gpu", "samples": 10, "ms": 2000.0, "ratio": 1.5},
        {"method": "MC-GLM, k = 10", "device": "gpu", "samples": 10},
        {"method": "new", "ms": 3},
    ]
    study = Study("x", methods=[Method("exact", random_records(0))], runtime=rows)
    gpu, other = runtime_charts(study)
    assert [gpu.title, other.title] == ["Milliseconds per frame, gpu", "Milliseconds per frame"]
    assert [bar.name for bar in gpu.bars] == ["new, k = 10", "MC-GLM, k = 10"]
    assert [bar.text for bar in gpu.bars] == ["2,000 ms (1.5 ×)", "not measured"]
    assert gpu.bars[0].style == other.bars[0].style == 1  # 0 is that of exact


def test_the_legend_names_every_method_and_the_diagonal() -> None:
    assert legend(["exact", "<i>"], with_diagonal=True).count("<li>") == 3
    assert "<i>" not in legend(["<i>"])
