"""``boxcov demo``: the verbs of the command line one after another, small: fit, predict by every method, evaluate, report."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from boxcov.detections import Detections
from boxcov.files import made_folder, replacing
from boxcov.pipeline import evaluate as evaluation
from boxcov.pipeline import fit as fitting
from boxcov.pipeline import predict as prediction
from boxcov.pipeline.sources import Source, detector_named
from boxcov.report.figures import write_figures
from boxcov.report.study import Study

DETECTOR = "centerpoint:small"
TRAINED_ON = 3500  # frames behind the weights of the detector
PRIOR_PRECISION = 100.0  # a prior as wide as the weights are large: their RMS is 0.1
Step = Callable[
    [str], Callable[[int, int | None], None]
]  # says what is done next, and gives its progress


@dataclass(frozen=True)
class Result:
    """What the demo found, for its tables."""

    study: Study
    rows: list[dict[str, Any]]  # of the quality table, as in the report
    runtime: list[dict[str, Any]]
    check: str  # GLM against the exact covariance
    report: Path


def run(
    out: Path,
    step: Step,
    fit_frames: int = 16,
    frames: int = 10,
    slow: int = 4,
    replicates: int = 200,
) -> Result:
    """Everything into ``out``: a posterior, one file of predictions a method, tables as JSON, figures and the report.

    slow: boxes for GLM, which costs nine backward passes each; its time is extrapolated from them.
    """
    made_folder(out)
    posterior = out / "posterior.safetensors"
    learned, unseen = (
        Source("simulated:clear", "train", fit_frames),
        Source("simulated:clear", "test", frames),
    )
    fitting.checkpoint_of(posterior).unlink(missing_ok=True)  # of a demo that was cut off
    fitting.run(
        posterior,
        DETECTOR,
        learned,
        "head",
        n_data=TRAINED_ON,
        prior_precision=PRIOR_PRECISION,
        progress=step(f"fit: the head's posterior from {fit_frames} frames"),
    )
    methods = {
        "exact": prediction.How("exact", posterior),
        "MC-GLM": prediction.How("mcglm", posterior),
        "NMS": prediction.How("nms"),
        "MCI": prediction.How("mci"),
    }
    paths = []
    for name, how in methods.items():
        paths.append(out / f"{name}.safetensors")
        _remove_parts(paths[-1])
        prediction.run(
            paths[-1],
            DETECTOR,
            how,
            unseen,
            progress=step(f"predict: {name} on {frames} unseen frames"),
        )
    slowly = out / "GLM.safetensors"
    _remove_parts(slowly)
    how = prediction.How("glm", posterior, most=slow)
    prediction.run(
        slowly,
        DETECTOR,
        how,
        replace(unseen, count=1),
        progress=step(f"predict: GLM on {slow} boxes of one frame"),
    )
    study = evaluation.study_of(paths, progress=step("evaluate"))
    study = replace(
        study, runtime=runtime(study, Detections.load(slowly), plain_milliseconds(unseen))
    )
    step("report")
    report = out / "report.html"
    evaluation.write(report, study)
    write_figures(out / "figures", study)
    rows = evaluation.rows_of(study, replicates)
    with replacing(out / "demo.json") as file:
        file.write_text(
            json.dumps({"quality": rows, "runtime": list(study.runtime)}, indent=1) + "\n"
        )
    return Result(
        study,
        rows,
        [dict(row) for row in study.runtime],
        glm_check(Detections.load(slowly), Detections.load(paths[0])),
        report,
    )


def plain_milliseconds(source: Source) -> float:
    """The plain detector, median over the frames but the first."""
    detector, spent = detector_named(DETECTOR), []
    for inputs, _ in source.frames():
        began = perf_counter()
        detector.detect(inputs)
        spent.append(1e3 * (perf_counter() - began))
    return median(spent[1:] or spent)


def runtime(study: Study, slow: Detections, plain: float) -> list[dict[str, Any]]:
    """The plain detector, GLM extrapolated to as many boxes as the others have, and the others; ``ratio`` is to the plain detector."""
    each = slow.meta["milliseconds"][0] / max(1, len(slow))
    boxes = next(row["boxes"] for row in study.runtime if row["method"] == "exact")
    device = slow.meta["device"]
    rows = [
        {"method": "plain detector", "device": device, "boxes": boxes, "ms": plain},
        {
            "method": f"GLM, from {len(slow)} boxes",
            "device": device,
            "boxes": boxes,
            "ms": each * boxes,
        },
        *(dict(row) for row in study.runtime),
    ]
    return [{**row, "ratio": row["ms"] / plain} for row in rows]


def glm_check(slow: Detections, exact: Detections) -> str:
    """How far GLM, one backward pass a number, is from the exact covariance on the boxes where it was run."""
    assert slow.covariance is not None
    assert exact.covariance is not None
    if not len(slow):
        return "GLM was run on no box"
    off = torch.linalg.matrix_norm(
        slow.covariance - exact.covariance[: len(slow)]
    ) / torch.linalg.matrix_norm(exact.covariance[: len(slow)])
    return f"GLM on {len(slow)} boxes: the same covariance as exact to {float(off.max()):.1g}"


def _remove_parts(path: Path) -> None:
    """What a demo that was cut off left behind."""
    prediction.blocks_of(path).clear()
