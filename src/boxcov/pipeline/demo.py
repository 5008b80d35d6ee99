"""``boxcov demo``: calibrated boxes of the shipped detector on simulated frames, and a report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from boxcov._files.output_file import make_folder, write_json
from boxcov.detections import Detections
from boxcov.evaluate.covariance_metrics import LEVELS
from boxcov.evaluate.records import Records
from boxcov.pipeline import predict
from boxcov.pipeline.detectors import load_detector, plain_milliseconds
from boxcov.pipeline.frames import load_frames
from boxcov.pipeline.options import DataOptions, DemoCommand, EstimatorOptions, PredictCommand
from boxcov.pipeline.paths import hold_folder
from boxcov.pipeline.progress import Steps
from boxcov.report.page import write
from boxcov.report.study import Study
from boxcov.report.verdict import LEVEL, display_unit, headline

DETECTOR = "centerpoint:small"
SCENARIOS = {
    "clear": "unseen frames of the kind it was trained on",
    "rain": "fewer and noisier points",
    "unseen": "objects of shapes it has never seen",
}
FRAMES, SWEEPS = 12, 10  # of each scenario, and of each frame
REPLICATES = 200
LOW, HIGH = 0.2, 0.8  # a low risk is at most the one, a high risk at least the other
WIDTHS = ("x", "y", "yaw")  # fields whose half widths are printed


def run(options: DemoCommand, step: Steps) -> dict[str, dict[str, Any]]:
    """Write predictions and a report per scenario to a folder; return the numbers of each."""
    with hold_folder(options.out) as out:
        scenarios = {name: _run_scenario(name, make_folder(out / name), step) for name in SCENARIOS}
        write_json(out / "demo.json", scenarios)
    return scenarios


def _run_scenario(name: str, folder: Path, step: Steps) -> dict[str, Any]:
    file = folder / "exact.safetensors"
    source = DataOptions(f"simulated:{name}", "test", FRAMES, 0, SWEEPS)
    predict.block_store(file).remove()  # of an interrupted demo
    predict.run(
        PredictCommand(
            out=file,
            force=True,
            detector=DETECTOR,
            source=source,
            estimator=EstimatorOptions("exact"),
        ),
        step(f"{name}, {SCENARIOS[name]}: predict {FRAMES} frames"),
    )
    step(f"{name}: evaluate")
    frames, title = load_frames(source), f"Uncertainty of boxes: {source.name}"
    study = Study.of({file.stem: Detections.load(file)}, frames, title)
    plain = median(plain_milliseconds(load_detector(DETECTOR), frames[:5]))
    rows = [{**row, "ratio": row["ms"] / plain} for row in study.runtime]
    first = {**rows[0], "method": "plain detector", "ms": plain, "ratio": 1.0}
    study = replace(study, runtime=[first, *rows])
    write(folder / "report.html", study, REPLICATES)
    return {**scenario_numbers(study.methods[0].records), "cost": rows[0]["ratio"]}


def scenario_numbers(records: Records) -> dict[str, Any]:
    """Return what risk and regions are worth on calibrated records."""
    numbers, risk, bad = headline(records), records.risk, records.bad
    assert risk is not None
    assert records.regions is not None
    widths = records.regions[records.paired, LEVELS.index(LEVEL)]
    return {
        "boxes": numbers.boxes,
        "bad": numbers.bad,
        "risk": numbers.risk,
        "AUROC": numbers.auroc,
        "AUROC of 1 - score": numbers.baseline,
        "low risk": _count(bad[risk <= LOW]),
        "high risk": _count(bad[risk >= HIGH]),
        "inside": {str(level): share for level, share in numbers.inside.items()},
        "half width": {
            field: float(np.median(widths[:, records.fields.index(field)])) * display_unit(field)[1]
            for field in WIDTHS
        },
    }


def _count(bad: Any) -> dict[str, Any]:
    """Return the number of boxes and the share of bad ones."""
    return {"boxes": len(bad), "bad": float(bad.mean()) if len(bad) else None}
