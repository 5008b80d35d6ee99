"""``boxcov convert``: a file of detections in another format."""

from __future__ import annotations

from boxcov.cli.command import Output
from boxcov.pipeline.options import ConvertCommand


def convert(options: ConvertCommand) -> Output:
    """Write the boxes of a file, with their covariances, in the format of another program."""
    from boxcov.pipeline.convert import run

    report = run(options)
    counts = f"{report['boxes']} boxes in {report['frames']} frames"
    return Output(report, [counts, f"written to {report['out']}"])
