"""The tables of metrics, from what ``boxcov.evaluate.summary`` found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from boxcov.evaluate.covariance_metrics import LEVELS
from boxcov.evaluate.quality import ERRORS, METRICS
from boxcov.evaluate.summary import RANKINGS
from boxcov.report.tables import Cell, shown, table

ERROR_NAMES = {"IoU": "IoU", "l2": "ℓ₂"}
_MEASURES = METRICS + RANKINGS
_FITS = ("NLL", "ENCE", *(f"coverage {level:.0%}" for level in LEVELS), "ANEES")


def ordering(rows: Sequence[Mapping[str, Any]]) -> str:
    """How well u tells good boxes from bad ones: ``rows`` as from ``summary.table``.

    >>> ordering([]).count("AUROC")
    1
    """
    lines = [
        _line(_name(row), row, [row[f"{name} {error}"] for name in _MEASURES for error in ERRORS])
        for row in rows
    ]
    quiet = {i for i, row in enumerate(rows) if row["kind"] == "chance"}
    return table(_head("method"), lines, over=_over(), quiet=quiet)


def fits(rows: Sequence[Mapping[str, Any]]) -> str:
    """How well the covariances of the methods that have any explain the errors, before and after calibration; no text without any.

    >>> fits([])
    ''
    """
    lines: list[list[Cell]] = []
    for row in rows:
        for suffix, words in (("", "from the weights"), (" calibrated", "calibrated")):
            cells = [row.get(name + suffix) for name in _FITS]
            if any(cell is not None for cell in cells):
                lines.append([row["method"], words, *(_value(cell) for cell in cells)])
    return table(["method", "covariance", *_FITS], lines) if lines else ""


def groups(kind: str, summaries: Mapping[str, Mapping[str, Any]]) -> str:
    """One line for each class, or each range: ``summaries`` as from ``by_class`` or ``by_range``.

    >>> groups("class", {}).count("AUROC")
    1
    """
    lines = []
    for name, summary in summaries.items():
        measures = {**summary["quality"], **{ranking: summary[ranking] for ranking in RANKINGS}}
        lines.append(
            _line(
                name,
                summary,
                [measures[measure][error] for measure in _MEASURES for error in ERRORS],
            )
        )
    return table(_head(kind), lines, over=_over())


def _name(row: Mapping[str, Any]) -> Cell:
    if row["kind"] == "chance":
        return "by chance"  # of the row above
    return row["method"], row["kind"] if row["kind"] in ("baseline", "difference") else ""


def _head(first: str) -> list[str]:
    return [first, "boxes", "paired", *(ERROR_NAMES[error] for _ in _MEASURES for error in ERRORS)]


def _over() -> list[tuple[str, int]]:
    return [("", 3), *((name, len(ERRORS)) for name in _MEASURES)]


def _line(
    name: Cell, counts: Mapping[str, Any], cells: Sequence[Mapping[str, Any] | None]
) -> list[Cell]:
    return [
        name,
        shown(counts["boxes"]),
        shown(counts["paired"]),
        *(_value(cell) for cell in cells),
    ]


def _value(cell: Mapping[str, Any] | None) -> Cell:
    """A value, and its interval below it."""
    if cell is None or cell["value"] is None:
        return "–"
    low, high = cell.get("low"), cell.get("high")
    return shown_rate(
        cell["value"]
    ), "" if low is None or high is None else f"{shown_rate(low)} – {shown_rate(high)}"


def shown_rate(value: float) -> str:
    """Two decimals, as the paper has them; fewer digits of what is large.

    >>> shown_rate(0.615), shown_rate(-3.14159), shown_rate(12345.6)
    ('0.61', '-3.14', '12,346')
    """
    return f"{value:.2f}" if abs(value) < 100 else shown(value)
