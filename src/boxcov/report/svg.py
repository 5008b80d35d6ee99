"""Draw charts as SVG text. Colours come from the page's style sheet: light, dark and print."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from boxcov.report.charts import COLOURS, Line, LineChart

WIDTH, HEIGHT = 330, 240
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 28, 40
PLOT_WIDTH, PLOT_HEIGHT = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM


def style_class(number: int) -> str:
    """Return the CSS classes of the n-th method: a colour, then a dash once colours repeat."""
    return f"c{number % COLOURS} d{number // COLOURS % 3}"


def draw_line_chart(chart: LineChart) -> str:
    """Return the SVG of a line chart."""
    bottom = TOP + PLOT_HEIGHT
    parts = [_text("title", LEFT, 16, chart.title)]
    for tick in np.linspace(0, 1, 6):
        x, y = LEFT + tick * PLOT_WIDTH, bottom - tick * PLOT_HEIGHT
        parts.append(f'<path class="grid" d="M{LEFT},{y:.1f}h{PLOT_WIDTH}"/>')
        parts.append(_text("tick", LEFT - 6, y + 3.5, f"{tick:.2g}", "end"))
        parts.append(_text("tick", x, bottom + 15, f"{tick:.2g}", "middle"))
    parts.append(f'<path class="axis" d="M{LEFT},{bottom}h{PLOT_WIDTH}"/>')
    parts.append(_text("label", LEFT + PLOT_WIDTH / 2, HEIGHT - 7, chart.x_label, "middle"))
    if chart.y_label:
        turn = f"translate(11 {TOP + PLOT_HEIGHT / 2}) rotate(-90)"
        parts.append(f'<g transform="{turn}">{_text("label", 0, 0, chart.y_label, "middle")}</g>')
    if chart.with_diagonal:
        line = f"M{LEFT},{bottom}L{LEFT + PLOT_WIDTH},{TOP}"
        parts.append(f'<path class="ideal" d="{line}"><title>ideal</title></path>')
    parts += [_draw_line(line) for line in chart.lines]
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.title)}"'
    return f'<svg class="chart" {box}>{"".join(parts)}</svg>'


def _draw_line(line: Line) -> str:
    x = LEFT + np.asarray(line.x) * PLOT_WIDTH
    y = TOP + (1 - np.asarray(line.y)) * PLOT_HEIGHT
    path, marks, pen = "", "", "M"
    for a, b in zip(x, y):
        if not np.isfinite(a + b):
            pen = "M"
            continue
        path += f"{pen}{a:.1f},{b:.1f}"
        pen = "L"
        if line.with_markers:
            marks += f'<circle class="mark" cx="{a:.1f}" cy="{b:.1f}" r="3"/>'
    title = f"<title>{escape(line.name)}</title>"
    return f'<g class="series {style_class(line.style)}">{title}<path d="{path}"/>{marks}</g>'


def legend(charts: Sequence[LineChart]) -> str:
    """Return the HTML list that explains the colours and dashes of the charts' lines."""
    styles = {line.name: line.style for chart in charts for line in chart.lines}
    lines = [
        (f'<g class="series {style_class(style)}"><path d="M1,5h24"/></g>', name)
        for name, style in styles.items()
    ]
    if any(chart.with_diagonal for chart in charts):
        lines.append(('<path class="ideal" d="M1,5h24"/>', "ideal"))
    box = 'class="chart sample" viewBox="0 0 26 10" aria-hidden="true"'
    entries = [f"<li><svg {box}>{line}</svg>{escape(name)}</li>" for line, name in lines]
    return f'<ul class="legend">{"".join(entries)}</ul>'


def _text(kind: str, x: float, y: float, text: str, anchor: str = "start") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {place}>{escape(text)}</text>'
