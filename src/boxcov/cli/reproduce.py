"""``boxcov reproduce``: every table and figure of the paper."""

from __future__ import annotations

from boxcov.cli.command import AsJson
from boxcov.pipeline.options import ReproduceCommand
from boxcov.pipeline.terminal import say, say_json


def reproduce(options: ReproduceCommand, as_json: AsJson = False) -> None:
    """Compute every table and figure of the paper, and distribution shifts.

    The tables show the paper's numbers next to ours. An interrupted run continues when it is
    started again.
    """
    from boxcov.pipeline.progress import Steps
    from boxcov.pipeline.reproduce.study import run

    with Steps() as step:
        tables = run(options, step.named)
    out = options.out
    if as_json:
        say_json({"out": str(out), "tables": [table.json() for table in tables]})
        return
    say(f"{len(tables)} tables: {out / 'reproduction.md'}, and each in {out / 'tables'}")
    say(f"figures: {out / 'figures'}   report: {out / 'report.html'}")
