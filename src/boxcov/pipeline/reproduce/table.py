"""A table: numbers with names, as JSON for scripts, as CSV for spreadsheets and as Markdown for people."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from boxcov.files import replacing


@dataclass(frozen=True)
class Table:
    """Rows of plain values under named columns; None where the paper, or we, have none.

    >>> print(Table("t", "A table", ("method", "ms"), [("GLM", 10636.0), ("ours", None)]).markdown())
    **A table**
    <BLANKLINE>
    | method | ms |
    | --- | ---: |
    | GLM | 10636 |
    | ours |  |
    """

    name: str
    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[Any, ...]]
    notes: tuple[str, ...] = ()

    def markdown(self) -> str:
        numeric = [
            all(not isinstance(row[i], str) for row in self.rows) for i in range(len(self.columns))
        ]
        lines = [
            "| " + " | ".join(self.columns) + " |",
            "| " + " | ".join("---:" if n else "---" for n in numeric) + " |",
        ]
        lines += ["| " + " | ".join(shown(value) for value in row) + " |" for row in self.rows]
        return "\n".join([f"**{self.title}**", "", *lines, *(f"\n{note}" for note in self.notes)])

    def csv(self) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows(self.rows)
        return text.getvalue()

    def json(self) -> dict[str, Any]:
        rows = [dict(zip(self.columns, row)) for row in self.rows]
        return {"name": self.name, "title": self.title, "rows": rows, "notes": list(self.notes)}


def shown(value: Any) -> str:
    """A value as a person reads it: two digits below 10, three significant ones or whole numbers above.

    >>> shown(0.4), shown(12.34), shown(10636.2), shown(3), shown(None), shown("H"), shown(3.2e9)
    ('0.40', '12.3', '10636', '3', '', 'H', '3.2e+09')
    """
    if value is None:
        return ""
    if isinstance(value, str | int):
        return str(value)
    if abs(value) >= 1e6 or 0 < abs(value) < 5e-3:
        return f"{value:.2g}"
    return (
        f"{value:.2f}"
        if abs(value) < 10
        else f"{value:.1f}"
        if abs(value) < 100
        else f"{value:.0f}"
    )


def write(folder: Path, table: Table) -> None:
    """``NAME.md``, ``NAME.csv`` and ``NAME.json`` in ``folder``.

    >>> import tempfile, os
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(Path(folder), Table("t", "A table", ("method",), [("GLM",)]))
    ...     sorted(os.listdir(folder))
    ['t.csv', 't.json', 't.md']
    """
    for ending, text in (
        ("md", table.markdown() + "\n"),
        ("csv", table.csv()),
        ("json", json.dumps(table.json(), indent=1) + "\n"),
    ):
        with replacing(folder / f"{table.name}.{ending}") as file:
            file.write_text(text)
