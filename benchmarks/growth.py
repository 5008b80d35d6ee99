"""Time of each method against boxes, samples and depth, on the small CenterPoint.

    python benchmarks/growth.py [--device cpu] [--write docs/results/performance.md]

--write replaces the tables between the two marks of that file. Ratios are to the plain detector in
the same run, with quartiles.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from boxcov.pipeline.bench import run
from boxcov.pipeline.options import BenchCommand

START, END = "<!-- growth: begin -->", "<!-- growth: end -->"


def table(rows: Sequence[dict[str, Any]], by: str, shown: str) -> str:
    """Markdown: one row per method, one column per value of ``by``; ratios with quartiles.

    >>> row = {"method": "exact", "samples": None, "boxes": 9, "ratio": 1.5, "ms": 3.0}
    >>> row |= {"low": 2.0, "high": 4.0, "peak_mib": 99.6}
    >>> print(table([row], "boxes", "9 boxes").splitlines()[-1])
    | exact | 1.50 (1.00 to 2.00), 100 MiB |
    """
    columns = list(dict.fromkeys(row[by] for row in rows))
    names = list(dict.fromkeys(_name(row, by) for row in rows))
    cells = {(_name(row, by), row[by]): _cell(row) for row in rows}
    lines = [
        f"| {shown} | " + " | ".join(str(column) for column in columns) + " |",
        "| --- |" + " ---: |" * len(columns),
    ]
    lines += [
        f"| {name} | " + " | ".join(cells.get((name, column), "") for column in columns) + " |"
        for name in names
    ]
    return "\n".join(lines)


def _name(row: dict[str, Any], by: str) -> str:
    return (
        row["method"]
        if row["samples"] is None or by == "samples"
        else f"{row['method']}, k = {row['samples']}"
    )


def _cell(row: dict[str, Any]) -> str:
    if row["ms"] is None:
        return str(row["note"])
    memory = "" if row["peak_mib"] is None else f", {row['peak_mib']:.0f} MiB"
    if row["method"] == "plain":
        return f"{row['ms']:.0f} ms{memory}"
    unit = row["ms"] / row["ratio"]
    return f"{row['ratio']:.2f} ({row['low'] / unit:.2f} to {row['high'] / unit:.2f}){memory}"


def replaced(text: str, tables: str) -> str:
    """The text with the tables between its marks.

    >>> replaced(f"a {START} old {END} b", "new") == f"a {START}\\n\\nnew\\n\\n{END} b"
    True
    """
    before, rest = text.split(START)
    _, after = rest.split(END)
    return f"{before}{START}\n\n{tables}\n\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    about = {"device": options.device, "repeats": options.repeats, "frames": 2}
    boxes = run(BenchCommand(boxes=(10, 100, 500), **about))
    samples = [
        row
        for row in run(BenchCommand(samples=(10, 30, 100), **about))
        if row["samples"] is not None
    ]
    depths = run(BenchCommand(depth=("head", "neck", "backbone"), **about))
    load = f", load of the machine {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    threads = f", {torch.get_num_threads()} threads" if options.device == "cpu" else ""
    tables = "\n\n".join(
        [
            f"torch {torch.__version__}, {options.device}{threads}, "
            f"medians over 2 frames and {options.repeats} repeats{load}.",
            table(boxes, "boxes", "boxes"),
            table(samples, "samples", "samples"),
            table(depths, "depth", "depth of the posterior"),
        ]
    )
    print(tables)
    if options.write is not None:
        options.write.write_text(
            replaced(options.write.read_text(encoding="utf-8"), tables), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
