"""``boxcov train``: train a CenterPoint."""

from __future__ import annotations

from math import isnan
from statistics import mean
from typing import Any

from boxcov._files.plain_text import aligned
from boxcov.cli.command import Output
from boxcov.pipeline.options import TrainCommand


def train(options: TrainCommand) -> Output:
    """Train a CenterPoint, print its average precision on test frames, and write its weights."""
    from boxcov.pipeline.progress import ProgressBar
    from boxcov.pipeline.train import run

    with ProgressBar("loading frames") as loading, ProgressBar("training", "steps") as bar:

        def training(done: int, total: int, loss: float) -> None:
            bar(done, total, f"loss {loss:.3f}")

        report = run(options, loading, training)
    written = f"written to {options.out}, the report to {options.out.with_suffix('.json')}"
    return Output(report, [_format(report["test"]), written])


def _format(tests: dict[str, Any]) -> str:
    """Return a table of AP by class, with one column per test set."""
    rows = [("AP (0.5, 1, 2, 4 m)", *tests)]
    for label in next(iter(tests.values()))["AP"]:
        values = (mean(test["AP"][label].values()) for test in tests.values())
        cells = ("-" if isnan(value) else f"{value:.2f}" for value in values)  # -: no such object
        rows.append((label, *cells))
    rows.append(("mean", *(f"{test['mAP']:.2f}" for test in tests.values())))
    return "\n".join(aligned(rows))
