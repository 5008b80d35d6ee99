"""Draw charts as SVG text. Colours come from the page's style sheet: light, dark and print."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from boxcov.plain_text import MAX_NAME, short_name
from boxcov.report.charts import COLOURS, BarChart, Line, LineChart

WIDTH, HEIGHT = 330, 240
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 28, 40
PLOT_WIDTH, PLOT_HEIGHT = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
BAR_WIDTH, NAME_WIDTH = 680, 190


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
    return _svg(WIDTH, HEIGHT, chart.title, parts)


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


def draw_bar_chart(chart: BarChart) -> str:
    """Return the SVG of a bar chart with a logarithmic axis: per bar its name, bar and text."""
    text_width = max(120, 8 * max((len(bar.text) for bar in chart.bars), default=0))
    low, high = decades([bar.value for bar in chart.bars])
    scale = (BAR_WIDTH - NAME_WIDTH - text_width) / (high - low)  # pixels per decade
    bottom = 30 + 24 * len(chart.bars)
    parts = [_text("title", 0, 16, chart.title)]
    for decade in range(low, high + 1):
        x = NAME_WIDTH + scale * (decade - low)
        parts.append(f'<path class="grid" d="M{x:.1f},24V{bottom}"/>')
        parts.append(_text("tick", x, bottom + 14, f"{10.0**decade:g}", "middle"))
    for i, bar in enumerate(chart.bars):
        y = 30 + 24 * i
        length = scale * (np.log10(bar.value) - low) if bar.value > 0 else 1.5
        shape = f'x="{NAME_WIDTH}" y="{y}" width="{length:.1f}" height="16" rx="2"'
        parts += [
            _text("name", NAME_WIDTH - 8, y + 12, short_name(bar.name, MAX_NAME // 2), "end"),
            f'<rect class="{style_class(bar.style)}" {shape}>',
            f"<title>{escape(bar.name)}</title></rect>",
            _text("value", NAME_WIDTH + length + 6, y + 12, bar.text),
        ]
    return _svg(BAR_WIDTH, bottom + 20, chart.title, parts)


def decades(values: Sequence[float]) -> tuple[int, int]:
    """Return the powers of ten around positive values, at least a fifth of a decade below."""
    logs = [np.log10(value) for value in values if value > 0 and np.isfinite(value)]
    if not logs:
        return 0, 1
    low = int(np.floor(min(logs) - 0.2))
    return low, max(int(np.ceil(max(logs))), low + 1)


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


def _svg(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    box = f'viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}"'
    return f'<svg class="chart" {box}>{"".join(parts)}</svg>'
