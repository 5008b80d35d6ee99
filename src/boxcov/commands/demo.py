"""``boxcov demo``: see ``boxcov.demo`` for what it does."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from boxcov.commands.options import AsJson


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the picture, the table and the posterior.")] = Path("demo"),
    as_json: AsJson = False,
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


def percent(ratio: float) -> str:
    """Two digits where they matter.

    >>> percent(1.414), percent(0.0764), percent(0.0)
    ('141 %', '7.6 %', '0 %')
    """
    return f"{100 * ratio:.0f} %" if ratio >= 1 else f"{100 * ratio:.2g} %"
