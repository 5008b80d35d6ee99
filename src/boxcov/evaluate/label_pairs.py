"""Boxes and labels that show the same object, of the same class or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcov.box_layout import IMAGE, columns, has_layout
from boxcov.detections import Detections
from boxcov.evaluate.ground_truth import GroundTruth
from boxcov.evaluate.matching import MIN_IOU, iou_2d, iou_bev

Array = NDArray[Any]
LIMIT = 2.0  # metres between the centres of a pair
_ON_GROUND = 0.1  # IoU seen from above that two solid objects do not have


@dataclass(frozen=True)
class LabelPairs:
    """The boxes of n labels, and the boxes that no label explains."""

    own: Array  # (n,) the box of the label's class, -1 for none
    other: Array  # (n,) the best box of another class at the label's place, -1 for none
    alone: Array  # (f,) boxes that are at the place of neither a label nor a better one of these


def pair_labels(found: Detections, truth: GroundTruth) -> LabelPairs:
    """Return which boxes belong to which labels; needs an error model.

    A label takes a box of its class by decreasing P(there is an object) times nearness, which is
    exp(-distance in metres) below 2 m, or in images the IoU if it is at least 0.5. The evaluation
    pairs by decreasing score alone: a false box that is surer than the right one would take its
    label. Boxes are at the same place if their IoU is above 0.1 seen from above, or in images 0.5.
    """
    arrays, objects = found.numpy(), truth.columns(found.fields)
    boxes, certain = arrays["boxes"].astype(float), 1 - arrays["no_object"].astype(float)
    own, other = np.full(len(objects), -1), np.full(len(objects), -1)
    same_place = MIN_IOU if has_layout(found.fields, IMAGE) else _ON_GROUND
    alone = []
    rows = (_by_frame(frame, truth.frames) for frame in (arrays["frame"], truth.frame))
    for mine, theirs in zip(*rows):
        mine = mine[np.argsort(-certain[mine], kind="stable")]
        same = arrays["labels"][mine, None] == truth.labels[theirs]
        near = _nearness(found.fields, boxes[mine], objects[theirs])
        pair = _pair_best_first(certain[mine, None] * near * same)  # (m,) index into theirs
        own[theirs[pair[pair >= 0]]] = mine[pair >= 0]
        left = mine[pair < 0]
        overlap = _overlap(found.fields, boxes[left], objects[theirs])
        on_label = (overlap > same_place).any(1)
        for box, row in zip(left[on_label], overlap[on_label]):  # the surest first
            label = theirs[row.argmax()]
            if other[label] < 0 and truth.labels[label] != arrays["labels"][box]:
                other[label] = box
        left = left[~on_label]
        same = _overlap(found.fields, boxes[left], boxes[left]) > same_place
        alone.append(left[_not_covered(same)])
    return LabelPairs(own, other, np.sort(np.concatenate(alone)))


def _by_frame(frame: Array, count: int) -> list[Array]:
    """Return the rows of each frame."""
    order = np.argsort(frame, kind="stable")
    return np.split(order, np.cumsum(np.bincount(frame, minlength=count))[: count - 1])


def _pair_best_first(value: Array) -> Array:
    """Return the column paired with each row of values (m, k) by decreasing value, -1 for none.

    >>> _pair_best_first(np.array([[0.9, 0.8], [0.8, 0.0], [0.0, 0.0]]))
    array([ 0, -1, -1])
    """
    found = np.full(len(value), -1)
    rows, places = np.nonzero(value)
    is_free = np.ones(value.shape[1], dtype=bool)
    for i in np.argsort(-value[rows, places], kind="stable"):
        row, place = rows[i], places[i]
        if found[row] < 0 and is_free[place]:
            found[row], is_free[place] = place, False
    return found


def _not_covered(same: Array) -> Array:
    """Return which boxes (m,), the best first, are not the same (m, m) as a better one kept."""
    kept = np.zeros(len(same), dtype=bool)
    for i, row in enumerate(same):
        kept[i] = not row[kept].any()
    return kept


def _nearness(fields: tuple[str, ...], boxes: Array, objects: Array) -> Array:
    """Return how near each box is to each object (m, k), at most 1; 0 if they are no pair."""
    if has_layout(fields, IMAGE):
        iou = _overlap(fields, boxes, objects)
        return np.where(iou >= MIN_IOU, iou, 0.0)
    at = columns(fields, ("x", "y"))
    distance = np.linalg.norm(boxes[:, None, at] - objects[:, at], axis=2)
    return np.where(distance < LIMIT, np.exp(-distance), 0.0)


def _overlap(fields: tuple[str, ...], a: Array, b: Array) -> Array:
    """Return the IoU (m, k) of each box of a with each of b, seen from above or in the image."""
    if has_layout(fields, IMAGE):
        at = columns(fields, IMAGE)
        i, j = np.indices((len(a), len(b))).reshape(2, -1)
        return iou_2d(a[i][:, at], b[j][:, at]).reshape(len(a), len(b))
    found = np.zeros((len(a), len(b)))
    at = columns(fields, ("x", "y", "w", "l", "yaw"))
    a, b = a[:, at], b[:, at]
    distance = np.linalg.norm(a[:, None, :2] - b[:, :2], axis=2)
    reach_a, reach_b = (np.hypot(boxes[:, 2], boxes[:, 3]) / 2 for boxes in (a, b))
    i, j = np.nonzero(distance < reach_a[:, None] + reach_b)  # the others do not touch
    found[i, j] = iou_bev(a[i], b[j])
    return found
