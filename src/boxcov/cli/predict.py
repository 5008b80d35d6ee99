"""``boxcov predict``: boxes with their covariances for every frame, in one file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from boxcov.cli.options import (
    AsJson,
    Count,
    CovarianceKind,
    CovarianceWord,
    DataWord,
    DerivativeKind,
    DetectorWord,
    Device,
    Format,
    FrameId,
    Method,
    Posterior,
    Resume,
    Seed,
    Split,
    Sweeps,
    Workers,
)


def predict(
    out: Annotated[
        Path,
        typer.Option(metavar="FILE", help="File for the boxes; a folder for the format kitti."),
    ],
    detector: DetectorWord = "centerpoint:small",
    posterior: Posterior = None,
    data: DataWord = "simulated:clear",
    split: Split = None,
    count: Count = None,
    method: Annotated[
        Method, typer.Option(help="nms is a baseline: the spread of what NMS removed.")
    ] = Method.exact,
    samples: Annotated[
        int | None,
        typer.Option(
            help="Of mcglm and mci (10), and of what exact is to estimate below the head."
        ),
    ] = None,
    derivative: Annotated[
        DerivativeKind | None,
        typer.Option(help="Of mcglm: forward mode (jvp), or the paper's difference (fd)."),
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="Step of the derivative fd (1e-7).")] = None,
    most: Annotated[
        int | None, typer.Option(min=1, help="Of glm: only the first so many boxes of a frame.")
    ] = None,
    calibrated: Annotated[
        bool,
        typer.Option(
            "--calibrated",
            help="Also the covariance of the errors, by what boxcov calibrate wrote.",
        ),
    ] = False,
    score: Annotated[
        bool,
        typer.Option(
            "--score",
            help="Also the variance of each score's logit, and its covariance with the box, in the format native.",
        ),
    ] = False,
    format: Annotated[
        Format, typer.Option(help="native is what boxcov evaluate and boxcov convert read.")
    ] = Format.native,
    frame_id: FrameId = "lidar",
    covariance: CovarianceWord = CovarianceKind.predictive,
    sweeps: Sweeps = 10,
    seed: Seed = 0,
    device: Device = "cpu",
    workers: Workers = 0,
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """Run a detector over frames and write its boxes with their covariances. Frames are those that it was not trained on, unless --split says."""
    from boxcov.pipeline import formats
    from boxcov.pipeline import predict as prediction
    from boxcov.pipeline.progress import Progress
    from boxcov.pipeline.sources import Source, unseen_split

    how = prediction.How(
        method.value,
        posterior,
        samples,
        None if derivative is None else derivative.value,
        epsilon,
        seed,
        calibrated,
        most,
        score,
    )
    with Progress("predicting") as progress:
        report = prediction.run(
            out,
            detector,
            how,
            Source(data, split or unseen_split(data), count, seed, sweeps),
            format=format.value,
            device=device,
            resume=resume,
            workers=workers,
            progress=progress,
            words=formats.Words(frame_id, covariance.value),
        )
    if report:  # one of several says what all have done
        print(json.dumps(report) if as_json else _shown(report))


def _shown(report: dict[str, Any]) -> str:
    found = f"{report['boxes']} boxes in {report['frames']} frames, {report['milliseconds']:.0f} ms a frame (median)"
    if report["boxes"]:
        return f"{found}\nuncertainty (trace): median {report['uncertainty']:.3g}\nwritten to {report['out']}"
    return f"{found}\nwritten to {report['out']}"
