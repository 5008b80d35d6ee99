"""The report as one HTML page that needs no network and no other file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from pathlib import Path

import numpy as np

from boxcov.evaluate.summary import by_class, by_range, table
from boxcov.files import write_text
from boxcov.report.charts import reliability_charts, runtime_charts, threshold_charts
from boxcov.report.study import Study
from boxcov.report.svg import draw_bar_chart, draw_line_chart, legend
from boxcov.report.tables import (
    covariance_table,
    format_value,
    group_table,
    html_table,
    key_value_table,
    metric_table,
)
from boxcov.report.viewer import pack, viewer_html
from boxcov.version import __version__

SCRIPTS = ("data.js", "stage.js", "details.js", "viewer.js", "start.js")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def write(path: str | Path, study: Study, replicates: int = 200) -> None:
    """Write the page to ``path``; ``replicates`` is the number of draws behind each interval.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(f"{folder}/report.html", Study("Night & rain"))
    ...     "<h1>Night &amp; rain</h1>" in Path(f"{folder}/report.html").read_text(encoding="utf-8")
    True
    """
    write_text(path, page(study, replicates))


def page(study: Study, replicates: int = 200) -> str:
    """Return the HTML of the page."""
    data = pack(study)
    sections = [
        _provenance(study),
        _quality(study, replicates),
        _curves(study),
        _reliability(study),
        _groups(study, replicates),
        _runtime(study),
        _viewer(study, bool(data["scenes"])),
    ]
    parts = [section for section in sections if section is not None]
    links = "".join(f'<a href="#{part.id}">{escape(part.title)}</a>' for part in parts)
    script = "\n".join(_asset(name) for name in SCRIPTS)
    today = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{escape(study.title)}</title>
<style>
{_asset("page.css")}</style>
</head>
<body>
<main>
<header><h1>{escape(study.title)}</h1>
<nav>{links}</nav>
</header>
{"".join(part.html for part in parts)}
<footer>Written by boxcov {escape(__version__)}, {today}. This file needs no network.</footer>
</main>
<script type="application/json" id="data">{_embed_json(data)}</script>
<script>
"use strict";
{{
{script}}}
</script>
</body>
</html>
"""


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


def _provenance(study: Study) -> Section:
    frames = {int(frame) for method in study.methods for frame in np.unique(method.records.frame)}
    counts = {"Frames with predictions": len(frames), "Classes": ", ".join(study.classes) or None}
    notes = {f"Method: {method.name}": method.note for method in study.methods if method.note}
    entries = key_value_table({**study.about, **counts, **notes})
    return Section("about", "What was evaluated", entries)


def _quality(study: Study, replicates: int) -> Section | None:
    """The metrics of every method and of the baselines on the same boxes."""
    if not study.has_boxes:
        return None
    rows = table({method.name: method.records for method in study.methods}, replicates)
    content = (
        "<p>A box is certain if its u is below the mean of all u. It is accurate if its IoU is at "
        "least 0.4, or if its distance ℓ₂ is below the mean of the paired boxes. Small numbers are "
        "95&nbsp;% intervals over frames. “Chance level” is the metric with u shuffled. Higher is "
        "better, except for AUSE. Score + size is a regression fitted on other frames. With the "
        "covariance it also reads the logarithm of each variance; the last rows show the "
        f"difference.</p>{metric_table(rows)}"
    )
    covariances = covariance_table(rows)
    if covariances:
        content += (
            "<h3>Covariances</h3><p>For paired boxes: the negative log-likelihood of the errors "
            "(lower is better), the expected normalised calibration error (0 is right), the share "
            "of errors inside the ellipsoids of 50, 90 and 95&nbsp;%, and the average normalised "
            "squared error (1 is right, more is overconfident). The calibrated covariance and the "
            "regions are about the axis of the heading. The coverage of the regions is the share "
            "of the errors of single fields within their half widths. A dash marks a value that is "
            f"infinite because a covariance is singular.</p>{covariances}"
        )
    return Section("quality", "Quality", content)


def _groups(study: Study, replicates: int) -> Section | None:
    """The metrics per class and range, method by method."""
    if not study.has_boxes:
        return None
    content = (
        "<p>Each class or range has its own means of u and of ℓ₂. Small numbers are 95&nbsp;% "
        "intervals over frames.</p>"
    )
    for i, method in enumerate(study.methods):
        tables = group_table("class", by_class(method.records, replicates))
        if {"x", "y"} <= set(study.fields):
            tables += group_table("range", by_range(method.records, replicates=replicates))
        name = f"<summary>{escape(method.name)}</summary>"
        content += f"<details class=more{'' if i else ' open'}>{name}{tables}</details>"
    return Section("groups", "By class and range", content)


def _curves(study: Study) -> Section | None:
    charts = threshold_charts(study)
    if not charts:
        return None
    text = (
        "<p>Each method's u is replaced by its quantile in a Gamma distribution fitted to all its "
        "u. Boxes at or above the threshold count as uncertain. Higher is better in P(A|C) and "
        "P(U|I). AvU also falls where accurate boxes are uncertain.</p>"
    )
    drawings = _figures([draw_line_chart(chart) for chart in charts])
    return Section("curves", "Over the threshold", text + _legend(study) + drawings)


def _reliability(study: Study) -> Section | None:
    charts = reliability_charts(study)
    if not charts:
        return None
    text = (
        "<p>For each nominal coverage: the share of paired boxes whose error is inside the "
        "ellipsoid of that probability. Below the diagonal the covariances are too small, above it "
        "too large. A singular covariance, such as one from fewer samples than fields, covers "
        "nothing. The epistemic covariance leaves out the noise of sensor and labels; the "
        "calibrated one includes it.</p>"
    )
    drawings = _figures([draw_line_chart(chart) for chart in charts], "charts two")
    return Section("reliability", "Reliability", text + _legend(study, True) + drawings)


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
    drawings = _figures([draw_bar_chart(chart) for chart in runtime_charts(study)], "charts one")
    return Section("runtime", "Run time", drawings + html_table(list(head.values()), rows))


def _viewer(study: Study, with_stage: bool) -> Section | None:
    if not study.methods:
        return None
    title = "Bird's-eye view" if with_stage else "Threshold"
    return Section("viewer", title, viewer_html(with_stage))


def _figures(drawings: Sequence[str], style: str = "charts") -> str:
    return f'<div class="{style}">{"".join(f"<figure>{svg}</figure>" for svg in drawings)}</div>'


def _legend(study: Study, with_diagonal: bool = False) -> str:
    return legend([method.name for method in study.methods], with_diagonal)


def _asset(name: str) -> str:
    return (files("boxcov.report") / "assets" / name).read_text(encoding="utf-8")


def _embed_json(data: object) -> str:
    """Return JSON that cannot end its script element, whatever names it contains."""
    text = json.dumps(data, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c")
