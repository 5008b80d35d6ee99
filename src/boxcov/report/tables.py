"""HTML tables: everything escaped, numbers rounded; and the tables of metrics."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from boxcov.evaluate.covariance_metrics import LEVELS
from boxcov.evaluate.quality import ERRORS, METRICS
from boxcov.evaluate.summary import COVARIANCE_METRICS, ERROR_DISTRIBUTIONS, RANKINGS
from boxcov.report.verdict import Headline

Cell = str | tuple[str, str]  # text, or text and small text below it
ERROR_NAMES = {"IoU": "IoU", "l2": "ℓ₂"}
_MEASURES = METRICS + RANKINGS


def format_value(value: Any, digits: int = 3) -> str:
    """Return a value as text, not escaped: rounded numbers, a dash for unknown ones.

    >>> [format_value(v) for v in (0.12345, float("nan"), 12, None, 123456.0, 2.5e-5, "text", 1.0)]
    ['0.123', '–', '12', '–', '123,456', '2.5e-05', 'text', '1']
    >>> format_value(999.9)
    '1,000'
    """
    if value is None:
        return "–"
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else "no"
    if isinstance(value, (int, np.integer)):
        return f"{value:,}"
    if isinstance(value, (float, np.floating)):
        if not np.isfinite(value):
            return "–" if np.isnan(value) else str(value)
        size = abs(float(value))
        is_long = 10.0**digits - 0.5 <= size < 1e15  # also if it has more digits rounded
        return f"{value:,.0f}" if is_long else f"{value:.{digits}g}"
    return str(value)


def html_table(
    head: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    groups: Sequence[tuple[str, int]] = (),
    quiet: Container[int] = (),
) -> str:
    """Return a table whose first column names the row.

    groups: a line above the head, as texts and the number of columns each spans.
    quiet: numbers of rows to show in smaller type.
    """
    spans = "".join(
        f'<th colspan="{width}" scope="colgroup">{escape(text)}</th>' for text, width in groups
    )
    top = f'<tr class="over">{spans}</tr>' if groups else ""
    names = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(_html_row(row, i in quiet) for i, row in enumerate(rows))
    header = f"<thead>{top}<tr>{names}</tr></thead>"
    return f'<div class="wide"><table class="grid">{header}<tbody>{body}</tbody></table></div>'


def key_value_table(entries: Mapping[str, Any]) -> str:
    """Return a table of names and values; nested values take one line each."""
    rows = "".join(
        f'<tr><th scope="row">{escape(str(name))}</th><td>{escape(_nested_text(value))}</td></tr>'
        for name, value in entries.items()
    )
    return f'<table class="about"><tbody>{rows}</tbody></table>'


def metric_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of the metrics of u; ``rows`` are those of ``boxcov.evaluate.table``."""
    names = [ERROR_NAMES[error] for _ in _MEASURES for error in ERRORS]
    groups = [("", 3), *((name, len(ERRORS)) for name in _MEASURES)]
    lines: list[list[Cell]] = []
    for row in rows:
        counts = [format_value(row[name]) for name in ("boxes", "paired")]
        cells = [_metric_cell(row[f"{name} {error}"]) for name in _MEASURES for error in ERRORS]
        lines.append([_method_cell(row), *counts, *cells])
    quiet = {i for i, row in enumerate(rows) if row["kind"] == "chance"}
    return html_table(["method", "boxes", "paired", *names], lines, groups, quiet)


def covariance_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of the epistemic covariances and of the error model; "" if none."""
    lines: list[list[Cell]] = []
    for row in rows:
        for words, names in ERROR_DISTRIBUTIONS.items():
            cells = [row.get(name) for name in names]
            if any(cell is not None for cell in cells):
                lines.append([row["method"], words, *(_metric_cell(cell) for cell in cells)])
    metrics = (name.replace("%", " %") for name in COVARIANCE_METRICS)
    return html_table(["method", "distribution of the errors", *metrics], lines) if lines else ""


def group_table(groups: Mapping[str, Headline]) -> str:
    """Return one row per class or range: predicted and observed shares, AUROC and coverage."""
    head = ["", "boxes", "bad boxes", "mean risk", "AUROC", "AUROC of 1 − score"]
    head += [f"inside {100 * level:.0f} %" for level in LEVELS]
    lines: list[list[Cell]] = []
    for name, one in groups.items():
        shares = [_percent(one.bad), _percent(one.risk)]
        rates = [format_value(one.auroc), format_value(one.baseline)]
        inside = [_percent(one.inside[level]) for level in LEVELS]
        lines.append([name, format_value(one.boxes), *shares, *rates, *inside])
    return html_table(head, lines)


def _percent(share: float) -> str:
    return "–" if np.isnan(share) else f"{100 * share:.0f} %"


def format_rate(value: float) -> str:
    """Return two decimals, or fewer digits for large values."""
    return f"{round(value, 2) + 0.0:.2f}" if abs(value) < 100 else format_value(value)


def _html_row(row: Sequence[Cell], is_quiet: bool) -> str:
    cells = "".join(f"<td>{_html_cell(cell)}</td>" for cell in row[1:])
    start = '<tr class="quiet">' if is_quiet else "<tr>"
    return f'{start}<th scope="row">{_html_cell(row[0])}</th>{cells}</tr>\n'


def _html_cell(cell: Cell) -> str:
    if isinstance(cell, str):
        return escape(cell)
    return escape(cell[0]) + (f"<small>{escape(cell[1])}</small>" if cell[1] else "")


def _nested_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return "\n".join(f"{name}: {_nested_text(entry)}" for name, entry in value.items()) or "–"
    if isinstance(value, (list, tuple, set, frozenset)):
        return ", ".join(_nested_text(entry) for entry in value) or "–"
    if isinstance(value, (int, np.integer)):
        return str(value)  # a seed has no thousands separator
    return format_value(value, digits=6)


def _method_cell(row: Mapping[str, Any]) -> Cell:
    if row["kind"] == "chance":
        return "chance level"  # of the row above
    return row["method"], row["kind"] if row["kind"] in ("baseline", "difference") else ""


def _metric_cell(cell: Mapping[str, Any] | None) -> Cell:
    """Return a value with its interval below it."""
    if cell is None or cell["value"] is None:
        return "–"
    low, high = cell.get("low"), cell.get("high")
    interval = "" if low is None or high is None else f"{format_rate(low)} – {format_rate(high)}"
    return format_rate(cell["value"]), interval
