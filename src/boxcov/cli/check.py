"""``boxcov check``: check that a detector keeps the contract."""

from __future__ import annotations

import sys

import typer

from boxcov.cli.command import AsJson
from boxcov.pipeline.options import CheckCommand
from boxcov.pipeline.terminal import say


def check(options: CheckCommand, as_json: AsJson = False) -> None:
    """Check a detector before a posterior is fitted, on the first two frames of a split.

    The exit code is 1 if a check fails.
    """
    from boxcov.pipeline.check import run
    from boxcov.pipeline.progress import Progress

    with Progress("checking", "checks") as progress:
        report = run(options, progress)
    say(report.to_json() if as_json else report)
    if not report.ok:
        say(f"boxcov: {len(report.failed)} checks failed", file=sys.stderr)
        raise typer.Exit(1)
