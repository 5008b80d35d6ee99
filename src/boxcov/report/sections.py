"""The sections of the page, each made from a study; none where the study has nothing for it."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

import numpy as np

from boxcov.evaluate.quality import ERRORS
from boxcov.evaluate.summary import by_class, by_range
from boxcov.evaluate.summary import table as metric_table
from boxcov.report import metric_tables
from boxcov.report.charts import bar_chart, legend, line_chart
from boxcov.report.metric_tables import ERROR_NAMES
from boxcov.report.series import reliability_lines, runtime_bars, threshold_lines
from boxcov.report.study import Study
from boxcov.report.tables import pairs, shown, table
from boxcov.report.viewer import viewer


@dataclass(frozen=True)
class Section:
    """A part of the page that can be linked to."""

    identity: str
    title: str
    content: str  # HTML

    @property
    def html(self) -> str:
        return f'<section id="{self.identity}"><h2>{escape(self.title)}</h2>\n{self.content}\n</section>\n'


def provenance(study: Study) -> Section:
    """Where everything comes from, with the counts that the study itself knows."""
    frames = {int(frame) for method in study.methods for frame in np.unique(method.records.frame)}
    counts = {"Frames with predictions": len(frames), "Classes": ", ".join(study.classes) or None}
    notes = {f"Method: {method.name}": method.note for method in study.methods if method.note}
    return Section("about", "What was evaluated", pairs({**study.about, **counts, **notes}))


def quality(study: Study, replicates: int) -> Section | None:
    """The metrics of every method and of the baselines on the same boxes."""
    if not _boxes(study):
        return None
    rows = metric_table({method.name: method.records for method in study.methods}, replicates)
    text = (
        "A box is certain where its u lies below the mean of all; accurate where its IoU is at least 0.4, or where its distance ℓ₂ is below "
        "the mean of the paired boxes. Below each value is its 95&nbsp;% interval over frames. Rows “by chance” deal the same u out to the "
        "boxes at random. Higher is better, but for AUSE. Score + size is a regression fitted on other frames; with the covariance it also reads "
        "the logarithm of each variance, and the last rows say what that adds."
    )
    content = f"<p>{text}</p>{metric_tables.ordering(rows)}"
    fits = metric_tables.fits(rows)
    if fits:
        more = (
            "Of paired boxes: the negative log-likelihood of the errors (less is better), the expected normalised calibration error (0 is right), "
            "the share of errors inside the ellipsoids that should hold 50, 90 and 95&nbsp;% of them, and the average normalised squared error "
            "(1 is right, more is overconfident). A dash where covariances without full rank make a number infinite."
        )
        content += f"<h3>Covariances</h3><p>{more}</p>{fits}"
    return Section("quality", "Quality", content)


def groups(study: Study, replicates: int) -> Section | None:
    """The same metrics for each class and each range, method by method."""
    if not _boxes(study):
        return None
    parts = []
    for i, method in enumerate(study.methods):
        tables = [metric_tables.groups("class", by_class(method.records, replicates))]
        if {"x", "y"} <= set(study.fields):
            tables.append(
                metric_tables.groups("range", by_range(method.records, replicates=replicates))
            )
        parts.append(
            f"<details class=more{'' if i else ' open'}><summary>{escape(method.name)}</summary>{''.join(tables)}</details>"
        )
    text = "Within a class or a range the means of u and of ℓ₂ are its own. Below each value is its 95&nbsp;% interval over frames."
    return Section("groups", "By class and range", f"<p>{text}</p>{''.join(parts)}")


def curves(study: Study) -> Section | None:
    """The paper's metrics over the threshold."""
    if not _boxes(study):
        return None
    charts = [
        f"<figure>{line_chart(f'{metric}, {ERROR_NAMES[error]}', 'threshold (quantile of u)', lines)}</figure>"
        for (metric, error), lines in sorted(
            threshold_lines(study).items(), key=lambda entry: ERRORS.index(entry[0][1])
        )
    ]
    text = (
        "Each method's u is replaced by its quantile in a Gamma distribution fitted to it; boxes at or above the threshold count as "
        "uncertain. A better method lies higher in P(A|C) and P(U|I); AvU also falls where accurate boxes are uncertain."
    )
    return Section(
        "curves",
        "Over the threshold",
        f'<p>{text}</p>{_legend(study)}<div class="charts">{"".join(charts)}</div>',
    )


def reliability(study: Study) -> Section | None:
    """How many errors lie where the covariances say they should."""
    panels = reliability_lines(study)
    if not panels:
        return None
    charts = [
        f"<figure>{line_chart(title, 'nominal coverage', lines, up='observed coverage', diagonal=True)}</figure>"
        for title, lines in panels.items()
    ]
    text = (
        "For each nominal coverage the share of paired boxes whose error lies inside the ellipsoid of that probability. Below the diagonal the "
        "covariances are too small, above it too large; a covariance without full rank, as of fewer samples than fields, covers nothing. "
        "The covariance from the weights leaves out what more data could not teach; the calibrated one has it."
    )
    content = (
        f'<p>{text}</p>{_legend(study, ideal=True)}<div class="charts two">{"".join(charts)}</div>'
    )
    return Section("reliability", "Reliability", content)


def runtime(study: Study) -> Section | None:
    """Bars of the time a frame takes, device by device, and the table behind them."""
    if not study.runtime:
        return None
    charts = [
        f"<figure>{bar_chart(f'Milliseconds a frame, {device}' if device else 'Milliseconds a frame', bars)}</figure>"
        for device, bars in runtime_bars(study).items()
    ]
    names = {
        "method": "method",
        "device": "device",
        "boxes": "boxes",
        "samples": "k",
        "ms": "ms",
        "ratio": "× plain",
        "peak_mib": "peak MiB",
    }
    rows = [[shown(row.get(name)) for name in names] for row in study.runtime]
    return Section(
        "runtime",
        "Run time",
        f'<div class="charts one">{"".join(charts)}</div>{table(list(names.values()), rows)}',
    )


def look(study: Study, stage: bool) -> Section | None:
    """The threshold's counts and, where there is a scene, the bird's-eye picture."""
    if not study.methods:
        return None
    return Section("viewer", "Bird's-eye view" if stage else "Threshold", viewer(stage))


def _boxes(study: Study) -> bool:
    return any(len(method.records) for method in study.methods)


def _legend(study: Study, ideal: bool = False) -> str:
    return legend([method.name for method in study.methods], ideal)
