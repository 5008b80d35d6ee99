"""``boxcov check``: check that a detector keeps the contract."""

from __future__ import annotations

from boxcov.cli.command import Output
from boxcov.errors import counted
from boxcov.pipeline.options import CheckCommand


def check(options: CheckCommand) -> Output:
    """Check a detector before a posterior is fitted, on the first two frames of a split.

    The exit code is 1 if a check fails.
    """
    from boxcov.pipeline.check import run
    from boxcov.pipeline.progress import ProgressBar

    with ProgressBar("checking", "checks") as progress:
        report = run(options, progress)
    failure = "" if report.ok else f"{counted(len(report.failed), 'check')} failed"
    written = [] if options.out is None else [f"written to {options.out}"]
    return Output(report.to_dict(), [str(report), *written], failure)
