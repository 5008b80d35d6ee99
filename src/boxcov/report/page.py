"""The report as one HTML page that needs no network and no other file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from boxcov._files.output_file import write_text
from boxcov._files.plain_text import printable
from boxcov.detections import Detections
from boxcov.evaluate.summary import class_groups, range_groups, table
from boxcov.report.charts import (
    LineChart,
    calibration_charts,
    gate_charts,
    threshold_charts,
)
from boxcov.report.study import Method, Study
from boxcov.report.svg import draw_line_chart, legend
from boxcov.report.tables import (
    covariance_table,
    format_value,
    group_table,
    html_table,
    key_value_table,
    metric_table,
)
from boxcov.report.verdict import LEVEL, first_method, headline, sentences
from boxcov.report.viewer import pack, viewer_methods
from boxcov.version import __version__

MAX_GROUPS = 200  # classes in a table
SCRIPTS = ("data.js", "stage.js", "details.js", "viewer.js", "start.js")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def write(
    path: str | Path,
    study: Study,
    replicates: int = 200,
    rows: Sequence[Mapping[str, Any]] | None = None,
) -> None:
    """Write the page to ``path``; ``replicates`` is the number of draws behind each interval.

    rows: of ``boxcov.evaluate.table``, if they are known.
    """
    write_text(path, page(study, replicates, rows))


def report(
    path: str | Path, detections: Detections | Mapping[str, Detections], frames: Iterable[Any]
) -> Study:
    """Write the report of detections on labelled frames to ``path``, and return its study.

    detections: of one method, or of several by name; ``boxcov.join_frames`` joins single frames.
    frames: (inputs, targets) of each frame, in the order of ``detections.frame``. The first six are
        shown; ``Study.of`` and ``write`` take a title and another number.
    """
    study = Study.of(detections, frames)
    write(path, study)
    return study


def page(
    study: Study, replicates: int = 200, rows: Sequence[Mapping[str, Any]] | None = None
) -> str:
    """Return the HTML of the page; the arguments are those of ``write``."""
    if rows is None and study.has_boxes:
        rows = table({method.name: method.records for method in study.methods}, replicates)
    data = pack(study)
    is_viewed = data["scenes"] and data["methods"]
    sections = [
        Section("viewer", "Frames", _asset("viewer.html").rstrip()) if is_viewed else None,
        _quality(study, rows or ()),
        _calibration(study),
        _curves(study),
        _runtime(study),
        _settings(study),
    ]
    parts = [section for section in sections if section is not None]
    links = "".join(f'<a href="#{part.id}">{escape(part.title)}</a>' for part in parts)
    return Template(_asset("page.html")).substitute(
        policy=_POLICY,
        title=printable(escape(study.title)),
        style=_asset("page.css"),
        links=links,
        verdict=_verdict(study),
        sections=printable("".join(part.html for part in parts)),
        version=escape(__version__),
        today=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        data=_embed_json(_printable_values(data)),
        script="\n".join(_asset(name) for name in SCRIPTS),
    )


def _verdict(study: Study) -> str:
    """Two sentences and the three numbers that matter."""
    method = first_method(study)
    if method is None:
        return ""
    numbers = headline(method.records)
    inside = f"{100 * numbers.inside[LEVEL]:.0f} %"
    if numbers.is_calibrated:
        tiles = [
            (f"{numbers.auroc:.3f}", f"AUROC of the risk; 1 − score {numbers.baseline:.3f}"),
            (inside, "of the errors inside the 90 % regions"),
            (f"{100 * numbers.ece:.1f} %", "mean gap between risk and share of bad boxes"),
        ]
    else:
        tiles = [
            (f"{numbers.auroc:.3f}", "AUROC of u; 0.5 is chance"),
            (f"{numbers.baseline:.3f}", "AUROC of 1 − score"),
            (inside, "of the errors inside the 90 % ellipsoids"),
        ]
    tiles = [(value if "nan" not in value else "–", text) for value, text in tiles]
    texts = escape(" ".join(sentences(numbers))).replace("1 - score", "1&nbsp;−&nbsp;score")
    texts = texts.replace(" %", "&nbsp;%")
    boxes = "".join(f"<div><b>{escape(b)}</b><span>{escape(t)}</span></div>" for b, t in tiles)
    return f'<div id="verdict"><p>{texts}</p>\n<div class="tiles">{boxes}</div></div>\n'


@dataclass(frozen=True)
class Section:
    """A part of the page with a link to it."""

    id: str
    title: str
    content: str  # HTML

    @property
    def html(self) -> str:
        title = f"<h2>{escape(self.title)}</h2>"
        return f'<section id="{self.id}">{title}\n{self.content}\n</section>\n'


def _quality(study: Study, rows: Sequence[Mapping[str, Any]]) -> Section | None:
    """The metrics of every method and of the baselines on the same boxes."""
    if not study.has_boxes:
        return None
    content = _gate(study) + _text("quality.html") + metric_table(rows)
    covariances = covariance_table(rows)
    if covariances:
        content += _text("covariances.html") + covariances
    return Section("quality", "Quality", content)


def _gate(study: Study) -> str:
    """What one gains by keeping boxes by their risk instead of their score."""
    charts = gate_charts(study)
    if not charts:
        return ""
    return _text("gate.html") + _line_charts(charts)


def _calibration(study: Study) -> Section | None:
    """Does the risk happen as often as it says, and do the regions hold what they promise?"""
    charts = calibration_charts(study)
    if not charts:
        return None
    content = _text("calibration.html") + _line_charts(charts)
    for method in viewer_methods(study):
        if len(method.records):
            groups = {name: headline(method.records[rows]) for name, rows in _groups(method)}
            name = f"<h3>{escape(method.name)}: by class and range</h3>"
            content += name + group_table(groups)
    return Section("calibration", "Calibration", content)


def _groups(method: Method) -> Iterator[tuple[str, Any]]:
    """Yield name and rows of each class, and of each range, that has boxes.

    Of more than ``MAX_GROUPS`` classes those with most boxes.
    """
    records = method.records
    classes = class_groups(records)
    least = sorted(map(len, classes.values()))[-MAX_GROUPS:][0] if classes else 0
    parts = dict([one for one in classes.items() if len(one[1]) >= least][:MAX_GROUPS])
    if {"x", "y"} <= set(records.fields):
        parts |= range_groups(records)
    return ((name, rows) for name, rows in parts.items() if len(rows))


def _curves(study: Study) -> Section | None:
    charts = threshold_charts(study)
    if not charts:
        return None
    content = _text("curves.html") + _line_charts(charts, explained=charts[:1])
    return Section("curves", "Over the threshold", content)


def _runtime(study: Study) -> Section | None:
    if not study.runtime:
        return None
    head = {
        "method": "method",
        "device": "device",
        "boxes": "boxes",
        "samples": "k",
        "ms": "ms",
        "ratio": "× plain",
        "peak_mib": "peak MiB",
    }
    rows = [[format_value(row.get(name)) for name in head] for row in study.runtime]
    return Section("runtime", "Cost", html_table(list(head.values()), rows))


def _settings(study: Study) -> Section:
    frames = {int(frame) for method in study.methods for frame in np.unique(method.records.frame)}
    counts = {"Frames with predictions": len(frames), "Classes": ", ".join(study.classes) or None}
    notes = {f"Method: {method.name}": method.note for method in study.methods if method.note}
    entries = key_value_table({**study.about, **counts, **notes})
    summary = "<summary>Data, detector, posterior, versions, seeds</summary>"
    return Section("settings", "Settings", f"<details class=more>{summary}{entries}</details>")


def _line_charts(charts: Sequence[LineChart], explained: Sequence[LineChart] | None = None) -> str:
    """Charts below a legend: of all of them, unless the lines of some explain the others."""
    drawings = "".join(f"<figure>{draw_line_chart(chart)}</figure>" for chart in charts)
    return f'{legend(explained or charts)}<div class="charts">{drawings}</div>'


def _text(name: str) -> str:
    return _asset(name).replace("\n", " ")


def _asset(name: str) -> str:
    return (files("boxcov.report") / "assets" / name).read_text(encoding="utf-8")


def _printable_values(value: Any) -> Any:
    """Return a JSON value whose texts cannot change the direction or order of what is shown."""
    if isinstance(value, dict):
        return {key: _printable_values(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_printable_values(entry) for entry in value]
    return printable(value) if isinstance(value, str) else value


def _embed_json(data: object) -> str:
    """Return JSON that cannot end its script element, whatever names it contains."""
    text = json.dumps(data, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c")
