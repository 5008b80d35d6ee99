"""Which labels are wrong: likelihood ratios from the boxes and the error model of a detector."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log, pi
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcov.box_layout import IMAGE, columns, has_layout, sides
from boxcov.detections import Detections
from boxcov.errors import BoxcovError, import_package
from boxcov.evaluate.ground_truth import GroundTruth, match_detections
from boxcov.evaluate.label_pairs import LIMIT, LabelPairs, pair_labels
from boxcov.evaluate.records import Records

Array = NDArray[Any]
SHARE = 0.01  # of the labels are wrong in one way: changes the probabilities, not their order
RARE = 0.1  # so much rarer are wrong heights and headings, and labels of nothing
_SIDES = ("w", "l", "h")
_FIELDS = (  # what is wrong with a label that has a box: kind, fields, relative frequency
    ("place", ("x", "y"), 1.0),
    ("place", ("z",), RARE),
    ("heading", ("yaw",), RARE),
    ("size", _SIDES, 1.0),
    *(("place", (side,), 0.25) for side in IMAGE),
)
_FACTOR = 0.5  # standard deviation of the log sides of a wrong label
_BY_CHANCE = 0.02  # of the boxes without an object lie beside a label of their class
_NEIGHBOURS = 50  # labels of a class that tell how often such a label has no box
_SURE = 1e-6  # no probability is nearer to 0 or 1
# of the density of a label's sides in its class
_BANDWIDTHS = (0.04, 0.08, 0.16, 0.32, 0.64)  # of logarithms: 4 % to 64 % of a side
_MOST = 500  # labels of a class that are compared with
_ROWS = 4000  # labels at once
_SPREAD = 0.1  # of the log sides of all labels, at least


@dataclass(frozen=True)
class Differences:
    """A row for each label, then one for each box without a label."""

    frame: Array  # (n,)
    box: Array  # (n,) number of the box, -1 without one
    label: Array  # (n,) number of the label in the ground truth, -1 without one
    kind: Array  # (n,) what is wrong: place, size, heading, class, "no box" or "no label"
    value: Array  # (n,) P(the label is wrong), or P(a label is missing here)


def disagreement(found: Detections, truth: GroundTruth) -> Differences:
    """Return the probability that each label is wrong or missing; needs an error model.

    Each way to be wrong has a likelihood ratio: how likely the boxes and the label's size are if
    the label is wrong in this way, over how likely they are if it is right. The odds of a wrong
    label are ``SHARE`` times the sum of the ratios, of which those of height, heading and "no box"
    count a tenth (``RARE``); ``kind`` is the way with the highest ratio.

    - "place", "size", "heading": the error of the label's box is any error within 2 m, of half the
      size, or of any angle, against the error model's Student-t distribution. For the size, times
      the density of its sides among labels of any class over that of its class.
    - "class": the odds of a box of another class at the label's place, over those of its own
      class, times the ratio of the densities of its sides in both classes.
    - "no box": 1 over how often right labels of the class at this range have none.
    - "no label", a box without a label: the odds that there is an object.
    """
    if found.no_object is None:
        raise BoxcovError(
            "disagreement needs an error model, to know how large errors usually are: predict with "
            "a posterior of boxcov calibrate"
        )
    arrays, pairs = found.numpy(), pair_labels(found, truth)
    no_object = arrays["no_object"].astype(float)
    kinds, frequency, ratios = map(np.array, zip(*_label_ratios(found, truth, pairs)))
    kind = kinds[ratios.argmax(0)]
    box = np.where((kind == "class") | (pairs.own < 0), pairs.other, pairs.own)
    alone, numbers = pairs.alone, np.arange(len(truth.labels))
    of_labels = np.logaddexp.reduce(ratios + np.log(frequency)[:, None])
    total = np.concatenate([of_labels, -_log_odds(no_object[alone])])
    return Differences(
        frame=np.concatenate([truth.frame, arrays["frame"][alone]]),
        box=np.concatenate([box, alone]),
        label=np.concatenate([numbers, np.full(len(alone), -1)]),
        kind=np.concatenate([kind, np.full(len(alone), "no label")]),
        value=1 / (1 + np.exp(-total) / SHARE),
    )


def _label_ratios(
    found: Detections, truth: GroundTruth, pairs: LabelPairs
) -> list[tuple[str, float, Array]]:
    """Return each way to be wrong: kind, relative frequency, and log likelihood ratios (n,).

    They are -inf where a label cannot be wrong in this way.
    """
    fields, has_box, has_other = found.fields, pairs.own >= 0, pairs.other >= 0
    no_object = np.append(found.numpy()["no_object"].astype(float), 1.0)  # 1 without a box
    missed = np.log(miss_probability(fields, truth, np.flatnonzero(~has_box)))
    x = np.log(np.maximum(_sides(fields, truth.columns(fields)), 1e-3))
    usual = log_density(x, truth.labels, truth.labels)
    any_size = log_density(x, truth.labels, np.full(len(x), -1)) - usual
    other_class = np.append(found.numpy()["labels"], -1)[pairs.other]
    swapped = log_density(x, truth.labels, other_class) - usual
    swapped -= log(max(len(found.classes) - 1, 1))  # the label might have any of these
    swapped -= _log_odds(no_object[pairs.other])
    swapped += np.where(has_box, _log_odds(no_object[pairs.own]), -missed)
    ways = [("class", 1.0, np.where(has_other, swapped, -np.inf))]
    ways.append(("no box", RARE, np.where(has_box, -np.inf, -missed)))
    label = np.full(len(found), -1)
    label[pairs.own[has_box]] = np.flatnonzero(has_box)
    records = match_detections(found, truth, threshold=-1.0, pair=label)[pairs.own[has_box]]
    for kind, names, frequency in _FIELDS:
        present = tuple(name for name in names if name in fields)
        if present:
            ratio = any_size.copy() if kind == "size" else np.where(has_box, 0.0, -np.inf)
            ratio[has_box] += _error_ratio(records, present, no_object[pairs.own[has_box]])
            ways.append((kind, frequency, ratio))
    return ways


def _error_ratio(records: Records, names: tuple[str, ...], no_object: Array) -> Array:
    """Return the log likelihood ratio (k,) of errors in these fields, wrong label over right one.

    A box without an object, beside a label by chance, may have any error, too.
    """
    assert records.scale is not None
    assert records.dof is not None
    at = columns(records.fields, names)
    errors, scale = records.as_axes().errors[:, at], records.scale[:, at]
    stats = import_package("scipy.stats")
    right = stats.t.logpdf(errors / scale, np.array(records.dof)[at]) - np.log(scale)
    wrong = _log_wide(records, names)
    known = np.isfinite(right)  # clipped sides, and fields without labels, say nothing
    right, wrong = (np.where(known, part, 0.0).sum(1) for part in (right, wrong))
    false = _BY_CHANCE * no_object
    false = np.clip(false / (false + 1 - no_object), _SURE, 1 - _SURE)
    return wrong - np.logaddexp(np.log1p(-false) + right, np.log(false) + wrong)


def _log_wide(records: Records, names: tuple[str, ...]) -> Array:
    """Return the log density (k, d) of the errors of wrong labels: anything that is still a pair.

    Places are uniform within 2 m, or in images within half a side; angles are uniform; the
    logarithms of sides are normal.
    """
    at = columns(records.fields, names)
    boxes, labels = (np.maximum(part[:, at], 1e-3) for part in (records.boxes, records.truth))
    if names[0] in IMAGE:
        width, height = _sides(records.fields, records.truth).T
        side = np.maximum(width if names[0] in ("x1", "x2") else height, 1e-3)
        return -np.log(side)[:, None]
    if names[0] in _SIDES:
        stats = import_package("scipy.stats")
        return stats.norm.logpdf(np.log(boxes / labels), 0, _FACTOR) - np.log(labels)
    return np.full(boxes.shape, -log(pi if names == ("yaw",) else 2 * LIMIT))


def _log_odds(probability: Array) -> Array:
    p = np.clip(probability, _SURE, 1 - _SURE)
    return np.log(p) - np.log1p(-p)


def _sides(fields: tuple[str, ...], boxes: Array) -> Array:
    """Return the sides (n, 2 or 3) of boxes."""
    return np.array(list(sides(dict(zip(fields, boxes.T))).values())).T


def miss_probability(fields: tuple[str, ...], truth: GroundTruth, missed: Array) -> Array:
    """Return the share of labels without a box among those of the class at a similar range (n,).

    In images, of a similar size.
    """
    boxes = truth.columns(fields)
    if has_layout(fields, IMAGE):
        place = _sides(fields, boxes).prod(1)
    else:
        place = np.hypot(*boxes[:, columns(fields, ("x", "y"))].T)
    is_missed, found = np.isin(np.arange(len(boxes)), missed), np.ones(len(boxes))
    for label in np.unique(truth.labels):
        rows = np.flatnonzero(truth.labels == label)
        rows = rows[np.argsort(place[rows], kind="stable")]
        total = np.concatenate([[0], np.cumsum(is_missed[rows])])
        size = min(_NEIGHBOURS, len(rows))
        first = np.clip(np.arange(len(rows)) - size // 2, 0, len(rows) - size)
        found[rows] = (total[first + size] - total[first] + 1) / (size + 2)
    return found


# how usual the sides of a label are in a class


def log_density(x: Array, labels: Array, asked: Array) -> Array:
    """Return the log density (n,) of the log sides x (n, d) of label i in the class asked[i].

    It is a kernel estimate from the other labels of that class, and one more that may have any
    size. The bandwidth of a class gives its own labels the highest density. Class -1 has no labels:
    any size.

    >>> x, car = np.log([[2.0], [2.0], [2.0], [9.0]]), np.zeros(4, int)
    >>> found = log_density(x, car, car)
    >>> bool(found[0] > found[3] + 2)
    True
    """
    broad = _broad(x)
    found = np.zeros(len(x))
    for label in np.unique(asked):
        members = np.flatnonzero(labels == label)
        members = members[:: max(ceil(len(members) / _MOST), 1)]
        rows = np.flatnonzero(asked == label)
        tried = [_density(x, broad, members, members, h).sum() for h in _BANDWIDTHS]
        h = _BANDWIDTHS[int(np.argmax(tried))]
        parts = [rows[i : i + _ROWS] for i in range(0, len(rows), _ROWS)]
        found[rows] = np.concatenate([_density(x, broad, part, members, h) for part in parts])
    return found


def _broad(x: Array) -> Array:
    """Return the log density (n,) of a normal distribution of all labels, of any class."""
    n, d = x.shape
    if not n:
        return np.zeros(0)
    off = x - x.mean(0)
    S = off.T @ off / n + _SPREAD**2 * np.eye(d)
    squares = (off @ np.linalg.inv(S) * off).sum(1).clip(max=100)  # no density is 0
    return -0.5 * (squares + np.linalg.slogdet(S)[1] + d * log(2 * pi))


def _density(x: Array, broad: Array, rows: Array, members: Array, bandwidth: float) -> Array:
    """Return the log density of some labels among the members of a class, themselves left out."""
    off = (x[rows, None] - x[None, members]) / bandwidth
    peak = (2 * pi * bandwidth**2) ** (-x.shape[1] / 2)
    is_other = rows[:, None] != members
    kernels = np.where(is_other, peak * np.exp(-0.5 * (off**2).sum(2)), 0.0)
    return np.log((kernels.sum(1) + np.exp(broad[rows])) / (is_other.sum(1) + 1))
