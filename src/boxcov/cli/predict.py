"""``boxcov predict``: boxes with their covariances for every frame."""

from __future__ import annotations

from typing import Any

from boxcov.cli.command import Output
from boxcov.errors import counted
from boxcov.pipeline.options import PredictCommand


def predict(options: PredictCommand) -> Output | None:
    """Run a detector over frames and write its boxes with covariances, risks and regions.

    By default the frames are simulated ones that the detector was not trained on. Risks and regions
    need a posterior of `boxcov calibrate`.
    """
    from boxcov.pipeline.predict import run
    from boxcov.pipeline.progress import ProgressBar

    with ProgressBar("predicting") as progress, ProgressBar("drawing") as drawing:
        report = run(options, progress, drawing=drawing)
    if not report:  # another rank prints
        return None
    lines = options.estimator.shipped_note(options.detector)
    boxes, frames, milliseconds = report["boxes"], report["frames"], report["milliseconds"]
    pace = f"{milliseconds:.0f} ms" + (" per frame (median)" if frames > 1 else "")
    lines.append(f"{counted(boxes, 'box')} in {counted(frames, 'frame')}, {pace}")
    if boxes and report["risk"] is None:
        lines.append(f"uncertainty (trace): median {report['uncertainty']:.3g}")
    if boxes:
        lines.append(_describe_risk(report))
    drawn = f", drawn in {options.show}" if options.show else ""
    return Output(report, [*lines, f"written to {report['out']}{drawn}"])


def _describe_risk(report: dict[str, Any]) -> str:
    """Return the line about the error model."""
    if report["risk"] is None:
        return "uncalibrated: `boxcov calibrate` adds risk and the distribution of the errors"
    median = f"risk: median {100 * report['risk']:.1f} %"
    return f"{median}, below 20 % for {report['low_risk']} of {report['boxes']} boxes"
