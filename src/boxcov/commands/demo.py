"""``boxcov demo``: see ``boxcov.demo`` for what it does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from boxcov.commands.options import AsJson
from boxcov.commands.progress import Steps

if TYPE_CHECKING:
    from rich.table import Table


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the posterior, the predictions, the figures and the report.")] = Path("demo"),
    as_json: AsJson = False,
) -> None:
    """The trained CenterPoint inside boxcov on simulated LiDAR: fit its posterior, run every method, and report. No download, no GPU."""
    from rich.console import Console

    from boxcov import demo as steps
    from boxcov.commands.evaluation import shown

    console = Console(stderr=as_json)
    console.print(f"detector: {steps.DETECTOR}, trained and frozen; frames: simulated LiDAR", highlight=False)
    with Steps() as step:
        result = steps.run(out, step)
    if as_json:
        print(json.dumps({"quality": result.rows, "runtime": result.runtime, "report": str(result.report)}))
        return
    console.print(shown(result.rows))
    console.print(runtime_table(result.runtime))
    console.print(result.check, highlight=False)
    console.print(f"report: {result.report}   figures: {out / 'figures'}   predictions: {out}/*.safetensors", highlight=False)


def runtime_table(rows: list[dict[str, Any]]) -> Table:
    """Milliseconds a frame, for a terminal.

    >>> runtime_table([{"method": "exact", "ms": 12.34, "ratio": 1.5, "boxes": 97}]).row_count
    1
    """
    from rich.table import Table

    table = Table("method", "ms a frame", "times the plain detector", title=f"run time, {rows[0]['boxes']} boxes a frame")
    for row in rows:
        samples = f", k = {row['samples']}" if row.get("samples") else ""
        table.add_row(f"{row['method']}{samples}", f"{row['ms']:.0f}", f"{row['ratio']:.1f}")
    return table
