"""``boxcov evaluate``: how good the covariances of one or more files of predictions are, as a table and as a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from boxcov.cli.options import AsJson, Resume, SummaryKind, Workers


def evaluate(
    predictions: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="What boxcov predict wrote, one file a method."),
    ],
    data: Annotated[
        str | None,
        typer.Option(
            metavar="KIND:WHERE",
            help="Where the frames are now; unless given, where the file says they were.",
        ),
    ] = None,
    uncertainty: Annotated[
        SummaryKind,
        typer.Option(
            help="u of the tables: what is made of each covariance, or the variance of the score's logit."
        ),
    ] = SummaryKind.trace,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the report there: one HTML page.")
    ] = None,
    scenes: Annotated[int, typer.Option(min=0, help="Frames to look at in the report.")] = 6,
    replicates: Annotated[
        int, typer.Option(min=2, help="Of the frames drawn anew, for the intervals.")
    ] = 200,
    seed: Annotated[
        int, typer.Option(min=0, help="Of what is drawn for intervals and chance.")
    ] = 0,
    workers: Workers = 0,
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """Compare predictions with the objects of their frames: the metrics of each file, beside baselines and chance."""
    from boxcov._torch.distributed import join_process_group
    from boxcov.pipeline import evaluate as evaluation
    from boxcov.pipeline.progress import Progress

    with Progress("reading frames") as reading, join_process_group("cpu") as (ranks, _):
        parts = evaluation.blocks_of(out, ranks)
        if parts is not None:
            evaluation.read_objects(parts, predictions, data, ranks, resume, workers, reading)
        if ranks.rank:  # one of several goes on
            return
        study = evaluation.study_of(
            predictions, data, out, scenes, uncertainty.value, parts, workers, progress=reading
        )
    rows = evaluation.rows_of(study, replicates, seed)
    if out is not None and parts is not None:
        evaluation.write(out, study)
        parts.remove()
    if as_json:
        print(
            json.dumps(
                {"about": dict(study.about), "rows": rows, "out": None if out is None else str(out)}
            )
        )
        return
    from rich.console import Console

    console = Console()
    console.print(evaluation.shown(rows))
    more = evaluation.added(rows)
    if more is not None:
        console.print(more)
    if out is not None:
        console.print(
            f"report: {out}", highlight=False, soft_wrap=True
        )  # a path in one piece, whatever the width
