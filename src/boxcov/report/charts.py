"""Charts as SVG text for the page: colours come from its style sheet, so that they suit light, dark and paper."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from boxcov.report.series import Bar, Line

WIDTH, HEIGHT = 330, 240
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 28, 40
STYLES = 8  # colours in the style sheet; further series repeat them with other dashes


def style_class(number: int) -> str:
    """The class of the n-th method: a colour, then a dash for each further round of the colours.

    >>> style_class(1), style_class(9)
    ('c1 d0', 'c1 d1')
    """
    return f"c{number % STYLES} d{number // STYLES % 3}"


def line_chart(
    title: str, across: str, lines: Sequence[Line], up: str = "", diagonal: bool = False
) -> str:
    """Lines over [0, 1] x [0, 1].

    >>> line_chart("AvU", "threshold", [Line("a < b", np.array([0.0, 1.0]), np.array([0.0, 1.0]), 0)]).count("a &lt; b")
    1
    """
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    parts = [f'<text class="title" x="{LEFT}" y="16">{escape(title)}</text>']
    for tick in np.linspace(0, 1, 6):
        x, y = LEFT + tick * wide, TOP + (1 - tick) * high
        parts.append(f'<path class="grid" d="M{LEFT},{y:.1f}h{wide}"/>')
        parts.append(
            f'<text class="tick" x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{tick:.2g}</text>'
        )
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{TOP + high + 15}" text-anchor="middle">{tick:.2g}</text>'
        )
    parts.append(f'<path class="axis" d="M{LEFT},{TOP + high}h{wide}"/>')
    parts.append(
        f'<text class="label" x="{LEFT + wide / 2}" y="{HEIGHT - 7}" text-anchor="middle">{escape(across)}</text>'
    )
    if up:
        parts.append(
            f'<text class="label" transform="translate(11 {TOP + high / 2}) rotate(-90)" text-anchor="middle">{escape(up)}</text>'
        )
    if diagonal:
        parts.append(
            f'<path class="ideal" d="M{LEFT},{TOP + high}L{LEFT + wide},{TOP}"><title>ideal</title></path>'
        )
    parts += [_line(line, wide, high) for line in lines]
    return _svg(WIDTH, HEIGHT, title, parts)


def _line(line: Line, wide: float, high: float) -> str:
    x, y = LEFT + np.asarray(line.x) * wide, TOP + (1 - np.asarray(line.y)) * high
    path, pen = [], "M"
    for a, b in zip(x, y):
        if not np.isfinite(a + b):
            pen = "M"
            continue
        path.append(f"{pen}{a:.1f},{b:.1f}")
        pen = "L"
    marks = "".join(
        f'<circle class="mark" cx="{a:.1f}" cy="{b:.1f}" r="3"/>'
        for a, b in zip(x, y)
        if line.marks and np.isfinite(a + b)
    )
    return f'<g class="series {style_class(line.style)}"><title>{escape(line.name)}</title><path d="{"".join(path)}"/>{marks}</g>'


def bar_chart(title: str, bars: Sequence[Bar], width: int = 680) -> str:
    """Bars from the left, a name before and a text behind each; a value that is not finite has no bar.

    >>> bar_chart("ms", [Bar("exact", 2.0, "2 ms", 0), Bar("paper", 4.0, "4 ms", 1)]).count("<rect")
    2
    """
    names, values = (
        190,
        max(120, 8 * max((len(bar.text) for bar in bars), default=0)),
    )  # room for the longest text
    finite = [bar.value for bar in bars if np.isfinite(bar.value)]
    top = max(finite, default=1.0) or 1.0
    parts = [f'<text class="title" x="0" y="16">{escape(title)}</text>']
    for i, bar in enumerate(bars):
        y = 30 + 24 * i
        long = (width - names - values) * bar.value / top if np.isfinite(bar.value) else 0.0
        parts.append(
            f'<text class="name" x="{names - 8}" y="{y + 12}" text-anchor="end">{escape(shortened(bar.name))}</text>'
        )
        parts.append(
            f'<rect class="{style_class(bar.style)}" x="{names}" y="{y}" width="{max(long, 1.5):.1f}" height="16" rx="2">'
        )
        parts.append(f"<title>{escape(bar.name)}</title></rect>")
        parts.append(
            f'<text class="value" x="{names + max(long, 1.5) + 6:.1f}" y="{y + 12}">{escape(bar.text)}</text>'
        )
    return _svg(width, 34 + 24 * len(bars), title, parts)


def legend(names: Sequence[str], ideal: bool = False) -> str:
    """What the colours and dashes of the methods mean.

    >>> legend(["exact"]).count("exact")
    1
    """
    sample = '<svg class="chart sample" viewBox="0 0 26 10" aria-hidden="true">{}</svg>'
    entries = [
        f'<li>{sample.format(f"""<g class="series {style_class(i)}"><path d="M1,5h24"/></g>""")}{escape(name)}</li>'
        for i, name in enumerate(names)
    ]
    if ideal:
        entries.append(f'<li>{sample.format("""<path class="ideal" d="M1,5h24"/>""")}ideal</li>')
    return f'<ul class="legend">{"".join(entries)}</ul>'


def shortened(name: str, length: int = 30) -> str:
    """A name that fits beside a bar.

    >>> shortened("abcdef", 4)
    'abc…'
    """
    return name if len(name) <= length else name[: length - 1] + "…"


def _svg(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    return f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
