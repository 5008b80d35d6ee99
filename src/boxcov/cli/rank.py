"""``boxcov rank``: which frames and boxes to label or check first."""

from __future__ import annotations

from boxcov.cli.command import AsJson
from boxcov.pipeline.options import RankCommand
from boxcov.pipeline.terminal import say, say_json


def rank(options: RankCommand, as_json: AsJson = False) -> None:
    """Order frames, and their boxes, by how much a look at them pays.

    Take risk to label frames where the detector fails, epistemic to label frames unlike the
    training data, and disagreement to find wrong labels in labelled frames. risk and disagreement
    need a posterior of `boxcov calibrate`.
    """
    from boxcov.pipeline.progress import Progress
    from boxcov.pipeline.rank import run

    with Progress("predicting") as progress:
        report = run(options, progress)
    if as_json:
        say_json(report)
        return
    for row in report["first"]:
        say(f"{row['value']:10.3g}  {row['frame']}: {row['boxes']} boxes, first {row['first']}")
    say(f"{report['frames']} frames, by {report['by']} ({report['aggregate']} over boxes)")
    say(f"written to {' and '.join(report['written'])}")
