"""``boxcov convert``: a file of detections in another format."""

from __future__ import annotations

from boxcov.cli.command import Output
from boxcov.errors import counted
from boxcov.pipeline.options import ConvertCommand


def convert(options: ConvertCommand) -> Output:
    """Write the boxes of a file, with their covariances, in the format of another program."""
    from boxcov.pipeline.convert import run

    report = run(options)
    counts = f"{counted(report['boxes'], 'box')} in {counted(report['frames'], 'frame')}"
    return Output(report, [counts, f"written to {report['out']}"])
