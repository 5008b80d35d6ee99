"""Which frames and boxes to label or check first: one number per box, and one per frame."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from boxcov.box_layout import IMAGE, has_layout
from boxcov.detections import Detections
from boxcov.errors import BoxcovError
from boxcov.evaluate.ground_truth import GroundTruth, match_detections
from boxcov.evaluate.matching import pair_classes
from boxcov.evaluate.records import Records

Array = NDArray[Any]
Aggregate = Literal["sum", "mean", "max"]
_NEIGHBOURS = 50  # labels of a class that tell how often such a label has no box
_SMALLEST = 1e-30  # probability
_MOTION = ("vx", "vy")
_LIMIT = 2.0  # metres between the centres of a pair


def relative_deviation(covariance: Array) -> Array:
    """Return the standard deviations (n,) of boxes relative to typical ones, as one number.

    It is the geometric mean over the fields of the standard deviation over its median, which is
    taken over all boxes (n, D, D). 1 is a typical box, 2 has twice its standard deviations.
    Fields that have no variance in a box, or in most boxes, do not count.

    >>> relative_deviation(np.array([1.0, 4.0, 16.0])[:, None, None] * np.diag([1.0, 100.0]))
    array([0.5, 1. , 2. ])
    """
    variance = np.diagonal(np.asarray(covariance, dtype=float), axis1=1, axis2=2)  # (n, D)
    typical = np.median(variance, axis=0) if len(variance) else np.ones(variance.shape[1])
    known = (variance > 0) & (typical > 0)
    logs = np.log(np.where(known, variance, 1) / np.where(known, typical, 1))
    return np.exp(0.5 * logs.sum(1) / np.maximum(known.sum(1), 1))


def box_values(found: Detections, by: Literal["risk", "epistemic"]) -> Array:
    """Return the value of each box (m,): the score times its risk, or its relative deviation.

    The score, because a box that the detector itself doubts needs no look: its risk is almost 1.
    """
    arrays = found.numpy()
    if by == "risk":
        value = found.risk.double().cpu().numpy()
    elif found.covariance is None:
        raise BoxcovError("these boxes have no covariances: write them with boxcov predict")
    else:
        value = relative_deviation(arrays["covariance"])
    return arrays["scores"] * value


def frame_values(values: Array, frame: Array, count: int, aggregate: Aggregate = "sum") -> Array:
    """Return the sum, mean or maximum of the boxes' values (n,) in each of ``count`` frames.

    The value of a frame without boxes is 0.

    >>> frame_values(np.array([1.0, 2.0, 5.0]), np.array([0, 0, 2]), 3, "mean").tolist()
    [1.5, 0.0, 5.0]
    """
    if aggregate not in get_args(Aggregate):
        raise BoxcovError(f"aggregate must be {', '.join(get_args(Aggregate))}, got {aggregate!r}")
    found = np.zeros(count)
    if aggregate == "max":
        np.maximum.at(found, frame, values)
        return found
    np.add.at(found, frame, values)
    if aggregate == "mean":
        found /= np.maximum(np.bincount(frame, minlength=count), 1)
    return found


@dataclass(frozen=True)
class Differences:
    """A row for each label, and one for each box without a label."""

    frame: Array  # (n,)
    box: Array  # (n,) number of the box, -1 without one
    label: Array  # (n,) number of the label in the ground truth, -1 without one
    kind: Array  # (n,) "place" of a pair, another "class", "no box" or "no label"
    value: Array  # (n,) large where the label is probably wrong


def disagreement(found: Detections, truth: GroundTruth) -> Differences:
    """Return how little boxes and labels agree, to find wrong labels; needs an error model.

    The value is -log10 of a probability that holds if the label is right, 0 for full agreement:

    - "place", a box and a label of its class: of an error as large as that of the worst field,
      under the error model's Student-t distributions, times P(there is an object). Velocities are
      left out.
    - "no label", a box without a label: ``no_object``.
    - "no box", a label without a box: how often labels of its class at its range have none.
    - "class", a box at the place of a label of another class: both of these.
    """
    if found.no_object is None:
        raise BoxcovError(
            "disagreement needs an error model, to know how large errors usually are: predict with "
            "a posterior of boxcov calibrate"
        )
    records = match_detections(found, truth, threshold=-1.0)
    assert records.pair is not None
    surprise = error_surprise(records) if len(records) else np.zeros(0)
    return compare(found, truth, records.pair, surprise)


def compare(found: Detections, truth: GroundTruth, label: Array, surprise: Array) -> Differences:
    """Return the differences, given the label of each box (m,) and the value of that pair (m,)."""
    m, missed = len(found), np.setdiff1d(np.arange(len(truth.labels)), label)
    alone = np.flatnonzero(label < 0)
    near = _pair_any_class(found[alone], truth, missed)
    other = np.full(m, -1)  # the label of another class
    other[alone[near >= 0]] = missed[near[near >= 0]]
    no_object = found.numpy()["no_object"].astype(float)
    no_box = _minus_log10(_miss_probability(found.fields, truth, missed))
    rest = np.setdiff1d(missed, other)
    value = np.where(label >= 0, (1 - no_object) * surprise, _minus_log10(no_object))
    value[other >= 0] += no_box[other[other >= 0]]
    kind = np.where(label >= 0, "place", np.where(other >= 0, "class", "no label"))
    return Differences(
        frame=np.concatenate([found.numpy()["frame"], truth.frame[rest]]),
        box=np.concatenate([np.arange(m), np.full(len(rest), -1)]),
        label=np.concatenate([np.maximum(label, other), rest]),
        kind=np.concatenate([kind, np.full(len(rest), "no box")]),
        value=np.concatenate([value, no_box[rest]]),
    )


def error_surprise(records: Records) -> Array:
    """Return -log10 P(an error as large as that of the worst field) (n,); 0 without a label."""
    from scipy import stats

    assert records.scale is not None
    assert records.dof is not None
    columns = [i for i, name in enumerate(records.fields) if name not in _MOTION]
    ratios = np.abs(records.as_axes().errors / records.scale)[:, columns]  # (n, d)
    tail = np.nan_to_num(2 * stats.t.sf(ratios, np.array(records.dof)[columns]), nan=1.0)
    # the smallest of d probabilities is smaller than one alone
    return _minus_log10(-np.expm1(len(columns) * np.log1p(-tail.min(1).clip(max=1 - 1e-12))))


def _minus_log10(probability: Array) -> Array:
    found: Array = -np.log10(np.clip(probability, _SMALLEST, 1.0))
    return np.abs(found)  # no -0


def _pair_any_class(found: Detections, truth: GroundTruth, rows: Array) -> Array:
    """Return which of these labels (k,) each box is paired with (m,), of any class; -1 for none."""
    boxes, scores, frame = (found.numpy()[name] for name in ("boxes", "scores", "frame"))
    boxes, labels = boxes.astype(float), np.zeros(len(found), int)
    objects = truth.columns(found.fields)[rows], 0 * truth.labels[rows], truth.frame[rows]
    return pair_classes(found.fields, (boxes, scores, labels, frame), objects, _LIMIT)


def _miss_probability(fields: tuple[str, ...], truth: GroundTruth, missed: Array) -> Array:
    """Return the share of labels without a box among those of the class at a similar range (k,).

    In images, of a similar size.
    """
    boxes = truth.columns(fields)
    if has_layout(fields, IMAGE):
        x1, y1, x2, y2 = (boxes[:, fields.index(name)] for name in IMAGE)
        place = (x2 - x1) * (y2 - y1)
    else:
        place = np.hypot(boxes[:, fields.index("x")], boxes[:, fields.index("y")])
    is_missed = np.isin(np.arange(len(boxes)), missed)
    found = np.ones(len(boxes))
    for label in np.unique(truth.labels):
        rows = np.flatnonzero(truth.labels == label)
        rows = rows[np.argsort(place[rows], kind="stable")]
        total = np.concatenate([[0], np.cumsum(is_missed[rows])])
        size = min(_NEIGHBOURS, len(rows))
        first = np.clip(np.arange(len(rows)) - size // 2, 0, len(rows) - size)
        found[rows] = (total[first + size] - total[first] + 1) / (size + 2)
    return found
