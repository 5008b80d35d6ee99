"""``boxcov fit``: the posterior of a detector's weights from labelled frames, in one file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from boxcov.commands.options import (
    AsJson,
    Count,
    DataWord,
    Depth,
    DetectorWord,
    Device,
    FisherKind,
    FormKind,
    LocationsKind,
    Seed,
    Split,
    Sweeps,
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
        float | None, typer.Option(help="Training frames that the Fisher stands for; unless given, those of the data.")
    ] = None,
    fisher: Annotated[
        FisherKind, typer.Option(help="Labels from the data, drawn by the detector, or no Fisher at all.")
    ] = FisherKind.empirical,
    fraction: Annotated[float, typer.Option(help="Share of the frames to use, drawn with the seed.")] = 1.0,
    form: Annotated[FormKind, typer.Option(help="eigen is exact; paper is Q^-1 (x) H^-1 without n and tau.")] = FormKind.eigen,
    locations: Annotated[
        LocationsKind, typer.Option(help="Inputs of a layer: at all locations alike, or weighed by their squared gradient.")
    ] = LocationsKind.all,
    corrected: Annotated[bool, typer.Option("--corrected", help="Correct the eigenvalues (EKFAC): a second pass over the frames.")] = False,
    batch: Annotated[int, typer.Option(min=1, help="Frames at a time.")] = 1,
    sweeps: Sweeps = 10,
    seed: Seed = 0,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Fit the posterior of a detector's weights to its training frames: offline, once, one pass over the frames, or two with --corrected."""
    from time import perf_counter

    from boxcov.commands import fitting
    from boxcov.commands.progress import Progress
    from boxcov.commands.sources import Source

    began = perf_counter()
    with Progress("fitting", "frames" if batch == 1 else "batches") as progress:
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
            batch=batch,
            device=device,
            progress=progress,
        )
    report = fitting.report(posterior, (perf_counter() - began) / 60)
    print(json.dumps({"out": str(out), **report}) if as_json else _shown(out, report))


def _shown(out: Path, report: dict[str, Any]) -> str:
    frames = f"{report['frames']} frames" + ("" if report["n_data"] == report["frames"] else f", standing for {report['n_data']:g}")
    return (
        f"posterior of {report['layers']} layers ({report['depth']}) from {frames}, in {report['minutes']:.2f} minutes\n"
        f"{report['storage']}\n"
        f"written to {out}"
    )
