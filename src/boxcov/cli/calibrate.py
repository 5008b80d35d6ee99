"""``boxcov calibrate``: fit the error model, and show how good it is on other frames."""

from __future__ import annotations

from typing import Any

from boxcov._files.plain_text import aligned
from boxcov.cli.command import Output
from boxcov.errors import counted
from boxcov.pipeline.options import CalibrateCommand

_FEW = 10  # boxes of a kind: a ranking against fewer of them is that of single boxes
_ADVICE = "give more labelled frames"


def calibrate(options: CalibrateCommand) -> Output:
    """Fit the error model of a method on labelled frames, and report its quality on other frames.

    The frames must not be training frames of the detector. The report is about a fit on the first
    part of them; the error model that is written is fitted on all of them.
    """
    from boxcov.pipeline.calibrate import run
    from boxcov.pipeline.progress import Steps

    with Steps() as steps:
        report = run(options, steps)
    lines = f"{_regions(report)}\n{_verdict(report)}\nwritten to {report['out']}"
    note = options.estimator.shipped_note(options.detector)
    return Output(report, [*note, _table(report), lines])


def _table(report: dict[str, Any]) -> str:
    """Return one line per probability, with the baseline 1 - score beside it."""
    held_out = report["held_out"]
    title = (
        f"error model for {report['estimator']}: "
        f"{counted(held_out['boxes'], 'box')} of "
        f"{counted(held_out['frames'], 'frame')} not used in the fit"
    )
    head = ("share", "AUROC", "1 - score", "difference (95 %)", "ECE")
    rows = [("probability", *head)]
    names = {
        "risk": "risk: the box is bad",
        "no_object": "no_object: there is none",
        "misplaced": f"misplaced: IoU below {report['threshold']:g}",
    }
    for key, name in names.items():
        row = held_out["rows"][key]
        interval = f"{row['low']:+.3f} to {row['high']:+.3f}"
        numbers = (f"{row['AUROC']:.3f}", f"{row['baseline']:.3f}", interval, f"{row['ECE']:.3f}")
        rows.append((name, f"{100 * row['share']:.1f} %", *numbers))
    return "\n".join([title, *aligned(rows)])


def _regions(report: dict[str, Any]) -> str:
    """Return the line about the coverage of the regions."""
    regions = report["held_out"]["regions"]
    levels = " / ".join(f"{100 * float(level):.0f}" for level in regions)
    shares = " / ".join(f"{100 * share:.1f}" for share in regions.values())
    return f"regions of {levels} % hold {shares} % of the errors"


def _verdict(report: dict[str, Any]) -> str:
    """Return a sentence: does risk find bad boxes better than 1 - score does?"""
    held_out = report["held_out"]
    row, boxes = held_out["rows"]["risk"], held_out["boxes"]
    bad = round(row["share"] * boxes)
    rare, word = min((bad, "bad"), (boxes - bad, "good"))
    if rare < _FEW:
        return f"{rare} of {boxes} boxes are {word}: too few to judge the risk; {_ADVICE}"
    if row["low"] > 0:
        numbers = f"AUROC {row['AUROC']:.3f} against {row['baseline']:.3f}"
        return f"risk finds bad boxes better than 1 - score: {numbers}"
    if row["high"] < 0:
        return f"risk finds bad boxes worse than 1 - score: {_ADVICE}"
    return f"risk is not shown to find bad boxes better than 1 - score: {_ADVICE}"
