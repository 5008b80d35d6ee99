"""``boxcov reproduce``: every table and figure of the paper."""

from __future__ import annotations

import json

from boxcov.cli.command import AsJson
from boxcov.pipeline.options import ReproduceCommand


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
        print(json.dumps({"out": str(out), "tables": [table.json() for table in tables]}))
        return
    print(f"{len(tables)} tables: {out / 'reproduction.md'}, and each in {out / 'tables'}")
    print(f"figures: {out / 'figures'}   report: {out / 'report.html'}")
