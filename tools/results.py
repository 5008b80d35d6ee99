"""Write the tables of the documentation from the JSON result files: ``make results``.

Each file in docs/results/data holds one table with the fields title, command, date, machine,
columns, digits (decimals per column, or null), rows and notes. A page shows it between
``<!-- table NAME -->`` and ``<!-- end -->``. ``--check`` reports the pages that are out of date.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
DATA = DOCS / "results" / "data"
BLOCK = re.compile(r"<!-- table ([\w-]+) -->\n.*?<!-- end -->", re.DOTALL)
WIDTH = 100


def cell(value: Any, digits: int | None) -> str:
    """Return a value as it is printed in a table.

    >>> cell(0.5, 2), cell(None, 2), cell("P(U|I)", None)
    ('0.50', '', 'P(U\\\\|I)')
    """
    if value is None:
        return ""
    if isinstance(value, float) and digits is not None:
        return f"{value:.{digits}f}"
    return str(value).replace("|", "\\|")


def markdown(result: Mapping[str, Any], with_command: bool = True) -> str:
    """Return title, command, table and notes of one result."""
    columns, rows = result["columns"], result["rows"]
    digits = result.get("digits") or [None] * len(columns)
    right = [_is_numeric([row[k] for row in rows]) for k in range(len(columns))]
    lines = [
        _table_row(columns, [None] * len(columns)),
        "|" + "|".join("---:" if numeric else "---" for numeric in right) + "|",
        *(_table_row(row, digits) for row in rows),
    ]
    about = textwrap.fill(f"**{result['title']}** ({result['machine']}, {result['date']})", WIDTH)
    notes = [textwrap.fill(note, WIDTH) for note in result["notes"]]
    command = [_command(result["command"])] if with_command else []
    return "\n\n".join([about, *command, "\n".join(lines), *notes])


def _is_numeric(cells: list[Any]) -> bool:
    shown = [cell for cell in cells if cell is not None]
    return all(isinstance(cell, int | float) or re.match(r"[-+]?\d", cell) for cell in shown)


def _table_row(cells: list[Any], digits: list[int | None]) -> str:
    return "|" + "|".join(cell(value, d) for value, d in zip(cells, digits, strict=True)) + "|"


def _command(command: str) -> str:
    if command.startswith("none"):
        return f"Command: {command}."
    lines = []
    for part in command.split("; "):
        glued = re.sub(r"(--[\w-]+) (?!-)", "\\1\0", part)  # keep an option and its value together
        wrapped = textwrap.wrap(glued, WIDTH - 6, subsequent_indent="    ", break_on_hyphens=False)
        lines += [line.replace("\0", " ") for line in wrapped]
        lines[-1] += "\n"
    joined = "".join(line if line.endswith("\n") else line + " \\\n" for line in lines)
    return f"```sh\n{joined}```"


def updated(text: str, data: Path = DATA) -> str:
    """Return the text of a page with every table block written again.

    A command that several tables share is shown above the first one.
    """
    shown: set[str] = set()

    def block(match: re.Match[str]) -> str:
        result = json.loads((data / f"{match[1]}.json").read_text())
        table = markdown(result, with_command=result["command"] not in shown)
        shown.add(result["command"])
        return f"<!-- table {match[1]} -->\n\n{table}\n\n<!-- end -->"

    return BLOCK.sub(block, text)


def main() -> None:
    check = "--check" in sys.argv[1:]
    stale = [
        page for page in sorted(DOCS.rglob("*.md")) if updated(page.read_text()) != page.read_text()
    ]
    for page in stale:
        if not check:
            page.write_text(updated(page.read_text()))
            print(f"{page.relative_to(DOCS.parent)}: written")
    if check and stale:
        names = ", ".join(str(page.relative_to(DOCS.parent)) for page in stale)
        sys.exit(f"tables out of date in {names}: run make results")


if __name__ == "__main__":
    main()
