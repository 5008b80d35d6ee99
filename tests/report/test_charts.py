from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from boxcov.evaluate.covariance_metrics import coverage, gaussian_fit
from boxcov.evaluate.quality import curves
from boxcov.report.charts import (
    COVERAGES,
    Line,
    LineChart,
    calibration_charts,
    coverage_charts,
    student_coverage,
    threshold_charts,
)
from boxcov.report.study import Method, Study
from boxcov.report.svg import draw_line_chart, legend, style_class
from helpers.studies import calibrated_records, random_study


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


def test_thresholds_of_a_probability_are_its_values() -> None:
    records = calibrated_records(1)
    as_risk = records.without_covariance(records.risk)
    chart = threshold_charts(Study("x", methods=[Method("risk", as_risk, is_probability=True)]))[2]
    (line,) = chart.lines
    bad = records.iou < 0.4
    expected = [np.mean(records.risk[bad] >= t) for t in line.x]
    np.testing.assert_allclose(line.y, expected)
    assert line.x[-1] == 1


def test_risk_diagram_shows_predicted_and_observed() -> None:
    study = random_study(seed=2)
    records = study.methods[0].records
    chart = calibration_charts(study)[0]
    assert chart.title == "Risk: predicted and observed"
    assert [line.name for line in chart.lines] == ["exact"]  # the others have no risk
    order = np.argsort(records.risk)
    tenth = order[: -(-len(order) // 10)]
    assert chart.lines[0].x[0] == pytest.approx(records.risk[tenth].mean())
    assert chart.lines[0].y[0] == pytest.approx((records.iou[tenth] < 0.4).mean())


def test_coverage_charts_show_regions_and_ellipsoids() -> None:
    study = random_study(seed=2)
    calibrated, epistemic = calibration_charts(study)[1:]
    assert [line.name for line in calibrated.lines] == ["exact: regions", "exact: Student-t"]
    rows = study.methods[0].records[study.methods[0].records.paired]
    errors = np.abs(rows.as_axes().errors)
    inside = [(errors <= rows.regions[:, k]).mean() for k in range(3)]
    np.testing.assert_allclose(calibrated.lines[0].y, inside)
    assert [line.name for line in epistemic.lines] == ["exact", "sampled"]  # the baseline has none
    records = study.methods[1].records
    observed = coverage(gaussian_fit(records.errors, records.covariance), COVERAGES)
    np.testing.assert_array_equal(epistemic.lines[1].y, observed)


def test_lines_of_two_calibrated_methods_look_different() -> None:
    methods = [Method(name, calibrated_records(seed)) for seed, name in enumerate("ab")]
    lines = coverage_charts(Study("two", methods=methods))[0].lines
    assert [line.name for line in lines[1:3]] == ["a: Student-t", "b: regions"]
    assert len({line.style for line in lines}) == 4


def test_errors_of_a_student_t_are_on_the_diagonal() -> None:
    records = calibrated_records(0, frames=40, each=100, fields=("a", "b"))
    rng = np.random.default_rng(1)
    errors = records.scale * rng.standard_t(5, records.boxes.shape)
    records = replace(records, truth=records.boxes - errors, l2=np.ones(len(records)))
    levels, observed = student_coverage(records)
    np.testing.assert_allclose(observed, levels, atol=0.02)  # a Gaussian would be off by 0.05


def test_an_empty_study_has_no_charts() -> None:
    empty = Study("Empty")
    assert threshold_charts(empty) == calibration_charts(empty) == []


def test_a_line_has_gaps_where_values_are_nan() -> None:
    y = np.array([np.nan, 0.0, 0.5, np.nan, 1.0])
    drawn = draw_line_chart(LineChart("t", "x", [Line("a < b", np.linspace(0, 1, 5), y, 0)]))
    path = drawn.split("<title>a &lt; b</title>")[1].split('d="')[1].split('"')[0]
    assert path.count("M") == 2
    assert path.count("L") == 1
    assert "nan" not in drawn
    assert "a < b" not in drawn


def test_the_legend_names_every_method_and_the_diagonal() -> None:
    line = Line("<i>", np.zeros(1), np.zeros(1), 0)
    charts = [LineChart("a", "x", [line, replace(line, name="exact")], with_diagonal=True)]
    assert legend([*charts, *charts]).count("<li>") == 3
    assert "<i>" not in legend(charts)


def test_colours_repeat_with_other_dashes() -> None:
    assert [style_class(number) for number in (1, 9)] == ["c1 d0", "c1 d1"]
