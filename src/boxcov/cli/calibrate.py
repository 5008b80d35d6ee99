"""``boxcov calibrate``: from epistemic covariances to covariances of the errors."""

from __future__ import annotations

import json
from math import isfinite
from typing import TYPE_CHECKING, Any

from boxcov.cli.command import AsJson
from boxcov.pipeline.options import CalibrateCommand

if TYPE_CHECKING:
    from rich.table import Table

LEVELS = ("0.5", "0.9", "0.95")


def calibrate(options: CalibrateCommand, as_json: AsJson = False) -> None:
    """Fit a calibration on labelled frames, and report its quality on other frames.

    The frames must not be training frames of the detector.
    """
    from boxcov.pipeline.calibrate import run
    from boxcov.pipeline.progress import Progress

    with Progress("predicting") as progress:
        report = run(options, progress)
    if as_json:
        print(json.dumps(_finite(report)))
        return
    from rich.console import Console

    console = Console()
    console.print(_table(report))
    text = f"{_verdict(report)}\nwritten to {report['out']}"
    console.print(text, highlight=False, soft_wrap=True)


def _table(report: dict[str, Any]) -> Table:
    from rich.table import Table

    held_out = report["held_out"]
    title = (
        f"{report['kind']} for {report['estimator']}: "
        f"{held_out['boxes']} boxes of {held_out['frames']} frames not used in the fit"
    )
    table = Table("covariance", "NLL", "50 %", "90 %", "95 %", "ENCE", "ANEES", title=title)
    for name, row in held_out["rows"].items():
        nll, ence, anees = (f"{row[key]:.3f}" for key in ("NLL", "ENCE", "ANEES"))
        table.add_row(name, nll, *_percentages(row["coverage"]), ence, anees)
    table.add_row("after, conformal regions", "", *_percentages(held_out["regions"]), "", "")
    return table


def _percentages(coverage: dict[str, float]) -> list[str]:
    return [f"{100 * coverage[level]:.1f}" for level in LEVELS]


def _verdict(report: dict[str, Any]) -> str:
    """Return a sentence: is the NLL better than that of score and size alone?

    >>> _verdict({"held_out": {"gain": {"mean": 0.5, "low": 0.3, "high": 0.7}}})
    'NLL 0.500 (0.300 to 0.700) better than score and size alone'
    >>> _verdict({"held_out": {"gain": {"mean": 0.0, "low": -0.1, "high": 0.1}}})
    'NLL no better than score and size alone: 0.000 (-0.100 to 0.100)'
    """
    gain = report["held_out"]["gain"]
    interval = f"{gain['mean']:.3f} ({gain['low']:.3f} to {gain['high']:.3f})"
    if gain["low"] > 0:
        return f"NLL {interval} better than score and size alone"
    return f"NLL no better than score and size alone: {interval}"


def _finite(value: Any) -> Any:
    """Replace numbers that are not finite by None, for JSON: the NLL of a singular covariance.

    >>> _finite({"NLL": float("inf"), "ANEES": 1.0})
    {'NLL': None, 'ANEES': 1.0}
    """
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    return None if isinstance(value, float) and not isfinite(value) else value
