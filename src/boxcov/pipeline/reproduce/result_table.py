"""A table of results, as JSON and Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Table:
    """Rows of plain values by column; None or NaN where there is no value."""

    name: str
    title: str
    rows: Sequence[Mapping[str, Any]]
    notes: tuple[str, ...] = ()

    @property
    def columns(self) -> list[str]:
        return list(self.rows[0]) if self.rows else []

    def markdown(self) -> str:
        is_text = {
            name: any(isinstance(row[name], str) for row in self.rows) for name in self.columns
        }
        rules = ["---" if text else "---:" for text in is_text.values()]
        cells = [[_format(value) for value in row.values()] for row in self.rows]
        lines = [f"| {' | '.join(row)} |" for row in (self.columns, rules, *cells)]
        return "\n".join([f"**{self.title}**", "", *lines, *(f"\n{note}" for note in self.notes)])

    def json(self) -> dict[str, Any]:
        notes = list(self.notes)
        return {"name": self.name, "title": self.title, "rows": list(self.rows), "notes": notes}


def _format(value: Any) -> str:
    """Return a value for people: two decimals below 10, three significant digits above."""
    if value is None or value != value:
        return ""
    if isinstance(value, str | int):
        return str(value)
    if abs(value) >= 1e6 or 0 < abs(value) < 5e-3:
        return f"{value:.2g}"
    decimals = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.{decimals}f}"
