"""What the plots of a study show, as plain lines and bars: the page and the figures for papers draw the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcov.evaluate.covariance_metrics import coverage, gaussian_fit
from boxcov.evaluate.curves import curves
from boxcov.evaluate.quality import ERRORS, METRICS
from boxcov.report.study import Study
from boxcov.report.tables import shown

Array = NDArray[Any]
COVERAGES = np.array([0.05, *np.arange(1, 10) / 10, 0.95, 0.99])


@dataclass(frozen=True)
class Line:
    """One line of a plot; ``style`` is the number of its method, so that a method looks the same in every plot."""

    name: str
    x: Array  # (n,)
    y: Array  # (n,) NaN leaves a gap
    style: int
    marks: bool = False


@dataclass(frozen=True)
class Bar:
    """One bar of a plot."""

    name: str
    value: float  # NaN: no bar
    text: str  # beside the bar
    style: int


def threshold_lines(study: Study) -> dict[tuple[str, str], list[Line]]:
    """AvU, P(A|C) and P(U|I) of all methods over the Gamma quantile of u, by (metric, error): the paper's plots.

    >>> sorted(threshold_lines(Study("Nothing yet")))[0]
    ('AvU', 'IoU')
    """
    found = [curves(m.records.iou, m.records.l2, m.records.uncertainty) for m in study.methods]
    return {
        (metric, error): [
            Line(method.name, curve.thresholds, curve.values[metric][error], i)
            for i, (method, curve) in enumerate(zip(study.methods, found))
        ]
        for metric in METRICS
        for error in ERRORS
    }


def reliability_lines(study: Study) -> dict[str, list[Line]]:
    """Observed over nominal coverage of the errors by their covariances, by kind of covariance; methods that have none are left out.

    >>> reliability_lines(Study("Nothing yet"))
    {}
    """
    panels: dict[str, list[Line]] = {}
    for title, kind in (
        ("Covariance from the weights", "covariance"),
        ("Calibrated covariance", "predictive"),
    ):
        for i, method in enumerate(study.methods):
            covariance, errors = getattr(method.records, kind), method.records.errors
            if covariance is not None and method.records.paired.any():
                observed = coverage(gaussian_fit(errors, covariance), COVERAGES)
                panels.setdefault(title, []).append(
                    Line(method.name, COVERAGES, observed, i, marks=True)
                )
    return panels


def runtime_bars(study: Study) -> dict[str, list[Bar]]:
    """Milliseconds a frame, by device; a method that was evaluated has its colour.

    >>> runtime_bars(Study("Speed", runtime=[{"method": "exact", "device": "cpu", "ms": 12.5, "ratio": 1.5}]))["cpu"][0].text
    '12.5 ms (1.5 ×)'
    """
    known = {method.name: i for i, method in enumerate(study.methods)}
    styles: dict[str, int] = dict(known)
    bars: dict[str, list[Bar]] = {}
    for row in study.runtime:
        name = str(row.get("method", ""))
        style = styles.setdefault(name, len(styles))
        bars.setdefault(str(row.get("device") or ""), []).append(
            Bar(_with_samples(row), number(row.get("ms")), _time(row), style)
        )
    return bars


def number(value: Any) -> float:
    """A number, NaN for none.

    >>> number(3), number(None)
    (3.0, nan)
    """
    return float("nan") if value is None else float(value)


def _with_samples(row: Mapping[str, Any]) -> str:
    name, samples = str(row.get("method", "")), row.get("samples")
    return name if not samples or f"k = {samples}" in name else f"{name}, k = {samples}"


def _time(row: Mapping[str, Any]) -> str:
    ms, ratio = number(row.get("ms")), number(row.get("ratio"))
    if np.isnan(ms):
        return "not measured"
    return f"{shown(ms)} ms" + ("" if np.isnan(ratio) else f" ({shown(ratio)} ×)")
