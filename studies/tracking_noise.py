"""Measurement noise of the methods that studies/tracking.py compares."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from tracking_boxes import FIT_SEED, RATE, Drive, load

from boxcov import Detections
from boxcov.concatenation import concatenate
from boxcov.data.simulated import CLASSES
from boxcov.error_model.calibrate import fit_error_model
from boxcov.error_model.model import ErrorModel
from boxcov.error_model.network import TrainingOptions
from boxcov.evaluate.ground_truth import GroundTruth, match_detections
from boxcov.export.tracker import MEASURED, TrackerSettings

NEAR = 2.0  # metres: a box or track this near an object of its class belongs to it
P_LEAST = 0.1  # boxes with a lower P(object) are not tracked
FIELDS = [("x", "y", "z", "w", "l", "h", "yaw", "vx", "vy").index(name) for name in MEASURED]
SCORE_SIZE = (  # inputs that the model of score and size does not have
    *("variance", "signal", "azimuth", "view", "nearest", "boxes in frame", "scores nearby"),
)
INPUTS = {"score + size": SCORE_SIZE, "boxcov, no covariance": ("variance",), "boxcov": ()}

Noise = Callable[[Detections], Detections]  # adds ``predictive``, ``no_object`` and ``flipped``


@dataclass(frozen=True)
class Pairs:
    """Boxes of drives with their objects, row by row."""

    errors: Tensor  # (n, 5) of the measured fields, in the LiDAR's axes; yaw as an axis
    R: Tensor  # (n, 5, 5)
    labels: Tensor  # (n,)
    identity: Tensor  # (n,) of the object, different in every drive
    frame: Tensor  # (n,)


def error_models(root: Path) -> dict[str, ErrorModel]:
    """Return the error models, fitted on the set ``fit``; kept in ``root``."""
    models = {}
    for name, exclude in INPUTS.items():
        path = root / f"error-model-{name.replace(' ', '')}.pickle"
        if not path.exists():
            data = load(root, f"fit-{FIT_SEED}-0")
            found = concatenate(data.found)
            truth = GroundTruth.from_frames([(None, [target]) for target in data.targets])
            options = TrainingOptions(exclude=exclude)
            records = match_detections(found, truth, threshold=-1.0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = fit_error_model(
                    found, records, estimator="exact", fingerprint="", options=options
                )
            path.write_bytes(pickle.dumps(model))
        models[name] = pickle.loads(path.read_bytes())
    return models


def methods(root: Path, drives: list[Drive]) -> dict[str, Noise]:
    """Return what each method says about boxes; ``drives`` are those for tuning."""
    models = error_models(root)
    plain = models["score + size"]
    pairs = collect_pairs(drives, plain.apply)
    spread = pairs.errors.square().mean(0)  # (5,)
    by_class = spread.repeat(len(CLASSES), 1)
    for label in range(len(CLASSES)):
        own = pairs.errors[pairs.labels == label]
        if len(own) >= 20:
            by_class[label] = own.square().mean(0)

    def constant(found: Detections) -> Detections:
        return with_variances(plain.apply(found), spread.expand(len(found), -1))

    def per_class(found: Detections) -> Detections:
        return with_variances(plain.apply(found), by_class[found.labels])

    return {
        "constant R": constant,
        "R per class": per_class,
        "R from score + size": with_class_noise(drives, plain.apply),
        "boxcov, no covariance": with_class_noise(drives, models["boxcov, no covariance"].apply),
        "boxcov": with_class_noise(drives, models["boxcov"].apply),
    }


def with_class_noise(drives: list[Drive], noise: Noise) -> Noise:
    """Return an error model's R: the variance of its distribution plus a residual by class.

    Instead of the noise that ``predictive`` holds, which was one for all classes when this was
    written, it is what the variance lacks of the mean square error of the class on the drives tune.
    The error of a velocity is a mixture, nearly 0 or that of a moving object taken for a standing
    one, which no Gaussian holds: R of the velocity is the mean square of the class in all methods.
    """

    def bare(found: Detections) -> Detections:
        some = noise(found)
        dof = torch.tensor(some.meta["error_model"]["dof"]).double()
        R = some.predictive.double()
        deviation = some.scale.double() * (dof / (dof - 2)).sqrt()
        ratio = deviation / R.diagonal(dim1=1, dim2=2).sqrt()
        return replace(some, predictive=ratio[:, :, None] * R * ratio[:, None, :])

    pairs = collect_pairs(drives, bare)
    lack = pairs.errors.square() - pairs.R.diagonal(dim1=1, dim2=2)  # (n, 5)
    lack[:, 3:] = pairs.errors[:, 3:].square()
    residual = torch.zeros(len(CLASSES), 9).double()
    for label in range(len(CLASSES)):
        own = lack[pairs.labels == label]
        residual[label, FIELDS] = (own if len(own) >= 20 else lack).mean(0).clamp(min=1e-4)

    def apply(found: Detections) -> Detections:
        some = bare(found)
        R = some.predictive.clone()
        R[:, 7:], R[:, :, 7:] = 0.0, 0.0
        return replace(some, predictive=R + torch.diag_embed(residual[some.labels]))

    return apply


def with_variances(found: Detections, variances: Tensor) -> Detections:
    """Return the boxes with a diagonal R of these variances (m, 5) and Gaussian gates."""
    R = torch.eye(9).repeat(len(found), 1, 1)
    R[:, FIELDS, FIELDS] = variances.float().clamp(min=1e-4)
    return replace(found, predictive=R, region_widths=None, joint_widths=None, scale=None)


def collect_pairs(drives: list[Drive], noise: Noise) -> Pairs:
    """Return all boxes with an object of their class within 2 m."""
    rows: dict[str, list[Tensor]] = {}
    for number, drive in enumerate(drives):
        for frame, (raw, target) in enumerate(zip(drive.found, drive.targets)):
            found = noise(raw)
            found = found[found.no_object < 1 - P_LEAST]
            box, thing = pair(found, target)
            step = (found.boxes[box] - target["boxes"][thing])[:, FIELDS].double()
            half = torch.pi / 2
            step[:, 2] = torch.remainder(step[:, 2] + half, 2 * half) - half
            rows.setdefault("errors", []).append(step)
            R = found.predictive[box][:, FIELDS][:, :, FIELDS].double()
            rows.setdefault("R", []).append(R)
            rows.setdefault("labels", []).append(found.labels[box])
            rows.setdefault("identity", []).append(target["ids"][thing] + 100_000 * number)
            rows.setdefault("frame", []).append(torch.full_like(box, frame))
    return Pairs(**{name: torch.cat(parts) for name, parts in rows.items()})


def pair(found: Detections, target: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the rows of boxes and objects of the same class that are nearest to each other."""
    far = torch.cdist(found.boxes[:, :2], target["boxes"][:, :2])
    far = torch.where(found.labels[:, None] == target["labels"], far, 1e3)
    box, thing = linear_sum_assignment(far.numpy())
    near = far.numpy()[box, thing] < NEAR
    return torch.from_numpy(box[near]), torch.from_numpy(thing[near])


def tracker_settings(drives: list[Drive], noise: Noise, rate: int = RATE) -> TrackerSettings:
    """Return settings from the objects' motion and from the boxes' errors, without tracking.

    ``persistence`` and ``fading`` follow from the correlation of errors between frames.
    """
    pairs = collect_pairs(drives, noise)
    w = torch.linalg.solve_triangular(
        torch.linalg.cholesky(pairs.R), pairs.errors[:, :, None], upper=False
    )[:, :, 0].clamp(-4, 4)
    power = float(w.square().mean())
    near, later = (correlation(pairs, w, lag) / power for lag in (1, 4))
    ratio = min(max(near / max(later, 1e-3), 1.05), 20.0)
    fading = 3 / rate / log(ratio)
    lasts = min(max(near * exp(1 / rate / fading), 0.05), 0.95)
    acceleration, turning = motion(drives, rate)
    return TrackerSettings(acceleration, turning, persistence=lasts, fading=fading)


def correlation(pairs: Pairs, w: Tensor, lag: int) -> float:
    """Return the mean product of the standardised errors of one object, ``lag`` frames apart."""
    key = pairs.identity * 1000 + pairs.frame
    order = key.argsort()
    at = torch.searchsorted(key[order], key + lag).clamp(max=len(key) - 1)
    other = order[at]
    both = key[other] == key + lag
    return float((w[both] * w[other[both]]).mean())


def motion(drives: list[Drive], rate: int) -> tuple[dict[str, float], float]:
    """Return the density of the acceleration by class, and that of the yaw rate."""
    steps: dict[int, list[float]] = {}
    turns: list[float] = []
    for drive in drives:
        last: dict[int, Tensor] = {}
        for target, pose in zip(drive.targets, drive.poses):
            velocity = target["boxes"][:, 7:].double() @ pose.R[:2, :2].T
            heading = torch.atan2(pose.R[1, 0], pose.R[0, 0])
            state = torch.cat([velocity, target["boxes"][:, 6:7] + heading], 1)
            now = dict(zip(target["ids"].tolist(), state))
            for number, label in zip(target["ids"].tolist(), target["labels"].tolist()):
                if number in last:
                    step = now[number] - last[number]
                    steps.setdefault(label, []).append(float(step[:2].square().mean()) * rate)
                    turn = torch.remainder(step[2] + torch.pi, 2 * torch.pi) - torch.pi
                    turns.append(float(turn) ** 2 * rate)
            last = now
    density = {CLASSES[label]: max(float(np.mean(v)), 1e-3) for label, v in steps.items()}
    return density, float(np.mean(turns))
