"""``boxcov fit``: the posterior of a detector's weights from labelled frames, in one file."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from boxcov.cli.options import (
    AsJson,
    Count,
    DataWord,
    Depth,
    DetectorWord,
    Device,
    FisherKind,
    FormKind,
    LocationsKind,
    NonFiniteKind,
    Resume,
    Seed,
    Split,
    Sweeps,
    Workers,
)


def fit(
    out: Annotated[Path, typer.Option(metavar="FILE", help="File for the posterior.")],
    detector: DetectorWord = "centerpoint:small",
    data: DataWord = "simulated:clear",
    split: Split = None,
    count: Count = None,
    depth: Depth = "head",
    prior_precision: Annotated[float, typer.Option(min=0.0, help="tau of (n F + tau I)^-1.")] = 1.0,
    n_data: Annotated[
        float | None,
        typer.Option(
            help="Training frames that the Fisher stands for; unless given, those of the data."
        ),
    ] = None,
    fisher: Annotated[
        FisherKind,
        typer.Option(help="Labels from the data, drawn by the detector, or no Fisher at all."),
    ] = FisherKind.empirical,
    fraction: Annotated[
        float, typer.Option(help="Share of the frames to use, drawn with the seed.")
    ] = 1.0,
    form: Annotated[
        FormKind, typer.Option(help="eigen is exact; paper is Q^-1 (x) H^-1 without n and tau.")
    ] = FormKind.eigen,
    locations: Annotated[
        LocationsKind,
        typer.Option(
            help="Inputs of a layer: at all locations alike, or weighed by their squared gradient."
        ),
    ] = LocationsKind.all,
    corrected: Annotated[
        bool,
        typer.Option(
            "--corrected", help="Correct the eigenvalues (EKFAC): a second pass over the frames."
        ),
    ] = False,
    compress: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="A smaller file, no variance further off than this share, 0.01 for instance; whole unless given.",
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Frames at a time.")] = 1,
    nonfinite: Annotated[
        NonFiniteKind,
        typer.Option(
            help="A frame with a NaN or an infinity, in it or in its gradient: an error, or left out and counted."
        ),
    ] = NonFiniteKind.error,
    checkpoint_every: Annotated[
        float,
        typer.Option(
            min=0.0,
            metavar="SECONDS",
            help="Keep what was counted in FILE.checkpoint, this often and when stopped.",
        ),
    ] = 60.0,
    sweeps: Sweeps = 10,
    seed: Seed = 0,
    device: Device = "cpu",
    workers: Workers = 0,
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """Fit the posterior of a detector's weights to its training frames: offline, once, one pass over the frames, or two with --corrected."""
    from time import perf_counter

    from boxcov._torch.distributed import is_main_process
    from boxcov.pipeline import fit as fitting
    from boxcov.pipeline.progress import Progress
    from boxcov.pipeline.sources import Source

    began = perf_counter()
    with _stopped(out), Progress("fitting", "frames" if batch == 1 else "batches") as progress:
        posterior = fitting.run(
            out,
            detector,
            Source(data, split, count, seed, sweeps),
            depth,
            prior_precision=prior_precision,
            n_data=n_data,
            fisher=fisher.value,
            fraction=fraction,
            form=form.value,
            locations=locations.value,
            corrected=corrected,
            compress=compress,
            batch=batch,
            nonfinite=nonfinite.value,
            every=checkpoint_every,
            resume=resume,
            device=device,
            workers=workers,
            progress=progress,
        )
    if not is_main_process():  # one of several says what all have done
        return
    report = fitting.report(posterior, (perf_counter() - began) / 60)
    print(json.dumps({"out": str(out), **report}) if as_json else _shown(out, report))


@contextmanager
def _stopped(out: Path) -> Iterator[None]:
    """Say how to go on after Ctrl-C or SIGTERM."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        print(
            f"boxcov: stopped; the same command with --resume goes on from {out}.checkpoint",
            file=sys.stderr,
        )
        raise


def _shown(out: Path, report: dict[str, Any]) -> str:
    skipped = f" and {report['skipped']} left out" if report["skipped"] else ""
    frames = f"{report['frames']} frames{skipped}" + (
        "" if report["n_data"] == report["frames"] else f", standing for {report['n_data']:g}"
    )
    truncated = f"; no variance more than {report['error']:.2%} off" if report["error"] else ""
    return (
        f"posterior of {report['layers']} layers ({report['depth']}) from {frames}, in {report['minutes']:.2f} minutes\n"
        f"{report['storage']}{truncated}\n"
        f"condition number of the covariance: {report['condition']:.2g} at most, in {report['worst']}\n"
        f"written to {out}"
    )
