"""Write the tables of the documentation from the JSON result files: ``make results``.

Each file in docs/results/data holds one table with the fields title, command, date, machine,
columns, digits (decimals per column, or null), rows and notes. A page shows it between
``<!-- table NAME -->`` and ``<!-- end -->``; ``<!-- table NAME bare -->`` leaves out title and
command. ``gain.json`` is made from other files. ``--check`` reports the pages that are out of date.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DATA = ROOT / "docs" / "results" / "data"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"<!-- table ([\w-]+)( bare)? -->\n.*?<!-- end -->", re.DOTALL)
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


def markdown(result: Mapping[str, Any], with_command: bool = True, with_title: bool = True) -> str:
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
    title = [about] if with_title else []
    return "\n\n".join([*title, *command, "\n".join(lines), *notes])


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
        bare = match[2] or ""
        table = markdown(result, not bare and result["command"] not in shown, not bare)
        shown.add(result["command"])
        return f"<!-- table {match[1]}{bare} -->\n\n{table}\n\n<!-- end -->"

    return BLOCK.sub(block, text)


FREE = "free: score + size + signals"
# name in error-model-rows.json, name in the table of the gain, added time in plain frames
GAIN = (
    ("1 - score", "1 - score", "0"),
    ("score + size", "score + size", "{model:.1f}"),
    ("+ raw outputs of the head", "score + size + raw outputs", "{model:.1f}"),
    (FREE, "boxcov, without covariances", "{model:.1f}"),
    ("ours: free + covariances", "**boxcov**", "{all:.1f}"),
)


def gain(data: Path = DATA) -> dict[str, Any]:
    """Return the table of the README: what ranks boxes how well, at which cost."""

    def read(name: str) -> dict[str, Any]:
        result: dict[str, Any] = json.loads((data / f"{name}.json").read_text())
        return result

    def ranking(source: dict[str, Any], name: str) -> list[float]:
        (row,) = (row for row in source["rows"] if row[0] == name)
        return [row[source["columns"].index(column)] for column in ("IoU < 0.4", "risk")]

    source = read("error-model-rows")
    timed = {row[2]: row[3] for row in read("performance-frame-cpu")["rows"]}  # ms per frame
    plain, exact = timed["plain"], timed["exact covariance"]
    both = timed["exact covariance and error model"]
    cost = {"model": (both - exact) / plain, "all": both / plain - 1}
    dropout, ensemble = (
        [ranking(read(f"error-model-{table}"), name)[0] for name in (row, FREE)]
        for table, row in (
            ("passes", "+ MC dropout, 8 passes"),
            ("ceiling", "+ deep ensemble, 4 more networks"),
        )
    )
    return {
        "title": "What ranks bad boxes how well",
        "command": source["command"],
        "date": source["date"],
        "machine": source["machine"],
        "columns": ["boxes ranked by", "AUROC, misplaced", "AUROC, bad", "added time"],
        "digits": [None, 3, 3, None],
        "rows": [
            [shown, *ranking(source, name), passes.format(**cost)] for name, shown, passes in GAIN
        ],
        "notes": [
            "Area under the ROC curve on 300 unseen simulated frames (0.5 is chance). Misplaced: "
            "IoU below 0.4, among boxes with an object. Bad: misplaced or without an object, among "
            "all boxes. All rows but the first: the same error model, fitted on 500 frames. "
            "Added time: on a CPU, 1 is the time of a frame without boxcov. On other test frames "
            f"score + size has {dropout[0]:.3f} with MC dropout (8 passes) and {ensemble[0]:.3f} "
            "with a deep ensemble (4 more networks), where boxcov without covariances has "
            f"{dropout[1]:.3f} and {ensemble[1]:.3f}.",
        ],
    }


def main() -> None:
    check = "--check" in sys.argv[1:]
    written, path = json.dumps(gain(), indent=1) + "\n", DATA / "gain.json"
    stale = [path] if not path.exists() or path.read_text() != written else []
    if stale and not check:
        path.write_text(written)
    stale += [page for page in PAGES if updated(page.read_text()) != page.read_text()]
    names = [str(page.relative_to(ROOT)) for page in stale]
    if check and stale:
        sys.exit(f"tables out of date in {', '.join(names)}: run make results")
    for page, name in zip(stale, names):
        if page.suffix == ".md":
            page.write_text(updated(page.read_text()))
        print(f"{name}: written")


if __name__ == "__main__":
    main()
