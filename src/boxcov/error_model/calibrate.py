"""``boxcov.calibrate``: fit the error model of a method on labelled frames."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import pi
from typing import Any

import numpy as np
import torch
from torch import Tensor

from boxcov._torch.process_state import full_precision
from boxcov.detections import Detections
from boxcov.error_model.inputs import box_inputs, stack_inputs
from boxcov.error_model.labelled_frames import (
    COPIES,
    CopiedBoxes,
    check_count,
    check_sequence,
    predict_copies,
    predict_frames,
)
from boxcov.error_model.model import LIMIT, ErrorModel, not_finite
from boxcov.error_model.network import (
    FOLDS,
    Ensemble,
    Outputs,
    Progress,
    Targets,
    TrainingOptions,
    fit_network,
    frame_folds,
)
from boxcov.error_model.regions import class_range_index, fit_regions
from boxcov.error_model.student_t import fit_student, missing_noise
from boxcov.error_model.unusual_frames import certainty_bound, fit_widening
from boxcov.errors import BoxcovError, check_whole
from boxcov.evaluate.ground_truth import match_detections
from boxcov.evaluate.label_convention import warn_of_convention
from boxcov.evaluate.records import Records
from boxcov.predict.predictor import Predictor, estimator

LIDAR_THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
IMAGE_THRESHOLDS = (0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)  # pairs have at least 0.5
MIN_PAIRS = 50  # boxes with an object
MIN_CLASS = 20  # boxes; rarer classes, and rarer clipped sides, are not told apart
_FLAGS = ("class ", "clipped ")  # inputs that are 0 or 1


def calibrate(
    model: Predictor,
    frames: Sequence[Any],
    threshold: float | None = None,
    *,
    stress: Sequence[Any] = (),
    copies: int = COPIES,
    progress: Progress | None = None,
) -> Predictor:
    """Return the model with an error model, fitted on labelled frames not used in training.

    frames: a sequence of pairs (inputs, targets).
    threshold: a box whose IoU with its object is below it is misplaced; one of the thresholds
        0.1 to 0.9 for LiDAR (default 0.4), 0.55 to 0.95 for images (default 0.7).
    stress: labelled frames with larger errors than usual, for example
        ``boxcov.data.augment.resize_objects(frames)``. They decide how much regions widen, and
        risk rises, in frames unlike the calibration frames.
    copies: changed copies of each frame, if the detector can make them (``Detector.augment``). The
        network of the error model learns from them, too, if that lowers its loss on frames that it
        has not seen; all else is fitted on the frames as they are.
    progress: called with the number of items done and their total; the count begins again for
        copies and for stress frames.

    ``model`` itself is unchanged. The posterior of the result holds the error model:
    ``calibrated = boxcov.calibrate(model, frames)``, then ``calibrated.posterior.save(path)``.
    """
    if not isinstance(model, Predictor):
        raise BoxcovError(
            f"calibrate takes a method such as ExactGLM(detector, posterior), got a "
            f"{type(model).__name__}"
        )
    if model.posterior is None:
        raise BoxcovError(
            f"{model.method} has no posterior to store the error model with: calibrate ExactGLM, "
            "MCGLM, GLM, or MCI with a posterior"
        )
    iou_thresholds(model.linearized.shadow.box_fields, threshold)  # before the work
    check_whole("copies", copies, 0)
    check_count(frames)
    check_sequence(stress)
    found, truth = predict_frames(model, frames, progress)
    warn_of_convention(found, truth)
    records = match_detections(found, truth, threshold=-1.0)  # boxes of any score
    error_model = fit_error_model(
        found,
        records,
        threshold,
        estimator=estimator(model.settings()),
        fingerprint=model.posterior.fingerprint,
        copies=predict_copies(model, frames, copies, progress),
    )
    if len(stress):
        unusual, objects = predict_frames(model, stress, progress)
        paired = match_detections(unusual, objects, threshold=-1.0)
        error_model = widen(error_model, found, unusual, paired)
    return model.with_error_model(error_model)


@contextmanager
def _fitting() -> Iterator[None]:
    """Fit on the CPU, in float32 and with gradients, whatever the caller has chosen in torch."""
    with torch.device("cpu"), full_precision(), torch.inference_mode(False), torch.enable_grad():
        yield


@_fitting()
def widen(
    error_model: ErrorModel, usual: Detections, found: Detections, records: Records
) -> ErrorModel:
    """Return the error model with wider regions for frames unlike the calibration frames.

    usual: boxes of the calibration frames; found, records: boxes of stress frames, row by row.
    """
    errors = torch.as_tensor(records.as_axes().errors).float()
    iou, paired = torch.as_tensor(records.iou), torch.as_tensor(records.paired)
    applied = error_model.apply(found)
    widening = fit_widening(certainty_bound(usual), applied, errors, iou, paired)
    return replace(error_model, widening=widening)


@_fitting()
def fit_error_model(
    found: Detections,
    records: Records,
    threshold: float | None = None,
    *,
    estimator: str,
    fingerprint: str,
    options: TrainingOptions | None = None,
    copies: CopiedBoxes | None = None,
) -> ErrorModel:
    """Return the error model of detections and their records, row by row.

    copies: made from the frames, for the network to learn from.
    """
    options = options or TrainingOptions()
    thresholds, threshold = iou_thresholds(found.fields, threshold)
    if len(found) != len(records):
        raise BoxcovError(f"{len(found)} boxes, but records of {len(records)}")
    check_pairs(records)
    if not bool(found.boxes.isfinite().all()):  # z is not among the inputs
        raise BoxcovError("some boxes are not finite: remove those rows")
    inputs = _choose_inputs(box_inputs(found), options.exclude)
    centre, spread = _standardisation(inputs)
    unit = _units(records)
    x, targets = stack_inputs(inputs, tuple(inputs)), _targets(records, thresholds, unit)
    frame, own = found.frame, len(found)
    if copies is not None:
        copies = copies[torch.isin(copies.source, frame)]
        columns = box_inputs(copies.found)
        _check_finite(columns)
        x = torch.cat([x, stack_inputs(columns, tuple(inputs))])
        targets = targets + _targets(copies.records, thresholds, unit)
        frame = torch.cat([frame, copies.source])
    x, folds = ((x - centre) / spread).clamp(-LIMIT, LIMIT), frame_folds(frame)
    outputs = Outputs(len(thresholds), len(found.fields), "yaw" in found.fields)
    fitted = fit_network(x, targets, folds, outputs, options, own)
    x, targets, folds = x[:own], targets[:own], folds[:own]  # the rest is for the network alone
    rows = targets.paired
    scales = outputs.log_scale(_held_out_outputs(fitted, x, folds))[rows].exp()
    ratios = targets.errors[rows] / scales
    dof, factor = fit_student(ratios)  # the network was trained with one dof, TRAINING_DOF
    ratios, unit = ratios / factor, unit * factor
    deviations = scales * unit * (dof / (dof - 2)).sqrt()
    labels, ranges = class_range_index(found)
    C = len(found.classes)
    noise = missing_noise(ratios * scales * unit, deviations, labels[rows], C)
    return ErrorModel(
        fields=found.fields,
        classes=found.classes,
        estimator=estimator,
        fingerprint=fingerprint,
        inputs=tuple(inputs),
        thresholds=thresholds,
        threshold=threshold,
        centre=centre,
        spread=spread,
        network=fitted.network,
        unit=unit,
        dof=dof,
        noise=noise,
        correlation=_correlation(ratios),
        regions=fit_regions(
            *(ratios.abs(), labels[rows], ranges[rows], folds[rows]), (C, int(folds.max()) + 1)
        ),
        provenance={
            "boxes": len(found),
            "frames": len(np.unique(records.frame)),
            "paired": int(rows.sum()),
            "held_out_loss": round(fitted.loss, 6),
            "copies": fitted.copies,
            "width": fitted.width,
            "epochs": fitted.epochs,
        },
        configuration=found.meta.get("configuration", {}),
    )


def iou_thresholds(
    fields: Sequence[str], threshold: float | None
) -> tuple[tuple[float, ...], float]:
    """Return the IoU thresholds for boxes with these fields, and the one given or the default."""
    thresholds = IMAGE_THRESHOLDS if "x1" in fields else LIDAR_THRESHOLDS
    default = 0.7 if "x1" in fields else 0.4
    if threshold is not None and threshold not in thresholds:
        raise BoxcovError(
            f"threshold must be one of {', '.join(map(str, thresholds))}, got {threshold!r}"
        )
    return thresholds, default if threshold is None else threshold


def check_pairs(records: Records, which: str = "these frames") -> None:
    """Raise if an error model cannot be fitted on so few boxes with an object.

    which: the frames, in words.
    """
    boxes, paired, frames = len(records), int(records.paired.sum()), len(np.unique(records.frame))
    compare = "compare the order of the box fields, units, axes and class indices with the labels'"
    if boxes and not paired:
        raise BoxcovError(
            f"none of {boxes} boxes in {which} lies on an object of its class: {compare}"
        )
    if paired < MIN_PAIRS or frames < FOLDS:
        is_rare = boxes >= 2 * MIN_PAIRS and 5 * paired < boxes
        raise BoxcovError(
            f"too few boxes with an object in {which}: {paired} of {boxes}, with boxes in {frames} "
            f"frames; an error model needs at least {MIN_PAIRS} in {FOLDS} frames, better in 40: "
            f"{compare if is_rare else 'give more labelled frames'}"
        )


def _choose_inputs(inputs: Mapping[str, Tensor], exclude: Sequence[str]) -> dict[str, Tensor]:
    """Return the inputs (n,) that vary, without rare flags; raise if one is not finite.

    The network can learn nothing from a constant, and would answer at random to another value.
    """
    chosen = {name: x for name, x in inputs.items() if not name.startswith(tuple(exclude))}
    _check_finite(chosen)

    def is_useful(name: str, x: Tensor) -> bool:
        is_rare = name.startswith(_FLAGS) and float(x.sum()) < MIN_CLASS
        return name == "score" or (not is_rare and bool((x != x[0]).any()))

    return {name: x for name, x in chosen.items() if is_useful(name, x)}


def _check_finite(inputs: Mapping[str, Tensor]) -> None:
    bad = [name for name, x in inputs.items() if not bool(x.isfinite().all())]
    if bad:
        raise not_finite(bad)


def _standardisation(inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return a robust centre and spread (P,); classes and clipped sides stay 0 or 1."""
    pairs = []
    for name, x in inputs.items():
        low, centre, high = np.quantile(x.double().numpy(), (0.16, 0.5, 0.84)).tolist()
        spread = max((high - low) / 2, 0.1 * float(x.double().std()), 1e-3)
        pairs.append((0.0, 1.0) if name.startswith(_FLAGS) else (centre, spread))
    centres, spreads = torch.tensor(pairs, dtype=torch.float32).unbind(1)
    return centres, spreads


def _units(records: Records) -> Tensor:
    """Return one and a half times the median error of each field (D,).

    NaN for a field whose error is known for too few boxes.
    """
    errors = torch.as_tensor(records.as_axes().errors[records.paired]).float()
    unit = (1.5 * errors.abs().nanmedian(0).values).clamp(min=1e-2)
    return unit.where((~errors.isnan()).sum(0) >= MIN_PAIRS, torch.nan)


def _targets(records: Records, thresholds: Sequence[float], unit: Tensor) -> Targets:
    """Return the targets; errors are in units (D,), and NaN where the unit is."""
    errors = torch.as_tensor(records.as_axes().errors).float()
    flipped = errors.new_zeros(len(errors))
    if "yaw" in records.fields:
        yaw = records.errors[:, records.fields.index("yaw")]
        flipped = torch.as_tensor(np.abs(yaw) > pi / 2).float()
    below = torch.as_tensor(records.iou)[:, None] < torch.tensor(thresholds, dtype=torch.float64)
    return Targets(torch.as_tensor(records.paired), below.float(), flipped, errors / unit)


def _held_out_outputs(fitted: Ensemble, x: Tensor, folds: Tensor) -> Tensor:
    """Return the outputs (n, O) of each box by the member that was not fitted on its frame."""
    network = fitted.network
    y = x.new_empty(len(x), network.linear.shape[2])
    with torch.no_grad():
        for k in range(int(folds.max()) + 1):
            y[folds == k] = network.member(k)(x[folds == k])[0]
    return y


def _correlation(ratios: Tensor) -> Tensor:
    """Return the correlations (D, D) of the normal scores of errors over scales (n, D).

    A score is the standard normal quantile of the rank of the error within its field, so heavy
    tails do not decide. Unknown errors have the score 0; a field without any is uncorrelated.
    """
    scores = torch.zeros(ratios.shape, dtype=torch.float64)
    for column, out in zip(ratios.T, scores.T):
        known = ~column.isnan()
        ranks = column[known].argsort().argsort().double()
        out[known] = torch.special.ndtri((ranks + 0.5) / max(len(ranks), 1))
    length = scores.norm(dim=0)
    scores = scores / length.where(length > 0, 1.0)
    R: Tensor = 0.99 * scores.T @ scores  # 0.99, so that it is positive definite
    R.fill_diagonal_(1.0)
    return R.float()
