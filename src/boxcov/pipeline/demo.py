"""``boxcov demo``: calibrated boxes of the shipped detector on simulated frames, and a report."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from boxcov.detections import Detections
from boxcov.evaluate.covariance_metrics import LEVELS
from boxcov.evaluate.records import Records
from boxcov.files import make_folder, write_json
from boxcov.pipeline import predict
from boxcov.pipeline.detectors import load_detector, plain_milliseconds
from boxcov.pipeline.frames import load_frames
from boxcov.pipeline.options import (
    DataOptions,
    DemoCommand,
    EstimatorOptions,
    PredictCommand,
)
from boxcov.pipeline.paths import hold_folder
from boxcov.pipeline.progress import Steps
from boxcov.report.page import write
from boxcov.report.study import Study
from boxcov.report.verdict import LEVEL, display_unit, headline

DETECTOR = "centerpoint:small"
SCENES = {
    "clear": "unseen frames of the kind it was trained on",
    "rain": "fewer and noisier points",
    "unseen": "objects of shapes it has never seen",
}
LOW, HIGH = 0.2, 0.8  # risks up to the one, and from the other
WIDTHS = ("x", "y", "yaw")  # fields whose half widths are printed


@dataclass(frozen=True)
class Size:
    """How much the demo computes."""

    frames: int = 12  # of each scene
    sweeps: int = 10
    replicates: int = 200


@dataclass(frozen=True)
class Scene:
    """The numbers of one scene."""

    name: str
    numbers: dict[str, Any]
    report: Path


def run(options: DemoCommand, step: Steps, size: Size | None = None) -> list[Scene]:
    """Write predictions and a report per scene to a folder; return the numbers of the scenes."""
    with hold_folder(options.out) as out:
        scenes = [_run_scene(name, out, step, size or Size()) for name in SCENES]
        numbers = {scene.name: scene.numbers for scene in scenes}
        write_json(out / "demo.json", numbers)
    return scenes


def _run_scene(name: str, out: Path, step: Steps, size: Size) -> Scene:
    folder = make_folder(out / name)
    file = folder / "exact.safetensors"
    source = DataOptions(f"simulated:{name}", "test", size.frames, 0, size.sweeps)
    predict.block_store(file).remove()  # of an interrupted demo
    predict.run(
        PredictCommand(
            out=file,
            force=True,
            detector=DETECTOR,
            source=source,
            estimator=EstimatorOptions("exact"),
        ),
        step(f"{name}, {SCENES[name]}: predict {size.frames} frames"),
    )
    step(f"{name}: evaluate")
    frames, title = load_frames(source), f"Uncertainty of boxes: {source.data} {source.split}"
    study = Study.of({file.stem: Detections.load(file)}, frames, title)
    plain = median(plain_milliseconds(load_detector(DETECTOR), frames[:5]))
    rows = [{**row, "ratio": row["ms"] / plain} for row in study.runtime]
    first = {**rows[0], "method": "plain detector", "ms": plain, "ratio": 1.0}
    study = replace(study, runtime=[first, *rows])
    write(folder / "report.html", study, size.replicates)
    numbers = scene_numbers(study.methods[0].records)
    return Scene(name, {**numbers, "cost": rows[0]["ratio"]}, folder / "report.html")


def scene_numbers(records: Records) -> dict[str, Any]:
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
