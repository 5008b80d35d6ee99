"""Pair predictions with objects, as in the official evaluations of nuScenes and COCO; their IoU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from boxcov.box_layout import IMAGE, PLANE, SPACE, columns, find_layout, has_layout
from boxcov.detectors.boxes import rotated_intersection
from boxcov.errors import BoxcovError
from boxcov.evaluate.records import Records

Array = NDArray[Any]
MIN_IOU = 0.5  # of a pair in an image
_PLANE = [0, 1, 3, 4, 6]  # x y w l yaw among x y z w l h yaw


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
    pair: Array | None = None,
) -> Records:
    """Pair every prediction scored above ``threshold`` with an object of its frame and class.

    Predictions: ``boxes`` (n, D); ``scores``, ``labels``, ``frame``, ``uncertainty`` and
    ``score_variance`` (n,); ``covariance`` and ``predictive`` (n, D, D).
    Objects of the same frames: ``truth_boxes`` (k, D), ``truth_labels`` and ``truth_frame`` (k,).
    Fields of an object may be NaN (unknown velocity); with a NaN in its centre, or in a box of an
    image, it is never paired.

    In order of decreasing score, each prediction takes the best free object. Boxes with x, y, w, l,
    yaw take the nearest centre in the plane, closer than ``limit`` metres; their IoU is that of
    volumes if they have z and h, else of areas seen from above. Boxes x1 y1 x2 y2 take the largest
    IoU, at least 0.5; ``limit`` is ignored. Where ``pair`` (n,) states the objects, -1 for none,
    they are not looked for.

    >>> car, zero = np.array([[10.0, 0.0, 2.0, 4.0, 0.0]]), np.array([0])
    >>> found = match(
    ...     car + [[1.0, 0, 0, 0, 0]], np.array([0.9]), zero, zero, car, zero, zero,
    ...     fields=("x", "y", "w", "l", "yaw"), classes=("car",), uncertainty=np.array([0.2]),
    ... )
    >>> found.iou.tolist(), found.l2.tolist(), found.errors.tolist()
    ([0.6], [1.0], [[1.0, 0.0, 0.0, 0.0, 0.0]])
    """
    fields, classes = tuple(fields), tuple(classes)
    find_layout(fields, (PLANE, IMAGE), "the matching with objects")
    D = len(fields)
    rows = _check_shapes(
        *(len(scores), D),
        boxes=np.asarray(boxes, dtype=float),
        scores=scores,
        labels=labels,
        frame=frame,
        uncertainty=np.asarray(uncertainty, dtype=float),
        covariance=covariance,
        predictive=predictive,
        score_variance=score_variance,
        pair=pair,
    )
    truth_boxes = np.asarray(truth_boxes, dtype=float)
    objects = _check_shapes(
        *(len(truth_labels), D),
        truth_boxes=truth_boxes,
        truth_labels=truth_labels,
        truth_frame=truth_frame,
    )
    _check_labels("predictions", rows["labels"], len(classes))
    _check_labels("objects", objects["truth_labels"], len(classes))
    keep = rows["scores"] > threshold
    rows = {name: array[keep] for name, array in rows.items()}
    if pair is None:
        predictions = (rows["boxes"], rows["scores"], rows["labels"], rows["frame"])
        rows["pair"] = pair_classes(fields, predictions, tuple(objects.values()), limit)
    boxes, pair = rows["boxes"], rows["pair"]
    hit = pair >= 0
    truth, iou, l2 = np.full(boxes.shape, np.nan), np.zeros(len(boxes)), np.full(len(boxes), np.nan)
    truth[hit] = truth_boxes[pair[hit]]
    iou[hit] = _iou(fields, boxes[hit], truth[hit])
    l2[hit] = np.linalg.norm(_centres(fields, boxes[hit]) - _centres(fields, truth[hit]), axis=1)
    return Records(fields=fields, classes=classes, truth=truth, iou=iou, l2=l2, **rows)


def _check_shapes(n: int, D: int, **given: Array | None) -> dict[str, Any]:
    """Return those of the arrays that are given; raise if one does not fit n boxes of D fields."""
    arrays = {name: np.asarray(value) for name, value in given.items() if value is not None}
    wide: dict[str, tuple[int, ...]] = dict.fromkeys(("boxes", "truth_boxes"), (n, D))
    wide |= dict.fromkeys(("covariance", "predictive"), (n, D, D))
    for name, array in arrays.items():
        expected = wide.get(name, (n,))
        if array.shape != expected:
            raise BoxcovError(f"{name} has shape {array.shape}, expected {expected} for {n} boxes")
    return arrays


def _check_labels(whose: str, labels: Array, count: int) -> None:
    """Raise if labels (n,) are no indices into this number of classes."""
    if len(labels) and not 0 <= labels.min() <= labels.max() < count:
        advice = "do they begin at 1?" if labels.min() > 0 else f"leave out other {whose}"
        raise BoxcovError(
            f"the labels of the {whose} are {labels.min():g} to {labels.max():g}, expected indices "
            f"into the {count} classes, 0 to {count - 1}: {advice}"
        )


def pair_classes(
    fields: tuple[str, ...],
    predictions: tuple[Array, Array, Array, Array],
    objects: tuple[Array, Array, Array],
    limit: float,
) -> Array:
    """Return the index of the object paired with each prediction (n,); -1 for none.

    Predictions are boxes, scores, labels and frames; objects are boxes, labels and frames. In order
    of decreasing score, each prediction takes the best free object of its frame and class.
    """
    boxes, scores, labels, frame = predictions
    truth_boxes, truth_labels, truth_frame = objects
    in_image = has_layout(fields, IMAGE)
    at = columns(fields, IMAGE if in_image else ("x", "y"))
    own, other = boxes[:, at], truth_boxes[:, at]
    rows = defaultdict(list)
    for number, group in enumerate(zip(truth_frame.tolist(), truth_labels.tolist())):
        rows[group].append(number)
    free = {group: np.array(numbers) for group, numbers in rows.items()}
    pair = np.full(len(boxes), -1)
    for i in np.argsort(-scores, kind="stable"):
        group = frame[i], labels[i]
        candidates = free.get(group, ())
        if len(candidates):
            there = other[candidates]
            best = _largest_overlap(own[i], there) if in_image else _nearest(own[i], there, limit)
            if best >= 0:
                pair[i], free[group] = candidates[best], np.delete(candidates, best)
    return pair


def _nearest(centre: Array, others: Array, limit: float) -> int:
    """Return which of the other centres (k, 2) is nearest, -1 if none is closer than the limit."""
    distance = np.linalg.norm(others - centre, axis=1)
    distance[np.isnan(distance)] = np.inf  # argmin would choose NaN
    best = int(distance.argmin())
    return best if distance[best] < limit else -1


def _largest_overlap(box: Array, others: Array) -> int:
    """Return which of the other boxes (k, 4) has the largest IoU, -1 if none has ``MIN_IOU``."""
    iou = iou_2d(np.broadcast_to(box, others.shape), others)
    best = len(iou) - 1 - int(iou[::-1].argmax())  # the last of equal ones, as COCO does
    return best if iou[best] >= MIN_IOU else -1


def _iou(fields: tuple[str, ...], boxes: Array, truth: Array) -> Array:
    metrics = {IMAGE: iou_2d, SPACE: iou_3d, PLANE: iou_bev}
    layout = find_layout(fields, tuple(metrics), "the IoU")
    at = columns(fields, layout)
    return metrics[layout](boxes[:, at], truth[:, at])


def _centres(fields: tuple[str, ...], boxes: Array) -> Array:
    if has_layout(fields, IMAGE):
        corners = boxes[:, columns(fields, IMAGE)]
        return (corners[:, :2] + corners[:, 2:]) / 2
    return boxes[:, columns(fields, [name for name in ("x", "y", "z") if name in fields])]


# IoU


def iou_3d(a: Array, b: Array) -> Array:
    """Return the IoU (n,) of box i of ``a`` with box i of ``b``.

    Boxes are (n, 7) or wider: x y z w l h yaw, upright, z at half height, w across the heading, l
    along it, yaw from x to y. A box without volume or with a value that is not finite has IoU 0.
    """
    a, b = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    with np.errstate(all="ignore"):
        rise = b[:, 2] - a[:, 2]
        top = np.minimum(a[:, 5] / 2, rise + b[:, 5] / 2)
        bottom = np.maximum(-a[:, 5] / 2, rise - b[:, 5] / 2)
        area = _intersection_area(a[:, _PLANE], b[:, _PLANE])
        return _ratio(area * np.maximum(top - bottom, 0), a[:, 3:6], b[:, 3:6])


def iou_bev(a: Array, b: Array) -> Array:
    """Return the IoU (n,) seen from above, of boxes x y w l yaw or x y z w l h yaw (or wider)."""
    a, b = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    a, b = (boxes if boxes.shape[1] == 5 else boxes[:, _PLANE] for boxes in (a, b))
    with np.errstate(all="ignore"):
        return _ratio(_intersection_area(a, b), a[:, 2:4], b[:, 2:4])


def iou_2d(a: Array, b: Array) -> Array:
    """Return the IoU (n,) of boxes (n, 4) as x1 y1 x2 y2."""
    a, b = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    with np.errstate(all="ignore"):
        sides = np.minimum(a[:, 2:4], b[:, 2:4]) - np.maximum(a[:, :2], b[:, :2])
        return _ratio(np.maximum(sides, 0).prod(1), a[:, 2:4] - a[:, :2], b[:, 2:4] - b[:, :2])


def _ratio(intersection: Array, sizes_a: Array, sizes_b: Array) -> Array:
    volume_a, volume_b = (np.maximum(sizes, 0).prod(1) for sizes in (sizes_a, sizes_b))
    union = volume_a + volume_b - intersection
    sound = (volume_a > 0) & (volume_b > 0) & np.isfinite(union)
    return np.where(sound, np.clip(intersection / union, 0, 1), 0.0)


def _intersection_area(a: Array, b: Array) -> Array:
    """Return the intersection area (n,) of rectangles x y w l yaw."""
    return rotated_intersection(torch.tensor(a), torch.tensor(b)).numpy()
