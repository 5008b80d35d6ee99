"""Are the labels in the convention of the detector's boxes, or would another reading fit better?

Labels with yaw in degrees, or with w and l swapped, calibrate without an error. Each known reading
of the labels is paired with the confident boxes, and the agreements are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple
from warnings import warn

import numpy as np
from numpy.typing import NDArray

from boxcov.box_layout import IMAGE, PLANE, columns, has_layout
from boxcov.detections import Detections
from boxcov.errors import BoxcovWarning, join_names
from boxcov.evaluate.ground_truth import GroundTruth
from boxcov.evaluate.matching import match
from boxcov.evaluate.records import Records

Array = NDArray[Any]
MIN_PAIRS = 15  # below, nothing is said
MIN_AGREEMENT = 0.2  # of pairs; if it is lower, no reading may stand out even if labels are wrong
CONFIDENT = 0.3  # score
_MOST = 500  # boxes that are compared
# A reading is reported if it raises the mean agreement of pairs by this much, and by this factor,
# and if the gain is this many standard deviations of a gain by chance.
_GAIN, _RATIO, _DEVIATIONS = 0.1, 1.3, 3.5
_CLEARLY_BETTER = 1.1  # than a simpler reading
_OTHER_SIZES = 1.5  # factor; cars of other countries differ by less
_OTHER_ORIGIN = 0.5  # metres between the medians of boxes and labels
_SAME_CLASS = 0.8  # share of a class's objects that lie on boxes of one other class
_UNITS = {"millimetres": 0.001, "centimetres": 0.01, "feet": 0.3048}


class LabelComparison(NamedTuple):
    """How the labels fit the confident boxes."""

    counts: str
    pairs: int
    agreement: float  # mean of the pairs, 0 to 1
    seen: str = ""  # the contradiction; empty if there is none
    todo: str = ""


class _Reading(NamedTuple):
    """Another convention of labels, and the fields that change if they are read so."""

    what: str
    todo: str
    changed: Mapping[str, Array]
    labels: Array | None = None  # if the classes change


def compare_labels(found: Detections, truth: GroundTruth) -> LabelComparison | None:
    """Return how the labels fit the boxes of the same frames; None for fields of another kind.

    The agreement of a pair is its IoU. For boxes with a yaw it is multiplied by the ratio of the
    widths and the cosine between the headings.
    """
    fields = found.fields
    if not has_layout(fields, PLANE) and not has_layout(fields, IMAGE):
        return None
    found = found[found.scores > CONFIDENT][:_MOST]
    arrays = found.numpy()
    boxes, scores, labels, frame = (arrays[n] for n in ("boxes", "scores", "labels", "frame"))
    near = truth.frame <= frame.max(initial=-1)
    labelled, numbers = truth.columns(fields)[near], truth.labels[near]

    def pair(changed: Mapping[str, Array], own: Array = labels, other: Array = numbers) -> Records:
        objects = labelled.copy()
        for name, column in changed.items():
            objects[:, fields.index(name)] = column
        return match(
            *(boxes, scores, own, frame, objects, other, truth.frame[near]),
            fields=fields,
            classes=found.classes,
            uncertainty=scores,
            threshold=CONFIDENT,
        )

    records = pair({})
    own, count, best = _agreement(records), int(records.paired.sum()), 0.0
    result = LabelComparison(
        f"{count} of {len(found)} boxes with a score above {CONFIDENT} lie on one of "
        f"{len(labelled)} labelled objects of their class",
        count,
        float(own.sum()) / max(count, 1),
    )
    readings = list(_readings(dict(zip(fields, labelled.T)), records))
    readings += _other_classes(found.classes, numbers, labels, pair({}, 0 * labels, 0 * numbers))
    for reading in readings:
        other = pair(reading.changed, other=numbers if reading.labels is None else reading.labels)
        agreement, pairs = _agreement(other), max(count, int(other.paired.sum()))
        gain, total = agreement - own, float(agreement.sum())
        is_clear = gain.sum() > max(_GAIN * pairs, (_RATIO - 1) * own.sum())
        is_certain = gain.sum() > _DEVIATIONS * np.linalg.norm(gain)
        if pairs >= MIN_PAIRS and is_clear and is_certain and total > _CLEARLY_BETTER * best:
            best = total
            seen = (
                f"{reading.what} ({int(other.paired.sum())} pairs). Read so, labels and boxes "
                f"agree to {100 * total / pairs:.0f} %, now to {100 * own.sum() / pairs:.0f} %"
            )
            result = result._replace(seen=seen, todo=reading.todo)
    return result


def warn_of_convention(found: Detections, truth: GroundTruth) -> None:
    """Warn if the labels contradict the boxes of the same frames in a systematic way."""
    compared = compare_labels(found, truth)
    if compared is not None and compared.seen:
        warn(
            f"the labels seem to have another convention than the boxes: {compared.seen}: "
            f"{compared.todo}",
            BoxcovWarning,
            stacklevel=3,
        )


def _agreement(records: Records) -> Array:
    """Return a number from 0 to 1 per box (n,), 0 without an object."""
    value = np.array(records.iou)
    if "yaw" in records.fields:
        w, yaw = columns(records.fields, ("w", "yaw"))
        with np.errstate(all="ignore"):
            ratio = records.boxes[:, w] / records.truth[:, w]
            value *= np.minimum(ratio, 1 / ratio) * np.cos(records.errors[:, yaw]).clip(0)
    return np.nan_to_num(value)


def _readings(c: Mapping[str, Array], records: Records) -> Iterator[_Reading]:
    """Yield the readings of labelled objects with the columns ``c``, simple ones first."""
    if "yaw" not in c:
        yield from _image_readings(c, records)
        return
    w, l, yaw = c["w"], c["l"], c["yaw"]
    yield _Reading("yaw is in degrees", "give radians", {"yaw": np.deg2rad(yaw)})
    turned = []
    for swap, mirror, degrees in product((False, True), (False, True), (0, 90, 180, -90)):
        parts = ["w and l are swapped"] * swap + ["yaw turns the other way"] * mirror
        parts += [f"yaw is {degrees} degrees off"] * (degrees != 0)
        changed = {"w": l, "l": w} if swap else {}
        if mirror or degrees:
            changed["yaw"] = (-yaw if mirror else yaw) - np.deg2rad(degrees)
        turned.append((parts, changed))
    todo = "give l along the heading, w across it, and yaw from x to y in radians"
    for parts, changed in sorted(turned, key=lambda item: len(item[0]))[1:]:
        yield _Reading(" and ".join(parts), todo, changed)
    if "z" in c and "h" in c:
        bottom = {"z": c["z"] + c["h"] / 2}
        yield _Reading("z is at the bottom of objects", "give z at half height", bottom)
    for x, y in product((l / 2, -l / 2), (w / 2, -w / 2)):
        dx, dy = np.cos(yaw) * x - np.sin(yaw) * y, np.sin(yaw) * x + np.cos(yaw) * y
        centre = {"x": c["x"] + dx, "y": c["y"] + dy}
        yield _Reading("x and y are a corner of objects", "give their centre", centre)
    for unit, metres in _UNITS.items():
        lengths = {name: metres * c[name] for name in "xyzwlh" if name in c}
        yield _Reading(f"the labels are in {unit}", "give metres", lengths)
    paired = records[records.paired]
    if not len(paired):
        return
    places = [name for name in "xyz" if name in c]
    at = columns(records.fields, places)
    apart = np.median(paired.boxes[:, at] - paired.truth[:, at], axis=0)
    if np.abs(apart).max() > _OTHER_ORIGIN:
        moved = {name: c[name] + by for name, by in zip(places, apart)}
        origin = (np.round(apart, 1) + 0.0).tolist()  # -0.0 becomes 0.0
        what = f"{', '.join(places)} have another origin, at {origin} m"
        yield _Reading(what, "give places in the frame of reference of the boxes", moved)
    names = [name for name in "wlh" if name in c]
    at = columns(records.fields, names)
    with np.errstate(all="ignore"):
        factor = float(np.median(paired.boxes[:, at] / paired.truth[:, at]))
    if 0 < factor < np.inf and abs(np.log(factor)) > np.log(_OTHER_SIZES):
        sizes = {name: factor * c[name] for name in names}
        what = f"sizes are {1 / factor:.2g} times those of the boxes"
        yield _Reading(what, "give whole sides in metres", sizes)


def _other_classes(
    classes: Sequence[str], numbers: Array, labels: Array, records: Records
) -> Iterator[_Reading]:
    """Yield the reading that gives each class of objects the number of the boxes at its place.

    numbers, labels: classes of objects and boxes; records: of these boxes, whatever their class.
    """
    assert records.pair is not None  # match() states it
    order, numbers = np.arange(len(classes)), numbers.astype(int)
    own, other = numbers[records.pair[records.paired]], labels[records.paired]
    for number in np.unique(own):
        counts = np.bincount(other[own == number], minlength=len(classes))
        if counts.max() > _SAME_CLASS * counts.sum():
            order[number] = counts.argmax()
    moved = np.flatnonzero(order != np.arange(len(classes))).tolist()
    if moved:
        names = [f"{classes[order[number]]} is labelled {classes[number]}" for number in moved]
        what = f"the classes are numbered in another order, so that {join_names(names, 3)}"
        yield _Reading(what, "number them as the detector does", {}, order[numbers])


def _image_readings(c: Mapping[str, Array], records: Records) -> Iterator[_Reading]:
    x1, y1, x2, y2 = (c[name] for name in IMAGE)
    todo = "give the corners x1 y1 x2 y2"
    yield _Reading("x2 and y2 are width and height", todo, {"x2": x1 + x2, "y2": y1 + y2})
    middle = (x1 - x2 / 2, y1 - y2 / 2, x1 + x2 / 2, y1 + y2 / 2)
    yield _Reading("the labels are centre, width and height", todo, dict(zip(IMAGE, middle)))
    yield _Reading("x and y are swapped", todo, dict(zip(IMAGE, (y1, x1, y2, x2))))
    if not (len(records) and len(x2)):
        return
    ends = np.quantile(records.boxes[:, columns(records.fields, ("x2", "y2"))], 0.95, axis=0)
    if (ends > 0).all():
        todo = "give pixels of the image that the network reads"
        sx, sy = ends / np.maximum(np.quantile(np.stack([x2, y2]), 0.95, axis=1), 1e-6)
        scaled = dict(zip(IMAGE, (sx * x1, sy * y1, sx * x2, sy * y2)))
        what = f"the labels are on images of another size, {1 / sx:.3g} times as wide"
        yield _Reading(what, todo, scaled)
