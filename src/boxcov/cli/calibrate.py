"""``boxcov calibrate``: from covariances of what the weights do not know to covariances of the errors, kept inside the posterior."""

from __future__ import annotations

import json
from enum import Enum
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

import typer

from boxcov.cli.options import (
    AsJson,
    Count,
    DataWord,
    DetectorWord,
    Device,
    Method,
    Seed,
    Split,
    Sweeps,
)


class CalibrationKind(str, Enum):
    score = "score"
    product = "product"


class HeadingKind(str, Enum):
    direction = "direction"
    axis = "axis"


def calibrate(
    posterior: Annotated[Path, typer.Option(metavar="FILE", help="What boxcov fit wrote.")],
    out: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="File for the posterior with the calibration inside; may be the same.",
        ),
    ],
    detector: DetectorWord = "centerpoint:small",
    data: DataWord = "simulated:clear",
    split: Split = None,
    count: Count = None,
    method: Annotated[
        Method, typer.Option(help="What the covariances will be computed by; nms has no posterior.")
    ] = Method.exact,
    samples: Annotated[
        int | None,
        typer.Option(
            help="Of mcglm and mci (10), and of what exact is to estimate below the head."
        ),
    ] = None,
    kind: Annotated[
        CalibrationKind,
        typer.Option(
            help="product: variance from score, size, range, class and the epistemic variances; "
            "score: without the epistemic variances."
        ),
    ] = CalibrationKind.product,
    heading: Annotated[
        HeadingKind,
        typer.Option(
            help="What yaw's variance is of: axis leaves half turns out, which no variance tells."
        ),
    ] = HeadingKind.direction,
    fit_share: Annotated[
        float,
        typer.Option(
            help="Share of the frames, from the first on, to fit; the rest is reported on."
        ),
    ] = 0.5,
    sweeps: Sweeps = 10,
    seed: Seed = 0,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Fit a calibration on labelled frames that the detector was not trained on, and report on others what it is worth."""
    from boxcov.pipeline import calibrate as calibration
    from boxcov.pipeline.predict import How
    from boxcov.pipeline.progress import Progress
    from boxcov.pipeline.sources import Source, held_out_split

    with Progress("predicting") as progress:
        report = calibration.run(
            out,
            detector,
            How(method.value, posterior, samples, seed=seed),
            Source(data, split or held_out_split(data), count, seed, sweeps),
            kind.value,
            heading=heading.value,
            fit_share=fit_share,
            device=device,
            progress=progress,
        )
    if as_json:
        print(json.dumps(finite(report)))
        return
    from rich.console import Console

    console = Console()
    console.print(calibration.shown(report))
    console.print(
        f"{calibration.verdict(report)}\nwritten to {out}", highlight=False, soft_wrap=True
    )


def finite(value: Any) -> Any:
    """Ready for JSON: null for a number that is not finite, such as the NLL of a singular covariance.

    >>> finite({"NLL": float("inf"), "ANEES": 1.0})
    {'NLL': None, 'ANEES': 1.0}
    """
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    return None if isinstance(value, float) and not isfinite(value) else value
