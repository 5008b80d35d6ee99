"""``boxcov export``: a detector with its covariances as one ONNX file."""

from __future__ import annotations

import sys
from typing import Any

from boxcov.cli.command import Output
from boxcov.pipeline.options import ExportCommand
from boxcov.pipeline.options.common import SHIPPED_NOTE
from boxcov.pipeline.terminal import say


def export(options: ExportCommand) -> Output:
    """Write a detector with its covariances to ONNX, with fixed shapes.

    For a CenterPoint, the file contains everything after the encoder; for a YOLOX, everything. It
    is checked in onnxruntime before it is written.
    """
    from boxcov.pipeline.export import run

    report = run(options, lambda text: say(f"boxcov: {text}", file=sys.stderr))
    note = [SHIPPED_NOTE] if options.posterior is None else []
    return Output(report, [*note, _format(report)])


def _format(report: dict[str, Any]) -> str:
    samples = "exact" if report["samples"] is None else f"{report['samples']} samples"
    shapes = [
        f"{name} {'x'.join(map(str, shape)) or 'scalar'}"
        for part in ("inputs", "outputs")
        for name, shape in report[part].items()
    ]
    return (
        f"{report['detector']}, covariance by {samples} of the {report['depth']}, "
        f"{report['bytes'] / 2**20:.1f} MiB\n"
        f"{', '.join(shapes)}\nwritten to {report['out']}"
    )
