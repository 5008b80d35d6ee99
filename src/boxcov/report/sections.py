"""The sections of the page, each HTML text from a study; empty where the study has nothing for it."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

import numpy as np

from boxcov.report.charts import Bar, Line, bar_chart, legend, line_chart
from boxcov.report.study import Study
from boxcov.report.tables import pairs, share, shown, table
from boxcov.report.viewer import viewer

def contents(study: Study) -> str:
    """Links to the sections."""
    return ""

def provenance(study: Study) -> str:
    frames = {int(frame) for method in study.methods for frame in np.unique(method.records.frame)}
    counts = {"Frames with predictions": len(frames), "Methods": len(study.methods), "Classes": ", ".join(study.classes) or None}
    return _section("about", "What was evaluated", pairs({**study.about, **counts}))

def quality(study): return ""
def curves(study): return ""
def reliability(study): return ""
def by_class_and_range(study): return ""

def runtime(study: Study) -> str:
    """Bars of the time a frame takes, device by device, and the table behind them."""
    if not study.runtime:
        return ""
    style = {method.name: i for i, method in enumerate(study.methods)}
    devices = list(dict.fromkeys(str(row.get("device", "")) for row in study.runtime))
    charts = []
    for device in devices:
        rows = [row for row in study.runtime if str(row.get("device", "")) == device]
        bars = [Bar(_run_name(row), _number(row.get("ms")), _run_text(row), style.get(str(row.get("method")), len(style) + i)) for i, row in enumerate(rows)]
        charts.append(f"<figure>{bar_chart(f'Milliseconds a frame, {device}' if device else 'Milliseconds a frame', bars)}</figure>")
    names = {"method": "method", "device": "device", "boxes": "boxes", "samples": "k", "ms": "ms", "ratio": "× plain", "peak_mib": "peak MiB"}
    rows = [[shown(row.get(name)) for name in names] for row in study.runtime]
    return _section("runtime", "Run time", f'<div class="charts one">{"".join(charts)}</div>{table(list(names.values()), rows)}')


def look(study: Study, stage: bool) -> str:
    """The threshold's counts and, where there is a scene, the bird's-eye picture."""
    if not study.methods:
        return ""
    return _section("viewer", "Bird's-eye view" if stage else "Threshold", viewer(stage))


def _run_name(row: Mapping[str, Any]) -> str:
    return str(row.get("method", "")) + (f", k = {row['samples']}" if row.get("samples") else "")


def _run_text(row: Mapping[str, Any]) -> str:
    ratio = _number(row.get("ratio"))
    return f"{shown(_number(row.get('ms')))} ms" + (f" ({shown(ratio)} ×)" if np.isfinite(ratio) else "")


def _number(value: Any) -> float:
    return float("nan") if value is None else float(value)


def _section(identity: str, title: str, content: str) -> str:
    return f'<section id="{identity}"><h2>{escape(title)}</h2>\n{content}\n</section>\n'
