"""``boxcov reproduce``: every table and figure of the paper, one run each."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from boxcov.cli.options import AsJson, DetectorWord, Device


def reproduce(
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="Folder for runs, tables, figures and the report; what is there is used.",
        ),
    ],
    quick: Annotated[
        bool, typer.Option("--quick", help="Few frames: a check in minutes, not figures to read.")
    ] = False,
    detector: DetectorWord = "centerpoint:small",
    data: Annotated[
        str, typer.Option(metavar="KIND:WHERE", help="Frames behind the posterior.")
    ] = "simulated:clear",
    split: Annotated[str | None, typer.Option(help="Their split.")] = "train",
    count: Annotated[int | None, typer.Option(min=1, help="How many of them.")] = None,
    n_data: Annotated[
        float | None,
        typer.Option(help="Frames that the detector was trained on; 3500 for centerpoint:small."),
    ] = None,
    test: Annotated[
        str | None,
        typer.Option(metavar="KIND:WHERE", help="Frames to test on; as --data unless given."),
    ] = None,
    test_split: Annotated[str | None, typer.Option(help="Their split.")] = None,
    test_count: Annotated[int | None, typer.Option(min=1, help="How many of them.")] = None,
    shift: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND:WHERE", help="Data of another kind; again for more."),
    ] = None,
    shift_count: Annotated[int | None, typer.Option(min=1, help="Frames of each of them.")] = None,
    threshold: Annotated[
        float, typer.Option(help="Of the score: predictions above it are judged.")
    ] = 0.1,
    sweeps: Annotated[int, typer.Option(min=1, help="Turns of the LiDAR in a frame.")] = 10,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Every table and figure of the paper beside its own figures, and shifts. Cut off, it goes on when started again."""
    from boxcov.pipeline.progress import Steps
    from boxcov.pipeline.reproduce.setting import Setting
    from boxcov.pipeline.reproduce.study import reproduce as run
    from boxcov.pipeline.sources import unseen_split

    base = Setting.quick() if quick else Setting()
    own = detector == Setting.detector  # whose training is known
    setting = replace(
        base,
        detector=detector,
        data=data,
        split=split,
        count=count or base.count,
        n_data=n_data or (base.n_data if own else None),
        test=test or data,
        test_split=test_split or unseen_split(test or data),
        test_count=test_count or base.test_count,
        shifts=tuple(shift) if shift else base.shifts if data.startswith("simulated") else (),
        shift_count=shift_count or base.shift_count,
        threshold=threshold,
        sweeps=sweeps,
        seed=seed,
        device=device,
    )
    with Steps() as step:
        tables = run(out, setting, step.named)
    if as_json:
        print(json.dumps({"out": str(out), "tables": [table.json() for table in tables]}))
        return
    print(f"{len(tables)} tables: {out / 'reproduction.md'}, and each in {out / 'tables'}")
    print(f"figures: {out / 'figures'}   report: {out / 'report.html'}")
