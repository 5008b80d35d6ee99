"""``boxcov demo``: all steps on the detector and the simulated frames inside the package."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from boxcov.cli.command import AsJson
from boxcov.pipeline.options import DemoCommand
from boxcov.pipeline.terminal import say, say_json, say_table

if TYPE_CHECKING:
    from rich.table import Table

METRICS = ("AvU", "P(A|C)", "P(U|I)", "AUROC")
INACCURATE = {
    "IoU": "boxes whose IoU with an object is below 0.4",
    "l2": "boxes whose error is above the mean",
}


def demo(options: DemoCommand, as_json: AsJson = False) -> None:
    """Fit a posterior, run every method and write a report: no download, no GPU.

    The detector is the trained CenterPoint inside the package, on simulated LiDAR frames.
    """
    from boxcov.pipeline import demo as pipeline
    from boxcov.pipeline.progress import Steps

    out = sys.stderr if as_json else sys.stdout
    say(f"detector: {pipeline.DETECTOR}; frames: simulated LiDAR", out)
    with Steps() as step:
        result = pipeline.run(options, step)
    if as_json:
        report = str(result.report)
        say_json({"quality": result.rows, "runtime": result.runtime, "report": report})
        return
    for error, boxes in INACCURATE.items():
        title = f"does u find {boxes}? (in brackets: chance level, u shuffled)"
        say_table(_quality_table(result.rows, error, title))
    say_table(_runtime_table(result.runtime))
    say(result.check)
    say(
        f"report: {result.report}\nfigures: {options.out}/figures\n"
        f"predictions: {options.out}/*.safetensors"
    )


def _quality_table(rows: list[dict[str, Any]], error: str, title: str) -> Table:
    """Return the paper's metrics and AUROC for one error, with one line per method."""
    from rich.table import Table

    table = Table("u of", *METRICS, title=title)
    chance = {
        row["method"].removesuffix(", shuffled"): row for row in rows if row["kind"] == "chance"
    }
    for row in rows:
        method = row["method"]
        # MCI reports other boxes, so its baselines differ from those of all other methods
        own = row["kind"] in ("method", "baseline") and not method.endswith("(MCI)")
        if own or method == "score + size + covariance (exact)":
            keys = [f"{name} {error}" for name in METRICS]
            cells = (f"{_cell(row[key])} ({_cell(chance[method][key])})" for key in keys)
            table.add_row(method, *cells)
    return table


def _cell(cell: dict[str, float | None]) -> str:
    return "-" if cell["value"] is None else f"{cell['value']:.2f}"


def _runtime_table(rows: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    title = f"run time, {rows[0]['boxes']} boxes per frame"
    table = Table("method", "ms per frame", "relative to the plain detector", title=title)
    for row in rows:
        samples = f", k = {row['samples']}" if row.get("samples") else ""
        table.add_row(f"{row['method']}{samples}", f"{row['ms']:.0f}", f"{row['ratio']:.1f}")
    return table
