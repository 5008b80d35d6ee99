"""The charts of a report by matplotlib: one by one, or all of a study as PNG files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from boxcov._files.output_file import make_folder
from boxcov._files.plain_text import MAX_NAME
from boxcov.box_layout import PLANE, columns, has_layout
from boxcov.errors import BoxcovError
from boxcov.evaluate.quality import METRICS
from boxcov.evaluate.records import Records
from boxcov.outlines import outlines_from_above
from boxcov.report import charts, frame_plot
from boxcov.report.study import Method, Study
from boxcov.report.viewer import viewer_methods

# the page's colours on white, in the same order
PALETTE = ("#2a78d6", "#e0592a", "#159c6c", "#b87f00", "#d4588c", "#0a7a0a", "#4a3aa7", "#c93a3a")
DASHES = ("-", "--", ":")
MAX_SCENES = 3
MIN_SCORE = 0.3  # of a box in a picture: boxes of lower score would cover the others


def write_figures(folder: str | Path, study: Study) -> list[Path]:
    """Write the figures that the study has data for into ``folder``, and return their paths."""
    folder = make_folder(Path(folder))
    figures = {
        "curves": _draw_line_charts(charts.threshold_charts(study), len(METRICS), size=(3.0, 2.5)),
        "calibration": _draw_line_charts(charts.calibration_charts(study), 2, size=(3.6, 3.5)),
    }
    figures |= {f"bev-{n}": _draw_scene(study, n) for n in sorted(study.scenes)[:MAX_SCENES]}
    written = {folder / f"{name}.png": one for name, one in figures.items() if one is not None}
    for path, figure in written.items():
        frame_plot.save_figure(path, figure, dpi=200, bbox_inches="tight")
    return list(written)


def plot_reliability(records: Records | Mapping[str, Records], axes: Any = None) -> Any:
    """Draw how often boxes of a risk were bad, over the risk; return the axes of matplotlib.

    records: of ``boxcov.evaluate.match``, or several by name. With ``axes`` it is drawn there.
    """
    return _plot(charts.reliability_charts(_study(records)), "risk", axes)


def plot_coverage(records: Records | Mapping[str, Records], axes: Any = None) -> Any:
    """Draw the share of the errors inside the regions over their level; return the axes.

    Regions are those of the error model, else the ellipsoids of the covariance. The arguments are
    those of ``plot_reliability``.
    """
    return _plot(charts.coverage_charts(_study(records)), "regions or covariance", axes)


def plot_risk(records: Records | Mapping[str, Records], axes: Any = None) -> Any:
    """Draw the share of bad boxes among those kept, lowest risk first; return the axes.

    The arguments are those of ``plot_reliability``.
    """
    return _plot(charts.gate_charts(_study(records)), "risk", axes)


def _study(records: Records | Mapping[str, Records]) -> Study:
    named = {"boxes": records} if isinstance(records, Records) else records
    return Study("", methods=[Method(name, one) for name, one in named.items()])


def _plot(shown: Sequence[charts.LineChart], missing: str, axes: Any) -> Any:
    if not shown:
        raise BoxcovError(f"these records have no {missing}: predict with a calibrated model")
    axes = frame_plot.new_axes(4.5, 4.2) if axes is None else axes
    _draw_line_chart(axes, shown[0])
    axes.set_xlabel(shown[0].x_label)
    axes.legend(frameon=False, fontsize=8)
    return axes


def _draw_line_chart(ax: Any, chart: charts.LineChart) -> None:
    if chart.with_diagonal:
        ax.plot([0, 1], [0, 1], color="#999999", linewidth=1, linestyle=":", label="ideal")
    for line in chart.lines:
        ax.plot(
            line.x,
            line.y,
            label=_escape(line.name),
            marker="o" if line.with_markers else None,
            markersize=3,
            color=PALETTE[line.style % charts.COLOURS],
            linestyle=DASHES[line.style // charts.COLOURS % len(DASHES)],
            linewidth=1.6,
        )
    ax.set_title(chart.title, fontsize=10)
    ax.set(ylabel=chart.y_label, xlim=(0, 1), ylim=(-0.02, 1.02))
    ax.grid(color="#e4e4e4", linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)


def _draw_line_charts(
    shown: Sequence[charts.LineChart], columns: int, size: tuple[float, float]
) -> Any | None:
    """Draw charts in a grid, with one legend below; None without charts."""
    if not shown:
        return None
    columns = min(columns, len(shown))
    rows = -(-len(shown) // columns)
    figure = frame_plot.new_figure(size[0] * columns, size[1] * rows + 0.3)
    axes = figure.subplots(rows, columns, squeeze=False)
    for number, (ax, chart) in enumerate(zip(axes.flat, shown)):
        _draw_line_chart(ax, chart)
        if number >= len(shown) - columns:  # last row
            ax.set_xlabel(chart.x_label)
    drawn: dict[str, Any] = {}  # one line per name
    for ax in axes.flat:
        drawn |= {name: line for line, name in zip(*ax.get_legend_handles_labels())}
    figure.legend(
        drawn.values(),
        drawn.keys(),
        loc="outside lower center",
        ncols=3 if max(map(len, drawn)) <= MAX_NAME / 2 else 1,
        frameon=False,
        fontsize=9,
    )
    return figure


def _draw_scene(study: Study, frame: int) -> Any | None:
    """Draw a frame from above as the paper does: objects, boxes and their uncertainty."""
    if not study.methods or not has_layout(study.fields, PLANE):
        return None
    method, scene = viewer_methods(study)[0], study.scenes[frame]
    records, place = method.records, columns(study.fields, PLANE)
    every = records[(records.frame == frame) & (records.scores >= MIN_SCORE)]
    shown = every[np.argsort(-every.scores, kind="stable")[: frame_plot.MAX_BOXES]]
    boxes, color = shown.boxes[:, place], frame_plot.PREDICTION
    figure = frame_plot.new_figure(6.5, 6.8)
    axes = figure.add_subplot()
    frame_plot.draw_points(axes, scene.points, scene.truth[:, place], boxes)
    for outline, u in zip(outlines_from_above(boxes), shown.uncertainty):
        axes.plot(*outline.T, color=color, linewidth=1.2)
        axes.annotate(f"{u:.2g}", outline.max(0) + 0.4, color=color, fontsize=6, clip_on=True)
    title = f"{_escape(scene.name)}: {_escape(method.name)}, scores from {MIN_SCORE}"
    axes.set_title(f"{title}. Green: objects; numbers: uncertainty", fontsize=9)
    frame_plot.say_total(axes, len(shown), len(every))
    return figure


def _escape(name: str) -> str:
    """Keep matplotlib from hiding names that begin with _."""
    return frame_plot.escape_math(name).lstrip("_") or " "
