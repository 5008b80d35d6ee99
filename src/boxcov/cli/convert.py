"""``boxcov convert``: a file of detections in another format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from boxcov.cli.options import AsJson, CovarianceKind, CovarianceWord, Format, FrameId


def convert(
    detections: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="What boxcov predict wrote, in the format native."),
    ],
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="File to write; a folder for the format kitti.")
    ],
    format: Annotated[Format, typer.Option(help="What to write.")],
    data: Annotated[
        str | None,
        typer.Option(
            metavar="KIND:WHERE",
            help="Where the frames are now; unless given, where the file says they were.",
        ),
    ] = None,
    frame_id: FrameId = "lidar",
    covariance: CovarianceWord = CovarianceKind.predictive,
    as_json: AsJson = False,
) -> None:
    """Write the boxes of a file, with their covariances, in the format of another program."""
    from boxcov.pipeline import convert as conversion

    report = conversion.run(detections, out, format.value, data, frame_id, covariance.value)
    print(
        json.dumps(report)
        if as_json
        else f"{report['boxes']} boxes in {report['frames']} frames\nwritten to {report['out']}"
    )
