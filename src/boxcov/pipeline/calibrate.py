"""``boxcov calibrate``: fit the error model on some frames and evaluate it on the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from boxcov.detections import Detections
from boxcov.error_model.calibrate import fit_error_model, predict_frames, with_error_model
from boxcov.errors import BoxcovError
from boxcov.evaluate.ground_truth import match_detections
from boxcov.evaluate.intervals import bootstrap
from boxcov.evaluate.ranking import auroc
from boxcov.evaluate.records import Records
from boxcov.pipeline.detectors import load_detector
from boxcov.pipeline.frames import Progress, default_calibration_split, load_frames
from boxcov.pipeline.options import CalibrateCommand
from boxcov.pipeline.paths import check_output
from boxcov.pipeline.predict import build_predictor
from boxcov.predict.predictor import estimator

LEVELS = (0.5, 0.9, 0.95)  # of the regions whose coverage is reported


def run(options: CalibrateCommand, progress: Progress | None = None) -> dict[str, Any]:
    """Write the posterior with an error model to ``options.out`` and return a report.

    The report is about an error model fitted on the first ``fit_share`` of the frames, evaluated
    on the others. The one that is written is fitted on all frames.
    """
    check_output(options.out)
    source = options.source
    source = replace(source, split=source.split or default_calibration_split(source.data))
    detector = load_detector(options.detector, options.device)
    frames = load_frames(source, options.device, detector.classes)
    fit_frames = _fit_frames(len(frames), options.fit_share)
    model = build_predictor(detector, options.estimator, source.seed)
    model = with_error_model(model, None)
    found, truth = predict_frames(model, frames, progress)
    records = match_detections(found, truth, threshold=-1.0)
    about = {"estimator": estimator(model.settings()), "fingerprint": model.posterior.fingerprint}  # type: ignore[attr-defined]
    first = found.frame < fit_frames
    tried = fit_error_model(found[first], records[first.numpy()], options.threshold, **about)
    held_out = evaluate_error_model(tried.apply(found[~first]), records[~first.numpy()])
    final = fit_error_model(found, records, options.threshold, **about)
    report = {"data": f"{source.data} {source.split} seed {source.seed}", "held_out": held_out}
    final = replace(final, provenance={**final.provenance, **report})
    calibrated = with_error_model(model, final)
    calibrated.posterior.save(options.out)  # type: ignore[attr-defined]
    return {
        "out": str(options.out),
        "estimator": final.estimator,
        "threshold": final.threshold,
        **dict(final.provenance),
    }


def _fit_frames(frames: int, share: float) -> int:
    """Return the number of frames for the fit that is evaluated."""
    count = round(share * frames)
    if not 0 < count < frames:
        raise BoxcovError(
            f"{frames} frames cannot be split with --fit-share {share}: "
            "the fit and the report need at least one frame each"
        )
    return count


def evaluate_error_model(found: Detections, records: Records) -> dict[str, Any]:
    """Return AUROC, calibration error and coverage on labelled frames not used in the fit.

    Each AUROC stands beside that of 1 - score, with the bootstrap interval over frames of their
    difference.
    """
    paired = records.paired
    if not paired.any():
        raise BoxcovError(
            "none of the boxes in the frames of the report matches an object: "
            "give more frames, or a smaller --fit-share"
        )
    threshold = found.meta["error_model"]["threshold"]
    bad = records.iou < threshold
    doubt = 1 - records.scores
    numbers = found.numpy()
    rows = {
        "risk": _ranking(numbers["risk"], doubt, bad, records.frame),
        "no_object": _ranking(numbers["no_object"], doubt, ~paired, records.frame),
        "misplaced": _ranking(
            *(v[paired] for v in (numbers["misplaced"], doubt, bad, records.frame))
        ),
    }
    errors = np.abs(records.as_axes().errors[paired])
    coverage = {
        str(level): float(np.nanmean(_inside(found[torch.as_tensor(paired)], errors, level)))
        for level in LEVELS
    }
    return {
        "frames": len(np.unique(records.frame)),
        "boxes": len(records),
        "paired": int(paired.sum()),
        "rows": rows,
        "regions": coverage,
    }


def _ranking(u: Any, doubt: Any, bad: Any, frame: Any) -> dict[str, float]:
    def gain(rows: Any) -> float:
        return float(auroc(bad[rows], u[rows]) - auroc(bad[rows], doubt[rows]))

    low, high = bootstrap(gain, frame)
    return {
        "share": float(bad.mean()),
        "AUROC": float(auroc(bad, u)),
        "AUROC of 1 - score": float(auroc(bad, doubt)),
        "low": float(low),
        "high": float(high),
        "ECE": calibration_error(u, bad),
    }


def calibration_error(probability: Any, happened: Any, bins: int = 15) -> float:
    """Return the expected calibration error over bins with equal numbers of boxes.

    >>> calibration_error(np.array([0.1, 0.1, 0.9, 0.9]), np.array([0, 0, 1, 1]), bins=2)
    0.1
    """
    order = np.argsort(probability, kind="stable")
    parts = [part for part in np.array_split(order, bins) if len(part)]
    gaps = [len(part) * abs(probability[part].mean() - happened[part].mean()) for part in parts]
    return round(float(sum(gaps) / len(probability)), 12)


def _inside(found: Detections, errors: Any, level: float) -> Any:
    """Return which errors (n, D) lie inside the regions, NaN where unknown."""
    inside = (errors <= found.region(level).cpu().numpy()).astype(float)
    inside[np.isnan(errors)] = np.nan
    return inside
