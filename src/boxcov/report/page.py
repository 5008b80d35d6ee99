"""The report as one HTML page that needs no network and no other file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from boxcov.report import tables
from boxcov.report.charts import LineChart, calibration_charts, gate_charts, threshold_charts
from boxcov.report.study import Method, Study
from boxcov.report.svg import draw_line_chart, legend
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
    every = {  # name and title, to HTML; empty ones are left out
        ("viewer", "Frames"): _asset("viewer.html").rstrip() if is_viewed else "",
        ("quality", "Quality"): _quality(study, rows or ()),
        ("calibration", "Calibration"): _calibration(study),
        ("curves", "Over the threshold"): _curves(study),
        ("runtime", "Cost"): _runtime(study),
        ("settings", "Settings"): _settings(study),
    }
    links = sections = ""
    for (name, title), content in every.items():
        if content:
            links += f'<a href="#{name}">{title}</a>'
            sections += f'<section id="{name}"><h2>{title}</h2>\n{content}\n</section>\n'
    return Template(_asset("page.html")).substitute(
        policy=_POLICY,
        title=printable(escape(study.title)),
        style=_asset("page.css"),
        links=links,
        verdict=_verdict(study),
        sections=printable(sections),
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


def _quality(study: Study, rows: Sequence[Mapping[str, Any]]) -> str:
    """The metrics of every method and of the baselines on the same boxes."""
    if not study.has_boxes:
        return ""
    gate = gate_charts(study)  # boxes kept by their risk instead of their score
    content = _text("gate.html") + _line_charts(gate) if gate else ""
    content += _text("quality.html") + tables.metric_table(rows)
    covariances = tables.covariance_table(rows)
    return content + (covariances and _text("covariances.html") + covariances)


def _calibration(study: Study) -> str:
    """Does the risk happen as often as it says, and do the regions hold what they promise?"""
    charts = calibration_charts(study)
    if not charts:
        return ""
    content = _text("calibration.html") + _line_charts(charts)
    for method in viewer_methods(study):
        if len(method.records):
            groups = {name: headline(method.records[rows]) for name, rows in _groups(method)}
            name = f"<h3>{escape(method.name)}: by class and range</h3>"
            content += name + tables.group_table(groups)
    return content


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


def _curves(study: Study) -> str:
    charts = threshold_charts(study)
    return _text("curves.html") + _line_charts(charts, explained=charts[:1]) if charts else ""


def _runtime(study: Study) -> str:
    names = ("method", "device", "boxes", "samples", "ms", "ratio", "peak_mib")
    shown = {"samples": "k", "ratio": "× plain", "peak_mib": "peak MiB"}
    rows = [[tables.format_value(row.get(name)) for name in names] for row in study.runtime]
    return tables.html_table([shown.get(name, name) for name in names], rows) if rows else ""


def _settings(study: Study) -> str:
    frames = {int(frame) for method in study.methods for frame in np.unique(method.records.frame)}
    counts = {"Frames with predictions": len(frames), "Classes": ", ".join(study.classes) or None}
    notes = {f"Method: {method.name}": method.note for method in study.methods if method.note}
    entries = tables.key_value_table({**study.about, **counts, **notes})
    summary = "<summary>Data, detector, posterior, versions, seeds</summary>"
    return f"<details class=more>{summary}{entries}</details>"


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
