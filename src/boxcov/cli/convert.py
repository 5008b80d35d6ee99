"""``boxcov convert``: a file of detections in another format."""

from __future__ import annotations

from boxcov.cli.command import AsJson
from boxcov.pipeline.options import ConvertCommand
from boxcov.pipeline.terminal import say, say_json


def convert(options: ConvertCommand, as_json: AsJson = False) -> None:
    """Write the boxes of a file, with their covariances, in the format of another program."""
    from boxcov.pipeline.convert import run

    report = run(options)
    if as_json:
        say_json(report)
    else:
        say(f"{report['boxes']} boxes in {report['frames']} frames\nwritten to {report['out']}")
