"""``boxcov bench``: what every method costs, on this machine, against the plain detector."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from boxcov.cli.options import AsJson, DataWord, DetectorWord, Device, Seed


def bench(
    detector: DetectorWord = "centerpoint:small",
    data: DataWord = "simulated:clear",
    boxes: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Boxes a frame, again for more; as the detector reports them if not given."
        ),
    ] = None,
    samples: Annotated[
        list[int] | None,
        typer.Option(min=2, help="Of the Monte-Carlo methods, again for more (10)."),
    ] = None,
    depth: Annotated[
        list[str] | None,
        typer.Option(help="Of the posterior: head, neck or backbone, again for more (head)."),
    ] = None,
    frames: Annotated[int, typer.Option(min=1, help="Frames that are timed.")] = 3,
    repeats: Annotated[int, typer.Option(min=1, help="Times each of them.")] = 7,
    seed: Seed = 0,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Time every method on the same frames, in turn: the plain detector, the exact covariance, MC-GLM and GLM as in the paper, MC dropout.

    laplace-torch has a row where it is installed.
    """
    import torch

    from boxcov.pipeline import bench as benchmarking
    from boxcov.pipeline.progress import Progress

    if device == "cpu" and not torch.cuda.is_available():
        print("no GPU on this machine: a CPU is measured", file=sys.stderr)
    with Progress("measuring", "settings") as progress:
        rows = benchmarking.run(
            detector,
            data,
            boxes or (),
            samples or (10,),
            depth or ("head",),
            device=device,
            frames=frames,
            repeats=repeats,
            seed=seed,
            progress=progress,
        )
    print(json.dumps(rows) if as_json else benchmarking.shown(rows))
