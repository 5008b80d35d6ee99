"""``boxcov rank``: which frames and boxes to label or check first."""

from __future__ import annotations

from boxcov.cli.command import Output
from boxcov.errors import counted
from boxcov.pipeline.options import RankCommand


def rank(options: RankCommand) -> Output:
    """Order frames and their boxes: which to label or check first.

    Take risk to label frames where the detector fails, epistemic to label frames unlike the
    training data, and disagreement to find wrong labels in labelled frames. risk and disagreement
    need a posterior of `boxcov calibrate`.
    """
    from boxcov.pipeline.progress import ProgressBar
    from boxcov.pipeline.rank import run

    with ProgressBar("predicting") as progress:
        report = run(options, progress)
    order = f"{report['by']} ({report['aggregate']} over boxes)"
    about = f"the first {len(report['first'])} of {counted(report['frames'], 'frame')}, by {order}:"
    lines = [
        f"{row['value']:10.3g}  {row['frame']}: first of "
        f"{counted(row['boxes'], 'box')}: {row['first']}"
        for row in report["first"]
    ]
    return Output(report, [about, *lines, f"written to {' and '.join(report['written'])}"])
