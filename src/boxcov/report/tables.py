"""HTML tables from plain values: everything escaped, numbers to a sensible number of digits."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

Cell = str | tuple[str, str]


def shown(value: Any, digits: int = 3) -> str:
    """A value as text, not yet escaped: three digits of a number, a dash for what is not known.

    >>> shown(0.12345), shown(float("nan")), shown(12), shown(None), shown(123456.0), shown(2.5e-5), shown("as it is"), shown(1.0)
    ('0.123', '–', '12', '–', '123,456', '2.5e-05', 'as it is', '1')
    """
    if isinstance(value, str):
        return value
    if value is None:
        return "–"
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else "no"
    if isinstance(value, (int, np.integer)):
        return f"{value:,}"
    if isinstance(value, (float, np.floating)):
        if not np.isfinite(value):
            return "–" if np.isnan(value) else str(value)
        return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"
    return str(value)


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    over: Sequence[tuple[str, int]] = (),
    quiet: Container[int] = (),
) -> str:
    """A table of texts, the first column naming the row; of a pair of texts the second is small, below the first.

    ``over`` is a line above the head, texts and how many columns each spans; ``quiet`` are the numbers of rows that stand back.

    >>> "<td>&lt;b&gt;<small>0 to 1</small></td>" in table(["method", "AvU"], [["exact", ("<b>", "0 to 1")]])
    True
    """
    spans = "".join(
        f'<th colspan="{width}" scope="colgroup">{escape(text)}</th>' for text, width in over
    )
    top = f'<tr class="over">{spans}</tr>' if over else ""
    names = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(
        f"""<tr{' class="quiet"' if i in quiet else ""}><th scope="row">{_inside(row[0])}</th>"""
        + "".join(f"<td>{_inside(cell)}</td>" for cell in row[1:])
        + "</tr>\n"
        for i, row in enumerate(rows)
    )
    return f'<div class="wide"><table class="grid"><thead>{top}<tr>{names}</tr></thead><tbody>{body}</tbody></table></div>'


def _inside(cell: Cell) -> str:
    if isinstance(cell, str):
        return escape(cell)
    return escape(cell[0]) + (f"<small>{escape(cell[1])}</small>" if cell[1] else "")


def pairs(entries: Mapping[str, Any]) -> str:
    """Names and values, nested ones indented line by line: the provenance.

    >>> pairs({"data": {"name": "a<b", "frames": 3}}).count("a&lt;b")
    1
    """
    rows = "".join(
        f'<tr><th scope="row">{escape(str(name))}</th><td>{escape(_told(value))}</td></tr>'
        for name, value in entries.items()
    )
    return f'<table class="about"><tbody>{rows}</tbody></table>'


def _told(value: Any) -> str:
    if isinstance(value, Mapping):
        return "\n".join(f"{name}: {_told(entry)}" for name, entry in value.items()) or "–"
    if isinstance(value, (list, tuple, set, frozenset)):
        return ", ".join(_told(entry) for entry in value) or "–"
    return (
        str(value) if isinstance(value, (int, np.integer)) else shown(value, digits=6)
    )  # a seed has no thousands
