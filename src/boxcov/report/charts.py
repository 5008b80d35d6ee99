"""The charts of a study, described once; ``svg`` and ``figures`` draw them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcov.evaluate.covariance_metrics import coverage, gaussian_fit
from boxcov.evaluate.curves import curves
from boxcov.evaluate.quality import ERRORS, METRICS
from boxcov.report.study import Study
from boxcov.report.tables import ERROR_NAMES, format_value

Array = NDArray[Any]
COVERAGES = np.array([0.05, *np.arange(1, 10) / 10, 0.95, 0.99])
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


@dataclass(frozen=True)
class Bar:
    """One horizontal bar; a value of NaN has no bar."""

    name: str
    value: float
    text: str  # behind the bar
    style: int


@dataclass(frozen=True)
class BarChart:
    title: str
    bars: Sequence[Bar]


def threshold_charts(study: Study) -> list[LineChart]:
    """Return the paper's charts: each metric over the Gamma quantile of u, error by error."""
    if not study.has_boxes:
        return []
    found = [curves(m.records.iou, m.records.l2, m.records.uncertainty) for m in study.methods]
    charts = []
    for error in ERRORS:
        for metric in METRICS:
            lines = [
                Line(method.name, curve.thresholds, curve.values[metric][error], i)
                for i, (method, curve) in enumerate(zip(study.methods, found))
            ]
            title = f"{metric}, {ERROR_NAMES[error]}"
            charts.append(LineChart(title, "threshold (quantile of u)", lines))
    return charts


def reliability_charts(study: Study) -> list[LineChart]:
    """Return observed over nominal coverage, for epistemic and for calibrated covariances."""
    charts = []
    for title, name in (
        ("Epistemic covariance", "covariance"),
        ("Calibrated covariance", "predictive"),
    ):
        lines = []
        for i, method in enumerate(study.methods):
            records = method.records.as_axes() if name == "predictive" else method.records
            covariance = getattr(records, name)
            if covariance is not None and method.records.paired.any():
                errors = records.errors_under(covariance)
                observed = coverage(gaussian_fit(errors, covariance), COVERAGES)
                lines.append(Line(method.name, COVERAGES, observed, i, with_markers=True))
        if lines:
            labels = ("nominal coverage", lines, "observed coverage")
            charts.append(LineChart(title, *labels, with_diagonal=True))
    return charts


def runtime_charts(study: Study) -> list[BarChart]:
    """Return milliseconds per frame, one chart per device; evaluated methods keep their colour."""
    styles = {method.name: i for i, method in enumerate(study.methods)}
    bars: dict[str, list[Bar]] = {}
    for row in study.runtime:
        style = styles.setdefault(str(row.get("method", "")), len(styles))
        bar = Bar(_runtime_name(row), _number(row.get("ms")), _runtime_text(row), style)
        bars.setdefault(str(row.get("device") or ""), []).append(bar)
    return [
        BarChart(f"Milliseconds per frame, {device}" if device else "Milliseconds per frame", some)
        for device, some in bars.items()
    ]


def _number(value: Any) -> float:
    return float("nan") if value is None else float(value)


def _runtime_name(row: Mapping[str, Any]) -> str:
    name, samples = str(row.get("method", "")), row.get("samples")
    return name if not samples or f"k = {samples}" in name else f"{name}, k = {samples}"


def _runtime_text(row: Mapping[str, Any]) -> str:
    ms, ratio = _number(row.get("ms")), _number(row.get("ratio"))
    if np.isnan(ms):
        return "not measured"
    return f"{format_value(ms)} ms" + ("" if np.isnan(ratio) else f" ({format_value(ratio)} ×)")
