"""``boxcov calibrate``: fit a calibration on some frames and evaluate it on the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from boxcov.detections import concatenate
from boxcov.error_model.fit import apply_calibration, fit_calibration, region_coverage
from boxcov.errors import BoxcovError
from boxcov.evaluate.covariance_metrics import covariance_metrics, gaussian_fit
from boxcov.evaluate.intervals import bootstrap
from boxcov.evaluate.records import Records
from boxcov.pipeline.detectors import load_detector
from boxcov.pipeline.frames import Progress, default_calibration_split, load_frames
from boxcov.pipeline.ground_truth import GroundTruth, match_detections
from boxcov.pipeline.options import CalibrateCommand
from boxcov.pipeline.paths import check_output
from boxcov.pipeline.predict import build_predictor
from boxcov.posterior.calibration import Calibration
from boxcov.posterior.posterior import Posterior
from boxcov.predict.predictor import Predictor, estimator

BASELINE = "score and size alone"
LEVELS = (0.5, 0.9, 0.95)  # of the regions whose coverage is reported


def run(options: CalibrateCommand, progress: Progress | None = None) -> dict[str, Any]:
    """Write the posterior with a calibration to ``options.out`` and return a report.

    The first ``fit_share`` of the frames are used for the fit, the others for the report. Frames
    are not mixed because consecutive frames look alike.
    """
    check_output(options.out)
    source = options.source
    source = replace(source, split=source.split or default_calibration_split(source.data))
    detector = load_detector(options.detector, options.device)
    frames = load_frames(source, options.device, detector.classes)
    fit_frames = _fit_frames(len(frames), options.fit_share)
    model = build_predictor(detector, options.estimator, source.seed)
    records = _predict_records(model, frames, progress)
    heading = {}
    if "yaw" in records.fields:
        heading = {"heading": options.heading, "half_turns": half_turn_share(records)}
    if options.heading == "axis":
        records = records.as_axes()
    fit_kind = partial(
        fit_calibration,
        records[records.frame < fit_frames],
        estimator=estimator(model.settings()),
        data=f"{source.data} {source.split} seed {source.seed}",
    )
    found = fit_kind(options.kind)
    baseline = found if found.kind == "score" else fit_kind("score")
    held_out = compare_calibrations(records[records.frame >= fit_frames], found, baseline)
    held_out = {"frames": len(frames) - fit_frames, **held_out}
    found = replace(found, provenance={**found.provenance, **heading, "held_out": held_out})
    posterior: Posterior = model.posterior  # type: ignore[attr-defined]  # all but nms have one
    posterior.with_calibration(found).save(options.out)
    return {
        "out": str(options.out),
        "kind": found.kind,
        "estimator": found.estimator,
        **dict(found.provenance),
    }


def _fit_frames(frames: int, share: float) -> int:
    """Return the number of frames for the fit."""
    count = round(share * frames)
    if not 0 < count < frames:
        raise BoxcovError(
            f"{frames} frames cannot be split with --fit-share {share}: "
            "the fit and the report need at least one frame each"
        )
    return count


def _predict_records(model: Predictor, frames: Sequence[Any], progress: Progress | None) -> Records:
    found, targets = [], []
    for number in range(len(frames)):
        inputs, target = frames[number]
        boxes = model(inputs)
        found.append(replace(boxes, frame=boxes.frame + number).to("cpu"))
        targets.append((None, target))
        if progress is not None:
            progress(number + 1, len(frames))
    return match_detections(concatenate(found), GroundTruth.from_frames(targets))


def half_turn_share(records: Records) -> float | None:
    """Return the share of matched boxes whose yaw is off by more than a quarter turn."""
    errors = records[records.paired].errors[:, records.fields.index("yaw")]
    errors = errors[~np.isnan(errors)]
    return float((np.abs(errors) > np.pi / 2).mean()) if len(errors) else None


def compare_calibrations(
    records: Records, found: Calibration, baseline: Calibration
) -> dict[str, Any]:
    """Return NLL, coverage, ENCE and ANEES before and after calibration and for the baseline.

    ``gain`` is the NLL of the baseline minus that of the calibration, averaged over the boxes, with
    a 95 % bootstrap interval over frames.
    """
    paired = records[records.paired]
    if not len(paired):
        raise BoxcovError(
            "none of the boxes in the frames of the report matches an object: "
            "give more frames, or a smaller --fit-share"
        )
    after, alone = (apply_calibration(paired, one).predictive for one in (found, baseline))
    assert paired.covariance is not None
    assert after is not None
    assert alone is not None
    rows = {
        name: covariance_metrics(paired.errors, np.asarray(C, dtype=float), paired.fields)
        for name, C in (("before", paired.covariance), ("after", after), (BASELINE, alone))
    }
    gain = gaussian_fit(paired.errors, alone).nll - gaussian_fit(paired.errors, after).nll
    low, high = bootstrap(lambda chosen: gain[chosen].mean(), paired.frame)
    return {
        "boxes": len(paired),
        "rows": rows,
        "regions": {
            str(level): region_coverage(apply_calibration(paired, found), found, level)
            for level in LEVELS
        },
        "gain": {"mean": float(gain.mean()), "low": float(low), "high": float(high)},
    }
