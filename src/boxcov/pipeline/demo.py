"""``boxcov demo``: fit, predict, evaluate and report on a few simulated frames."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from boxcov.detections import Detections
from boxcov.files import to_json, write_text
from boxcov.pipeline import calibrate, evaluate, fit, predict
from boxcov.pipeline.detectors import load_detector
from boxcov.pipeline.frames import load_frames
from boxcov.pipeline.options import (
    CalibrateCommand,
    DataOptions,
    DemoCommand,
    EstimatorOptions,
    EvaluateCommand,
    FitCommand,
    PredictCommand,
)
from boxcov.pipeline.paths import checkpoint_path, held_folder
from boxcov.pipeline.progress import Steps
from boxcov.report.figures import write_figures
from boxcov.report.page import write
from boxcov.report.study import Study

DETECTOR = "centerpoint:small"
TRAINED_ON = 3500  # frames that the detector was trained on
PRIOR_PRECISION = 100.0  # a prior as wide as the weights, whose RMS is 0.1


@dataclass(frozen=True)
class Size:
    """How much the demo computes."""

    fit_frames: int = 16
    frames: int = 10
    glm_boxes: int = 4  # GLM takes nine backward passes per box; its time is extrapolated
    replicates: int = 200
    calibration_frames: int = 20  # 0: no error model


@dataclass(frozen=True)
class Result:
    """The results of the demo, for its tables."""

    rows: list[dict[str, Any]]  # of the quality table, as in the report
    runtime: list[dict[str, Any]]
    check: str  # GLM compared with the exact covariance
    report: Path


def run(options: DemoCommand, step: Steps, size: Size | None = None) -> Result:
    """Write a posterior, predictions per method, tables, figures and a report to a folder."""
    with held_folder(options.out) as out:
        return _run(out, step, size or Size())


def _run(out: Path, step: Steps, size: Size) -> Result:
    posterior = out / "posterior.safetensors"
    checkpoint_path(posterior).unlink(missing_ok=True)  # of an interrupted demo
    fit.run(
        FitCommand(
            out=posterior,
            detector=DETECTOR,
            source=DataOptions("simulated:clear", "train", size.fit_frames),
            n_data=TRAINED_ON,
            prior_precision=PRIOR_PRECISION,
        ),
        step(f"fit: posterior of the head from {size.fit_frames} frames"),
    )
    calibrated = _calibrate(posterior, size.calibration_frames, step)
    test = DataOptions("simulated:clear", "test", size.frames)
    estimators = {
        "exact": EstimatorOptions("exact", calibrated),
        "MC-GLM": EstimatorOptions("mcglm", posterior),
        "NMS": EstimatorOptions("nms"),
        "MCI": EstimatorOptions("mci"),
    }
    files = tuple(out / f"{name}.safetensors" for name in estimators)
    for file, (name, estimator) in zip(files, estimators.items()):
        _predict(
            PredictCommand(out=file, detector=DETECTOR, source=test, estimator=estimator),
            step(f"predict: {name} on {size.frames} test frames"),
        )
    glm_file = out / "GLM.safetensors"
    _predict(
        PredictCommand(
            out=glm_file,
            detector=DETECTOR,
            source=replace(test, count=1),
            estimator=EstimatorOptions("glm", posterior),
            max_boxes=size.glm_boxes,
        ),
        step(f"predict: GLM on {size.glm_boxes} boxes of one frame"),
    )
    study = evaluate.build_study(EvaluateCommand(predictions=files), step("evaluate"))
    glm = Detections.load(glm_file)
    study = replace(study, runtime=runtime_rows(study, glm, plain_milliseconds(test)))
    step("report")
    write(out / "report.html", study)
    write_figures(out / "figures", study)
    rows = evaluate.quality_rows(study, size.replicates)
    runtime = [dict(row) for row in study.runtime]
    content = to_json({"quality": rows, "runtime": runtime}, indent=1)
    write_text(out / "demo.json", content + "\n")
    return Result(rows, runtime, compare_glm(glm, Detections.load(files[0])), out / "report.html")


def _calibrate(posterior: Path, frames: int, step: Steps) -> Path:
    """Write the posterior with an error model beside it, and return its path."""
    if not frames:
        return posterior
    calibrated = posterior.with_name("calibrated.safetensors")
    options = CalibrateCommand(
        out=calibrated,
        detector=DETECTOR,
        source=DataOptions("simulated:clear", "val", frames),
        estimator=EstimatorOptions("exact", posterior),
    )
    calibrate.run(options, step)
    return calibrated


def _predict(options: PredictCommand, progress: Callable[[int, int | None], None]) -> None:
    predict.block_store(options.out).remove()  # of an interrupted demo
    predict.run(options, progress)


def plain_milliseconds(source: DataOptions) -> float:
    """Return the median time of the plain detector, without the first frame."""
    detector, spent = load_detector(DETECTOR), []
    for inputs, _ in load_frames(source):
        began = perf_counter()
        detector.detect(inputs)
        spent.append(1e3 * (perf_counter() - began))
    return median(spent[1:] or spent)


def runtime_rows(study: Study, glm: Detections, plain: float) -> list[dict[str, Any]]:
    """Return the time per frame of every method; ``ratio`` is relative to the plain detector.

    glm: detections of a few boxes, from which the time of all boxes is extrapolated.
    """
    per_box = glm.meta["milliseconds"][0] / max(1, len(glm))
    boxes = next(row["boxes"] for row in study.runtime if row["method"] == "exact")
    common = {"device": glm.meta["device"], "boxes": boxes}
    rows = [
        {"method": "plain detector", **common, "ms": plain},
        {"method": f"GLM, from {len(glm)} boxes", **common, "ms": per_box * boxes},
        *(dict(row) for row in study.runtime),
    ]
    return [{**row, "ratio": row["ms"] / plain} for row in rows]


def compare_glm(glm: Detections, exact: Detections) -> str:
    """Return a sentence with the largest relative difference of the covariances."""
    assert glm.covariance is not None
    assert exact.covariance is not None
    if not len(glm):
        return "GLM was run on no box"
    reference = exact.covariance[: len(glm)]
    norm = torch.linalg.matrix_norm
    difference = float((norm(glm.covariance - reference) / norm(reference)).max())
    return f"GLM on {len(glm)} boxes: the same covariance as exact to {difference:.1g}"
