"""The charts of a study, described once; ``svg`` and ``figures`` draw them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcov.errors import import_package
from boxcov.evaluate.covariance_metrics import coverage, gaussian_fit, region_coverage
from boxcov.evaluate.quality import ERRORS, METRICS, curves
from boxcov.evaluate.records import Records
from boxcov.evaluate.summary import region_shares
from boxcov.report.study import Method, Study, thin_points
from boxcov.report.tables import ERROR_NAMES

Array = NDArray[Any]
COVERAGES = np.array([0.05, *np.arange(1, 10) / 10, 0.95, 0.99])
RISK_BINS = 10  # of the reliability diagram, with equal numbers of boxes
COLOURS = 8  # number of distinct colours; further methods repeat them with other dashes


@dataclass(frozen=True)
class Line:
    """One line; ``style`` is the number of its method, so that a method always looks the same."""

    name: str
    x: Array  # (n,)
    y: Array  # (n,), NaN leaves a gap
    style: int
    with_markers: bool = False


@dataclass(frozen=True)
class LineChart:
    """Lines over [0, 1] x [0, 1]."""

    title: str
    x_label: str
    lines: Sequence[Line]
    y_label: str = ""
    with_diagonal: bool = False


def threshold_charts(study: Study) -> list[LineChart]:
    """Return each metric over a threshold, error by error.

    The threshold is the risk itself where u is a probability, else the paper's Gamma quantile of u.
    """
    if not study.has_boxes:
        return []
    found = [
        curves(m.records.iou, m.records.l2, m.records.uncertainty, by_quantile=not m.is_probability)
        for m in study.methods
    ]
    charts = []
    for error in ERRORS:
        for metric in METRICS:
            lines = [
                Line(method.name, curve.thresholds, curve.values[metric][error], i)
                for i, (method, curve) in enumerate(zip(study.methods, found))
            ]
            title = f"{metric}, {ERROR_NAMES[error]}"
            charts.append(LineChart(title, "threshold (risk, or quantile of u)", lines))
    return charts


def calibration_charts(study: Study) -> list[LineChart]:
    """Return the reliability diagram of the risk, and coverage over level; those with data."""
    return [*reliability_charts(study), *coverage_charts(study)]


def reliability_charts(study: Study) -> list[LineChart]:
    """Return the reliability diagram of the risk, if a method has one."""
    lines = [
        Line(method.name, *risk_bins(method.records), i, with_markers=True)
        for i, method in _with_risk(study)
    ]
    labels = ("risk, mean of a tenth of the boxes", lines, "share of bad boxes")
    return [LineChart("Risk: predicted and observed", *labels, with_diagonal=True)] if lines else []


def _with_risk(study: Study) -> list[tuple[int, Method]]:
    """Return the methods that have boxes with a risk, with their numbers."""
    methods = enumerate(study.methods)
    return [(i, m) for i, m in methods if m.records.risk is not None and len(m.records)]


def risk_bins(records: Records) -> tuple[Array, Array]:
    """Return mean risk and share of bad boxes in bins of equal numbers of boxes, by risk."""
    assert records.risk is not None
    order = np.argsort(records.risk, kind="stable")
    bins = [rows for rows in np.array_split(order, RISK_BINS) if len(rows)]
    predicted = np.array([records.risk[rows].mean() for rows in bins])
    return predicted, np.array([records.bad[rows].mean() for rows in bins])


def gate_charts(study: Study) -> list[LineChart]:
    """Return the share of bad boxes among those kept, ordered by risk and by score; if known."""
    methods = _with_risk(study)
    if not methods:
        return []
    lines = [Line(f"{m.name}: lowest risk first", *kept_bad(m.records), i) for i, m in methods]
    first = methods[0][1].records
    by_score = kept_bad(first, 1 - first.scores)
    lines.append(Line("highest score first", *by_score, len(study.methods)))
    labels = ("share of the boxes kept", lines, "bad boxes among them")
    return [LineChart("Bad boxes behind a gate", *labels)]


def kept_bad(records: Records, order: Array | None = None) -> tuple[Array, Array]:
    """Return shares of kept boxes, from the lowest ``order`` (n,) up, and of bad ones among them.

    The order is the risk unless given. Equal values are kept together.
    """
    values = np.asarray(records.risk if order is None else order)
    ranks = np.argsort(values, kind="stable")
    last = np.append(np.diff(values[ranks]) > 0, True)  # of equal values
    kept = np.arange(1, len(values) + 1)
    share = np.cumsum(records.bad[ranks]) / kept
    return thin_points(kept[last] / len(values), 200), thin_points(share[last], 200)


def coverage_charts(study: Study) -> list[LineChart]:
    """Return the share of the errors inside regions, Student-t quantiles and ellipsoids."""
    calibrated, epistemic = [], []
    for i, method in enumerate(study.methods):
        rows = method.records[method.records.paired]
        if not len(rows):
            continue
        if rows.regions is not None:
            levels, shares = map(np.array, zip(*region_shares(rows).items()))
            line = Line(f"{method.name}: regions", levels, shares, i, True)
            other = i + len(study.methods)  # the style of no method
            calibrated += [line, Line(f"{method.name}: Student-t", *student_coverage(rows), other)]
        if rows.covariance is not None:
            fit = gaussian_fit(rows.errors_under(rows.covariance), rows.covariance)
            observed = coverage(fit, COVERAGES)
            epistemic.append(Line(method.name, COVERAGES, observed, i, with_markers=True))
    kinds = {"calibrated regions": calibrated, "epistemic ellipsoids": epistemic}
    return [
        LineChart(f"Errors inside the {kind}", "level", lines, "share of the errors", True)
        for kind, lines in kinds.items()
        if lines
    ]


def student_coverage(records: Records) -> tuple[Array, Array]:
    """Return levels, and the share of the errors inside the Student-t's own quantiles."""
    assert records.scale is not None
    quantile = import_package("scipy.stats").t.ppf
    errors = records.as_axes().errors
    widths = [
        records.scale * quantile((1 + level) / 2, np.array(records.dof)) for level in COVERAGES
    ]
    return COVERAGES, np.array([region_coverage(errors, width) for width in widths])
