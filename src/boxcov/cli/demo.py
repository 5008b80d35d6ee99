"""``boxcov demo``: see ``boxcov.pipeline.demo`` for what it does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from boxcov.cli.options import AsJson
from boxcov.pipeline.progress import Steps

if TYPE_CHECKING:
    from rich.table import Table


def demo(
    out: Annotated[
        Path,
        typer.Option(help="Folder for the posterior, the predictions, the figures and the report."),
    ] = Path("demo"),
    as_json: AsJson = False,
) -> None:
    """The trained CenterPoint inside boxcov on simulated LiDAR: fit its posterior, run every method, and report. No download, no GPU."""
    from rich.console import Console

    from boxcov.pipeline import demo as steps

    console = Console(stderr=as_json)
    console.print(
        f"detector: {steps.DETECTOR}, trained and frozen; frames: simulated LiDAR", highlight=False
    )
    with Steps() as step:
        result = steps.run(out, step)
    if as_json:
        print(
            json.dumps(
                {"quality": result.rows, "runtime": result.runtime, "report": str(result.report)}
            )
        )
        return
    for error, what in (
        ("IoU", "boxes that overlap no object by 0.4"),
        ("l2", "boxes further off than the mean"),
    ):
        console.print(
            brief(result.rows, error, f"does u find the {what}? By chance: (in brackets)")
        )
    console.print(runtime_table(result.runtime))
    console.print(result.check, highlight=False)
    console.print(
        f"report: {result.report}",
        f"figures: {out}/figures",
        f"predictions: {out}/*.safetensors",
        sep="\n",
        highlight=False,
        soft_wrap=True,
    )


def brief(rows: list[dict[str, Any]], error: str, title: str) -> Table:
    """The paper's metrics and AUROC for one error, a line a method, what chance gives in brackets; intervals are in the report.

    >>> cell = {"value": 0.62, "low": None, "high": None}
    >>> row = {"method": "exact", "kind": "method", **{f"{name} IoU": cell for name in ("AvU", "P(A|C)", "P(U|I)", "AUROC")}}
    >>> brief([row, {**row, "kind": "chance", "method": "exact, shuffled"}], "IoU", "quality").row_count
    1
    """
    from rich.table import Table

    names = ("AvU", "P(A|C)", "P(U|I)", "AUROC")
    table = Table("u of", *names, title=title)
    random = {
        row["method"].removesuffix(", shuffled"): row for row in rows if row["kind"] == "chance"
    }
    for row in rows:
        own = row["kind"] in ("method", "baseline") and not row["method"].endswith(
            "(MCI)"
        )  # whose boxes are others, and so its baselines
        if own or row["method"] == "score + size + covariance (exact)":
            cells = [
                (row[f"{name} {error}"], random[row["method"]][f"{name} {error}"]) for name in names
            ]
            table.add_row(
                row["method"], *(f"{_two(value)} ({_two(chance)})" for value, chance in cells)
            )
    return table


def _two(cell: dict[str, float | None]) -> str:
    return "-" if cell["value"] is None else f"{cell['value']:.2f}"


def runtime_table(rows: list[dict[str, Any]]) -> Table:
    """Milliseconds a frame, for a terminal.

    >>> runtime_table([{"method": "exact", "ms": 12.34, "ratio": 1.5, "boxes": 97}]).row_count
    1
    """
    from rich.table import Table

    table = Table(
        "method",
        "ms a frame",
        "times the plain detector",
        title=f"run time, {rows[0]['boxes']} boxes a frame",
    )
    for row in rows:
        samples = f", k = {row['samples']}" if row.get("samples") else ""
        table.add_row(f"{row['method']}{samples}", f"{row['ms']:.0f}", f"{row['ratio']:.1f}")
    return table
