"""Time of each method against boxes, samples and depth, on the small CenterPoint.

    python benchmarks/growth.py [--device cpu] [--write]

Ratios are to the plain detector in the same run. ``--write`` updates the result files
docs/results/data/growth-*.json; ``make results`` then writes them to the performance page.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

from boxcov.pipeline.bench import run
from boxcov.pipeline.options import BenchCommand

DATA = Path(__file__).parents[1] / "docs" / "results" / "data"
NOTE = (
    "Medians over 2 frames and {repeats} repeats on the small CenterPoint. "
    "The row `plain` is in milliseconds."
)


def table(rows: Sequence[dict[str, Any]], by: str) -> tuple[list[Any], list[list[Any]]]:
    """Return columns and rows of a table: one row per method, one column per value of ``by``.

    >>> row = {"method": "exact", "samples": None, "boxes": 9, "ratio": 1.5, "ms": 3.0}
    >>> table([row], "boxes")
    (['boxes', '9'], [['exact', 1.5]])
    """
    values = list(dict.fromkeys(row[by] for row in rows))
    names = list(dict.fromkeys(_name(row, by) for row in rows))
    cells = {(_name(row, by), row[by]): _cell(row) for row in rows}
    return [by, *map(str, values)], [
        [name, *(cells.get((name, v)) for v in values)] for name in names
    ]


def _name(row: dict[str, Any], by: str) -> str:
    if row["samples"] is None or by == "samples":
        return str(row["method"])
    return f"{row['method']}, k = {row['samples']}"


def _cell(row: dict[str, Any]) -> Any:
    if row["ms"] is None:
        return str(row["note"])
    return f"{row['ms']:.0f} ms" if row["method"] == "plain" else round(row["ratio"], 2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    about = {"device": options.device, "repeats": options.repeats, "frames": 2}
    samples = run(BenchCommand(samples=(10, 30, 100), **about))
    tables = {
        "boxes": run(BenchCommand(boxes=(10, 100, 500), **about)),
        "samples": [row for row in samples if row["samples"] is not None],
        "depth": run(BenchCommand(depth=("head", "neck", "backbone"), **about)),
    }
    machine = options.device
    if machine == "cpu":
        machine = f"{torch.get_num_threads()} CPU threads"
    for by, measured in tables.items():
        columns, rows = table(measured, by)
        result = {
            "title": f"Cost by {by}, in plain frames",
            "command": f"python benchmarks/growth.py --device {options.device}",
            "date": date.today().isoformat(),
            "machine": machine,
            "columns": columns,
            "digits": [None] + [2] * (len(columns) - 1),
            "rows": rows,
            "notes": [NOTE.format(repeats=options.repeats)],
        }
        print(json.dumps(result, indent=1))
        if options.write:
            (DATA / f"growth-{by}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
