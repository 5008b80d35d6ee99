"""From a detector's boxes and the objects of the same frames to Records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcov.errors import BoxcovError
from boxcov.evaluate.overlap import iou_2d, iou_3d, iou_bev
from boxcov.evaluate.pairing import pair_by_distance, pair_by_iou
from boxcov.evaluate.records import Records

Array = NDArray[Any]
SPACE = ("x", "y", "z", "w", "l", "h", "yaw")
PLANE = ("x", "y", "w", "l", "yaw")
IMAGE = ("x1", "y1", "x2", "y2")
LEAST_IOU = 0.5  # of a pair in an image


def match(
    boxes: Array,
    scores: Array,
    labels: Array,
    frame: Array,
    truth_boxes: Array,
    truth_labels: Array,
    truth_frame: Array,
    fields: Sequence[str],
    classes: Sequence[str],
    uncertainty: Array,
    covariance: Array | None = None,
    predictive: Array | None = None,
    threshold: float = 0.1,
    limit: float = 2.0,
    score_variance: Array | None = None,
) -> Records:
    """Every prediction scored above ``threshold`` with the object it is paired with, class by class, as the data set pairs them.

    Predictions: ``boxes`` (n, D), ``scores``, ``labels``, ``frame`` and ``uncertainty`` (n,), ``covariance`` and ``predictive`` (n, D, D),
    ``score_variance`` (n,).
    Objects of the same frames: ``truth_boxes`` (k, D), ``truth_labels`` and ``truth_frame`` (k,); a velocity may be NaN, and stays so.
    Boxes with x, y, w, l, yaw are paired by the distance of their centres in the plane, below ``limit`` metres, and their IoU is in space
    where they have z and h too, else from above. Boxes x1 y1 x2 y2 are paired by an IoU of at least 0.5, and ``limit`` is not used.

    >>> car = np.array([[10.0, 0.0, 2.0, 4.0, 0.0]])
    >>> found = match(
    ...     car + [[1.0, 0, 0, 0, 0]], np.array([0.9]), np.array([0]), np.array([0]), car, np.array([0]), np.array([0]),
    ...     fields=("x", "y", "w", "l", "yaw"), classes=("car",), uncertainty=np.array([0.2]),
    ... )
    >>> found.iou.tolist(), found.l2.tolist(), found.errors.tolist()
    ([0.6], [1.0], [[1.0, 0.0, 0.0, 0.0, 0.0]])
    """
    fields, classes = tuple(fields), tuple(classes)
    _check(fields, boxes, scores, labels, frame, uncertainty, covariance, predictive)
    _check_objects(fields, truth_boxes, truth_labels, truth_frame)
    if score_variance is not None:
        _check_shapes(len(scores), score_variance=(score_variance, (len(scores),)))
    keep = np.asarray(scores) > threshold
    boxes, truth_boxes = np.asarray(boxes, dtype=float)[keep], np.asarray(truth_boxes, dtype=float)
    scores, labels, frame = (np.asarray(value)[keep] for value in (scores, labels, frame))
    pair = _pairs(
        fields, boxes, scores, labels, frame, truth_boxes, truth_labels, truth_frame, limit
    )
    hit = pair >= 0
    truth, iou, l2 = np.full(boxes.shape, np.nan), np.zeros(len(boxes)), np.full(len(boxes), np.nan)
    truth[hit] = truth_boxes[pair[hit]]
    iou[hit] = _iou(fields, boxes[hit], truth[hit])
    l2[hit] = np.linalg.norm(_centres(fields, boxes[hit]) - _centres(fields, truth[hit]), axis=1)
    return Records(
        fields=fields,
        classes=classes,
        boxes=boxes,
        uncertainty=np.asarray(uncertainty, dtype=float)[keep],
        scores=scores,
        labels=labels,
        frame=frame,
        truth=truth,
        iou=iou,
        l2=l2,
        covariance=None if covariance is None else np.asarray(covariance)[keep],
        predictive=None if predictive is None else np.asarray(predictive)[keep],
        score_variance=None
        if score_variance is None
        else np.asarray(score_variance, dtype=float)[keep],
    )


def _pairs(
    fields: tuple[str, ...],
    boxes: Array,
    scores: Array,
    labels: Array,
    frame: Array,
    truth: Array,
    truth_labels: Array,
    truth_frame: Array,
    limit: float,
) -> Array:
    """The object (n,) of each detection, or -1: class by class."""
    pair = np.full(len(boxes), -1)
    for label in np.unique(labels):
        mine, theirs = (
            np.flatnonzero(labels == label),
            np.flatnonzero(np.asarray(truth_labels) == label),
        )
        group = scores[mine], frame[mine]
        there = np.asarray(truth_frame)[theirs]
        if has(fields, IMAGE):
            found = pair_by_iou(
                columns(fields, IMAGE, boxes[mine]),
                *group,
                columns(fields, IMAGE, truth[theirs]),
                there,
                LEAST_IOU,
            )
        else:
            here, objects = (
                columns(fields, ("x", "y"), part) for part in (boxes[mine], truth[theirs])
            )
            found = pair_by_distance(here, *group, objects, there, limit)
        pair[mine[found >= 0]] = theirs[found[found >= 0]]
    return pair


def _iou(fields: tuple[str, ...], boxes: Array, truth: Array) -> Array:
    if has(fields, IMAGE):
        return iou_2d(columns(fields, IMAGE, boxes), columns(fields, IMAGE, truth))
    if has(fields, SPACE):
        return iou_3d(columns(fields, SPACE, boxes), columns(fields, SPACE, truth))
    return iou_bev(columns(fields, PLANE, boxes), columns(fields, PLANE, truth))


def _centres(fields: tuple[str, ...], boxes: Array) -> Array:
    if has(fields, IMAGE):
        return (columns(fields, IMAGE[:2], boxes) + columns(fields, IMAGE[2:], boxes)) / 2
    return columns(fields, tuple(name for name in ("x", "y", "z") if name in fields), boxes)


def has(fields: tuple[str, ...], names: tuple[str, ...]) -> bool:
    """Whether boxes of ``fields`` have all of ``names``.

    >>> has(("x", "y", "w", "l", "yaw"), SPACE)
    False
    """
    return all(name in fields for name in names)


def columns(fields: tuple[str, ...], names: tuple[str, ...], boxes: Array) -> Array:
    """The fields ``names`` (n, d) of boxes (n, D), in that order.

    >>> columns(("x", "y"), ("y", "x"), np.array([[1.0, 2.0]])).tolist()
    [[2.0, 1.0]]
    """
    return boxes[:, [fields.index(name) for name in names]]


def _check(
    fields: tuple[str, ...],
    boxes: Array,
    scores: Array,
    labels: Array,
    frame: Array,
    uncertainty: Array,
    covariance: Array | None,
    predictive: Array | None,
) -> None:
    if not (has(fields, PLANE) or has(fields, IMAGE)):
        raise BoxcovError(
            f"boxes of {fields} cannot be paired with objects: they need {' '.join(PLANE)}, or {' '.join(IMAGE)}"
        )
    n, D = len(scores), len(fields)
    _check_shapes(
        n,
        boxes=(boxes, (n, D)),
        labels=(labels, (n,)),
        frame=(frame, (n,)),
        uncertainty=(uncertainty, (n,)),
    )
    for name, value in (("covariance", covariance), ("predictive", predictive)):
        if value is not None:
            _check_shapes(n, **{name: (value, (n, D, D))})


def _check_objects(fields: tuple[str, ...], boxes: Array, labels: Array, frame: Array) -> None:
    k = len(labels)
    _check_shapes(k, truth_boxes=(boxes, (k, len(fields))), truth_frame=(frame, (k,)))


def _check_shapes(rows: int, **arrays: tuple[Array, tuple[int, ...]]) -> None:
    for name, (value, shape) in arrays.items():
        if np.shape(value) != shape:
            raise BoxcovError(
                f"{name} has shape {np.shape(value)}, expected {shape} for {rows} boxes"
            )
