"""``boxcov calibrate``: fit the error model on some frames and evaluate it on the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil
from typing import Any

import torch

from boxcov.data.augment import resize_objects
from boxcov.detections import Detections
from boxcov.detector import Detector
from boxcov.error_model.calibrate import check_pairs, fit_error_model, iou_thresholds, widen
from boxcov.error_model.labelled_frames import (
    CopiedBoxes,
    makes_copies,
    predict_copies,
    predict_frames,
)
from boxcov.error_model.model import ErrorModel
from boxcov.error_model.network import FOLDS, Progress, TrainingOptions
from boxcov.errors import BoxcovError, counted
from boxcov.evaluate.covariance_metrics import LEVELS, probability_metrics, region_coverage
from boxcov.evaluate.ground_truth import match_detections
from boxcov.evaluate.label_convention import warn_of_convention
from boxcov.evaluate.records import Records
from boxcov.pipeline.detectors import load_detector, match_source, open_data
from boxcov.pipeline.frames import load_labelled_frames
from boxcov.pipeline.options import CalibrateCommand, DataOptions
from boxcov.pipeline.paths import holds_output
from boxcov.pipeline.predict import build_predictor
from boxcov.pipeline.progress import Steps
from boxcov.pipeline.source import (
    default_split,
    frames_name,
    other_split,
    warn_of_other_inputs,
    warn_of_shared_frames,
)
from boxcov.posterior.posterior import Posterior
from boxcov.predict.predictor import estimator


@holds_output
def run(options: CalibrateCommand, steps: Steps | None = None) -> dict[str, Any]:
    """Write the posterior with an error model to ``options.out`` and return a report.

    The report is about an error model fitted on the first ``fit_share`` of the frames, evaluated
    on the others. The one that is written is fitted on all frames.
    """
    source = options.source
    source = replace(source, split=source.split or default_split(source.data, "calibrate"))
    detector = load_detector(options, options.device)
    threshold = iou_thresholds(detector.box_fields, options.threshold)[1]
    source, frames = open_data(detector, source, options.device)
    fit_frames = _fit_frames(len(frames), options)
    stress = _stress_frames(options, source, frames, detector)
    given = options.estimator.for_detector(options.detector)
    model = build_predictor(detector, given, source.seed, calibrated=False)
    posterior = model.posterior
    assert posterior is not None  # CalibrateCommand checks it
    _warn_of_fit_frames(posterior, source, len(frames))
    warn_of_other_inputs(posterior.meta, source)
    started: Callable[[str, str], Progress | None] = steps or (lambda what, unit: None)
    about = {"estimator": estimator(model.settings()), "fingerprint": posterior.fingerprint}

    def fit(
        found: Detections, records: Records, copies: CopiedBoxes | None, what: str
    ) -> ErrorModel:
        training = TrainingOptions(progress=started(what, "epochs"))
        return fit_error_model(found, records, threshold, **about, options=training, copies=copies)

    found, truth = predict_frames(model, frames, started("predicting", "frames"))
    warn_of_convention(found, truth)
    records = match_detections(found, truth, threshold=-1.0)
    check_pairs(records, f"all {len(frames)} frames")
    first = found.frame < fit_frames
    part = found[first], records[first.numpy()]
    share = f"the first {fit_frames} of {len(frames)} frames (--fit-share {options.fit_share:g})"
    check_pairs(part[1], share)
    copies = None
    if options.copies and makes_copies(detector):
        progress = started("predicting copies", "frames")
        copies = predict_copies(model, frames, options.copies, progress)
    some = None if copies is None else copies[copies.source < fit_frames]
    tried = fit(*part, some, "fitting the error model of the report")
    held_out = evaluate_error_model(tried.apply(found[~first]), records[~first.numpy()])
    final = fit(found, records, copies, "fitting the error model")
    if len(stress):
        unusual, truth = predict_frames(model, stress, started("predicting stress", "frames"))
        records = match_detections(unusual, truth, threshold=-1.0)
        final = widen(final, found, unusual, records)
    data = {"data": frames_name(source), "held_out": held_out}
    final = replace(final, provenance={**final.provenance, **data})
    posterior.with_error_model(final).save(options.out)
    said = {"estimator": final.estimator, "threshold": final.threshold}
    return {"out": str(options.out), **said, **final.provenance}


def _warn_of_fit_frames(posterior: Posterior, source: DataOptions, length: int) -> None:
    """Warn if the posterior was fitted on frames of ``source``, as far as its file says so."""
    about = {name: value for name, value in posterior.meta.items() if isinstance(value, str)}
    if "data" not in about or posterior.fisher == "identity":  # made in Python, or without frames
        return
    split = about.get("split", default_split(about["data"], "fit"))
    name = f"{about['data']} {split} seed {about.get('seed')}"
    try:
        # before the share is drawn
        count = ceil(posterior.frames / float(about.get("fraction", 1)))
    except (ArithmeticError, ValueError):  # the meta data are free texts
        return
    effect = (
        ". If the detector was trained on them, its errors there are smaller than on new frames, "
        f"and risk and regions promise too much: {other_split(source, 'fit', 'calibrate')}"
    )
    warn_of_shared_frames("the posterior", name, count, source, length, effect)


def _stress_frames(
    options: CalibrateCommand, source: DataOptions, frames: Sequence[Any], detector: Detector
) -> Sequence[Any]:
    if options.stress is None:
        return ()
    if options.stress != "resized":
        split = default_split(options.stress, "calibrate")
        other = replace(source, data=options.stress, split=split)
        return load_labelled_frames(match_source(other, detector), options.device, detector.classes)
    if "yaw" not in detector.box_fields:
        raise BoxcovError(
            "--stress resized needs LiDAR frames: give --stress KIND:WHERE, labelled frames with "
            "larger errors than usual"
        )
    return resize_objects(frames)


def _fit_frames(frames: int, options: CalibrateCommand) -> int:
    """Return the number of frames for the fit that is evaluated."""
    count = round(options.fit_share * frames)
    if not FOLDS <= count < frames:
        raise BoxcovError(
            f"{counted(frames, 'frame')} cannot be split with --fit-share {options.fit_share}: the "
            f"fit needs at least {FOLDS} and the report one; give more labelled frames"
        )
    return count


def evaluate_error_model(found: Detections, records: Records) -> dict[str, Any]:
    """Return AUROC, calibration error and coverage on labelled frames not used in the fit.

    found: calibrated; records: the same boxes, row by row. The baseline is 1 - score.
    """
    paired = records.paired
    if not paired.any():
        raise BoxcovError(
            "none of the boxes in the frames of the report matches an object: "
            "give more frames, or a smaller --fit-share"
        )
    bad = records.iou < found.meta["error_model"]["threshold"]
    doubt, frame, numbers = 1 - records.scores, records.frame, found.numpy()
    misplaced = (numbers["misplaced"][paired], bad[paired], doubt[paired], frame[paired])
    rows = {
        "risk": probability_metrics(numbers["risk"], bad, doubt, frame),
        "no_object": probability_metrics(numbers["no_object"], ~paired, doubt, frame),
        "misplaced": probability_metrics(*misplaced),
    }
    errors, with_object = records.as_axes().errors[paired], found[torch.as_tensor(paired)]
    widths = {str(level): with_object.region(level).numpy() for level in LEVELS}
    return {
        "frames": len(set(frame.tolist())),
        "boxes": len(records),
        "paired": int(paired.sum()),
        "rows": rows,
        "regions": {level: region_coverage(errors, half) for level, half in widths.items()},
    }
