"""The command line: thin, it parses, calls and shows. Needs the packages of ``pip install boxcov[cli]``."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

try:
    import typer
except ImportError:
    sys.exit("the boxcov command needs typer, rich and matplotlib: pip install 'boxcov[cli]'")

from boxcov.errors import BoxcovError


def main() -> None:
    """Run the command line."""
    app = typer.Typer(
        add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help="Covariances for the boxes of a detector."
    )
    app.callback()(_callback)
    app.command(epilog="Example: boxcov demo --out demo")(demo)
    app.command(epilog="Example: boxcov train --config small --data simulated:clear --device cuda --out small.safetensors")(train)
    try:
        app()
    except BoxcovError as error:
        sys.exit(f"boxcov: {error}")


def _callback() -> None:
    """For every box of a frozen object detector, the covariance of that box under what the detector does not know."""


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the picture, the table and the posterior.")] = Path("demo"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the table for a script.")] = False,
) -> None:
    """Train a small detector, fit its posterior, compare all methods on unseen frames, and draw what they say."""
    from rich.console import Console
    from rich.table import Table

    from boxcov import demo as steps

    console = Console(stderr=as_json)
    out.mkdir(parents=True, exist_ok=True)
    with console.status("training a small detector on 240 drawn scenes"):
        detector, frames = steps.prepare()
    with console.status("fitting the posterior of all its layers"):
        posterior = steps.posterior_of(detector, frames)
    console.print(f"posterior of {len(posterior.blocks)} layers from {posterior.frames} frames: {posterior.storage()}")
    with console.status("running every method on 20 unseen scenes"):
        rows = steps.compare(detector, posterior)
    steps.draw(detector, posterior, out / "demo.png")
    posterior.save(out / "posterior.safetensors")
    (out / "demo.json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if as_json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    table = Table(
        "method", "ms a frame", "off the exact covariance", "NLL of the errors", title="covariances of the boxes of 20 unseen scenes"
    )
    for row in rows:
        table.add_row(row.method, f"{row.milliseconds:.1f}", percent(row.off), f"{row.nll:.2f}")
    console.print(table)
    console.print(f"picture, table and posterior: {out}/demo.png, demo.json, posterior.safetensors")


def train(
    out: Annotated[Path, typer.Option(help="File for the weights; the report goes beside it.")],
    config: Annotated[str, typer.Option(help="small, pillar, voxel or kitti.")] = "small",
    data: Annotated[str, typer.Option(help="simulated:SCENARIO, nuscenes:ROOT or kitti:ROOT.")] = "simulated:clear",
    split: Annotated[str | None, typer.Option(help="Split of a real set, with a part of it if need be: train[:28].")] = None,
    test: Annotated[list[str] | None, typer.Option(help="Data to test on, as --data; again for more.")] = None,
    test_split: Annotated[str | None, typer.Option(help="Split of the data to test on: train[28:].")] = None,
    count: Annotated[int, typer.Option(help="Simulated frames to train on.")] = 2000,
    test_count: Annotated[int, typer.Option(help="Simulated frames to test on.")] = 100,
    steps: int = 4000,
    batch: int = 4,
    rate: Annotated[float, typer.Option(help="The highest learning rate.")] = 2e-3,
    sweeps: int = 10,
    seed: int = 0,
    device: str = "cpu",
    start_from: Annotated[str | None, typer.Option(help="Weights to start from: a file, or small.")] = None,
    resume: Annotated[bool, typer.Option(help="Go on from the checkpoint beside --out.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report for a script.")] = False,
) -> None:
    """Train a CenterPoint, print its average precision on frames that it has not seen, and write its weights."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from boxcov.commands import train as steps_of

    tests = [(name, test_split) for name in test or [data]]
    console = Console(stderr=as_json)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        bar = bars.add_task("making frames", total=steps)

        def progress(done: int, total: int, loss: float) -> None:
            bars.update(bar, completed=done, description=f"loss {loss:.3f}")
            if not console.is_terminal:
                steps_of.plain_progress(done, total, loss)

        report = steps_of.run(
            out,
            config,
            data,
            split,
            tests,
            count,
            test_count,
            steps,
            batch,
            rate,
            sweeps,
            seed,
            device,
            start_from,
            resume,
            progress,
        )
    print(json.dumps(report) if as_json else steps_of.show(report))


def percent(ratio: float) -> str:
    """Two digits where they matter.

    >>> percent(1.414), percent(0.0764), percent(0.0)
    ('141 %', '7.6 %', '0 %')
    """
    return f"{100 * ratio:.0f} %" if ratio >= 1 else f"{100 * ratio:.2g} %"


if __name__ == "__main__":
    main()
