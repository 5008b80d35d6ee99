"""``boxcov reproduce``: every table and figure of the paper."""

from __future__ import annotations

from boxcov.cli.command import Output
from boxcov.pipeline.options import ReproduceCommand


def reproduce(options: ReproduceCommand) -> Output:
    """Compute every table and figure of the paper.

    The tables show the paper's numbers next to ours. An interrupted run continues when it is
    started again.
    """
    from boxcov.pipeline.progress import Steps
    from boxcov.pipeline.reproduce.study import run

    with Steps() as step:
        tables = run(options, step)
    out = options.out
    lines = [
        f"{len(tables)} tables: {out / 'reproduction.md'}, and each in {out / 'tables'}",
        f"figures: {out / 'figures'}   report: {out / 'report.html'}",
    ]
    return Output({"out": str(out), "tables": [table.json() for table in tables]}, lines)
