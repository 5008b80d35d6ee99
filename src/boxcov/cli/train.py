"""``boxcov train``: see ``boxcov.pipeline.train`` for what it does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from boxcov.cli.options import AsJson, DataWord, Device, Resume, Seed, Split, Sweeps


def train(
    out: Annotated[Path, typer.Option(help="File for the weights; the report goes beside it.")],
    config: Annotated[str, typer.Option(help="small, pillar, voxel or kitti.")] = "small",
    data: DataWord = "simulated:clear",
    split: Split = None,
    test: Annotated[
        list[str] | None, typer.Option(help="Data to test on, as --data; again for more.")
    ] = None,
    test_split: Annotated[
        str | None, typer.Option(help="Split of the data to test on: 'train[28:]'.")
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Simulated frames to train on.")] = 2000,
    test_count: Annotated[int, typer.Option(min=1, help="Simulated frames to test on.")] = 100,
    steps: Annotated[int, typer.Option(min=1)] = 4000,
    batch: Annotated[int, typer.Option(min=1, help="Frames of a step.")] = 4,
    rate: Annotated[float, typer.Option(help="The highest learning rate.")] = 2e-3,
    sweeps: Sweeps = 10,
    seed: Seed = 0,
    device: Device = "cpu",
    start_from: Annotated[
        str | None, typer.Option(help="Weights to start from: a file, or small.")
    ] = None,
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """Train a CenterPoint, print its average precision on frames that it has not seen, and write its weights."""
    from boxcov.pipeline import train as training
    from boxcov.pipeline.progress import Progress

    with Progress("making frames") as making, Progress("training", "steps") as bar:
        report = training.run(
            out,
            config,
            data,
            split,
            [(name, test_split) for name in test or [data]],
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
            progress=lambda done, total, loss: bar(done, total, f"loss {loss:.3f}"),
            making=making,
        )
    print(json.dumps(report) if as_json else training.show(report))
