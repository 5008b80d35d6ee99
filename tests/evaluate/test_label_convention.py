"""Labels in another convention than the boxes are named; right labels are not."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from math import pi
from typing import Any

import numpy as np
import pytest
import torch

from boxcov import BoxcovError, BoxcovWarning, Detections
from boxcov.box_layout import IMAGE, PLANE, SPACE
from boxcov.evaluate.ground_truth import GroundTruth
from boxcov.evaluate.label_convention import compare_labels, warn_of_convention

Boxes = np.ndarray[Any, Any]


def pairs(
    fields: tuple[str, ...] = SPACE, count: int = 40, noise: float = 0.05
) -> tuple[Detections, GroundTruth]:
    """Cars on a grid, or image boxes, found with errors of ``noise`` of their size."""
    draw = np.random.default_rng(0)
    x, y = 20.0 * (np.arange(count) % 8) + 10, 20.0 * (np.arange(count) // 8) + 5
    w, l, h = (size * draw.uniform(0.8, 1.2, count) for size in (1.9, 4.5, 1.6))
    yaw, z = draw.uniform(-pi, pi, count), draw.uniform(-2, 0, count)
    corners = {"x1": x, "y1": y, "x2": x + 4 * w, "y2": y + 3 * l}
    values = {"x": x, "y": y, "z": z, "w": w, "l": l, "h": h, "yaw": yaw, **corners}
    truth = np.stack([values[name] for name in fields], 1)
    boxes = torch.tensor(truth + draw.normal(size=truth.shape) * noise).float()
    zero = torch.zeros(count, dtype=torch.long)
    found = Detections(boxes, torch.full((count,), 0.8), zero, zero, fields, ("car",))
    return found, GroundTruth(truth, zero.numpy(), zero.numpy(), 1)


def column(name: str, change: Callable[[Boxes], Any]) -> Callable[[Boxes], None]:
    def apply(boxes: Boxes) -> None:
        boxes[:, SPACE.index(name)] = change(boxes)

    return apply


def swap(boxes: Boxes) -> None:
    boxes[:, [3, 4]] = boxes[:, [4, 3]]


def legacy(boxes: Boxes) -> None:
    swap(boxes)
    boxes[:, 6] = -boxes[:, 6] - pi / 2


def corner(boxes: Boxes) -> None:
    w, l, cos, sin = boxes[:, 3] / 2, boxes[:, 4] / 2, np.cos(boxes[:, 6]), np.sin(boxes[:, 6])
    boxes[:, 0] += cos * l - sin * w
    boxes[:, 1] += sin * l + cos * w


def scale(*at: int, by: float) -> Callable[[Boxes], None]:
    def apply(boxes: Boxes) -> None:
        boxes[:, at] *= by

    return apply


SIZES, LENGTHS = (3, 4, 5), (0, 1, 2, 3, 4, 5)
WRONG: dict[str, tuple[Callable[[Boxes], None], str, str]] = {
    "degrees": (
        column("yaw", lambda b: np.rad2deg(b[:, 6])),
        r"^yaw is in degrees \(40 pairs\)\. Read so, .* agree to [6-9]\d %, now to",
        "give radians",
    ),
    "swapped": (swap, r"^w and l are swapped \(40 pairs\)\. Read so", "l along the"),
    "quarter": (column("yaw", lambda b: b[:, 6] + pi / 2), "^yaw is 90 degrees off", "yaw from x"),
    "back": (column("yaw", lambda b: b[:, 6] - pi / 2), "^yaw is -90 degrees off", "yaw from x"),
    "reversed": (column("yaw", lambda b: b[:, 6] + pi), "^yaw is 180 degrees off", "yaw from x"),
    "mirrored": (column("yaw", lambda b: -b[:, 6]), r"^yaw turns the other way \(", "yaw from x"),
    "legacy": (legacy, "swapped and yaw turns the other way and yaw is -?90", "l along the"),
    "bottom": (column("z", lambda b: b[:, 2] - b[:, 5] / 2), "z is at the bottom", "half"),
    "corner": (corner, "x and y are a corner", "give their centre"),
    "centimetres": (scale(*LENGTHS, by=100), "the labels are in centimetres", "give metres"),
    "feet": (scale(*LENGTHS, by=1 / 0.3048), "the labels are in feet", "give metres"),
    "half sizes": (scale(*SIZES, by=0.5), r"^sizes are 0\.5\d? times those of", "whole sides"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_another_convention_is_named(kind: str) -> None:
    change, seen, todo = WRONG[kind]
    found, truth = pairs()
    change(truth.boxes)
    compared = compare_labels(found, truth)
    assert compared is not None
    assert re.search(seen, compared.seen), compared.seen
    assert todo in compared.todo


@pytest.mark.parametrize("kind", ["degrees", "swapped", "quarter", "corner"])
def test_boxes_of_the_plane_have_no_height(kind: str) -> None:
    change, seen, _ = WRONG[kind]
    found, truth = pairs()
    change(truth.boxes)
    at = [SPACE.index(name) for name in PLANE]
    found = replace(found, boxes=found.boxes[:, at], fields=PLANE)
    compared = compare_labels(found, replace(truth, boxes=truth.boxes[:, at]))
    assert compared is not None
    assert re.search(seen, compared.seen)


def of_corners(change: Callable[..., tuple[Boxes, ...]]) -> Callable[[Boxes], Boxes]:
    return lambda boxes: np.stack(change(*boxes.T), 1)


IMAGES = {
    "x2 and y2 are width": of_corners(lambda a, b, c, d: (a, b, c - a, d - b)),
    "centre, width": of_corners(lambda a, b, c, d: ((a + c) / 2, (b + d) / 2, c - a, d - b)),
    "x and y are swapped": of_corners(lambda a, b, c, d: (b, a, d, c)),
    "of another size, 0.01 times": lambda boxes: boxes / 100,
    "of another size, 2 times": lambda boxes: boxes * 2,
}


@pytest.mark.parametrize("seen", IMAGES)
def test_another_convention_of_image_boxes_is_named(seen: str) -> None:
    found, truth = pairs(IMAGE)
    compared = compare_labels(found, replace(truth, boxes=IMAGES[seen](truth.boxes)))
    assert compared is not None
    assert seen in compared.seen


@pytest.mark.parametrize("fields", [SPACE, PLANE, IMAGE])
@pytest.mark.parametrize("noise", [0.02, 0.3, 1.0])
def test_right_labels_are_not_named(fields: tuple[str, ...], noise: float) -> None:
    compared = compare_labels(*pairs(fields, noise=noise))
    assert compared is not None
    assert compared.seen == ""
    assert compared.pairs > 30
    assert compared.counts.endswith("lie on one of 40 labelled objects of their class")


def test_cars_of_another_country_are_not_named() -> None:
    found, truth = pairs(count=400)
    scale(*SIZES, by=1.25)(truth.boxes)
    compared = compare_labels(found, truth)
    assert compared is not None
    assert compared.seen == ""


@pytest.mark.parametrize(("count", "is_named"), [(14, False), (15, True)])
def test_few_pairs_decide_nothing(count: int, is_named: bool) -> None:
    found, truth = pairs(count=count, noise=0.0)
    swap(truth.boxes)
    compared = compare_labels(found, truth)
    assert compared is not None
    assert (compared.pairs, bool(compared.seen)) == (count, is_named)


def test_boxes_of_low_scores_do_not_count() -> None:
    found, truth = pairs()
    swap(truth.boxes)
    compared = compare_labels(replace(found, scores=found.scores / 4), truth)
    assert compared is not None
    assert (compared.pairs, compared.seen) == (0, "")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("fields", [SPACE, IMAGE])
def test_boxes_and_labels_without_a_size_decide_nothing(fields: tuple[str, ...]) -> None:
    found, truth = pairs(fields)
    if fields == IMAGE:
        found.boxes[:] = 0
    else:
        truth.boxes[:, SIZES] = 0
    compared = compare_labels(found, truth)
    assert compared is not None
    assert compared.seen == ""


def test_other_fields_are_not_compared() -> None:
    found, truth = pairs()
    other = tuple("abcdefg")
    assert compare_labels(replace(found, fields=other), truth) is None
    warn_of_convention(replace(found, fields=other), truth)


def test_the_warning_names_what_and_the_way_out() -> None:
    found, truth = pairs()
    warn_of_convention(found, truth)  # no warning
    swap(truth.boxes)
    with pytest.warns(BoxcovWarning, match=r"another convention .* swapped \(.* %: give l along"):
        warn_of_convention(found, truth)


def test_classes_in_another_order_are_named() -> None:
    found, truth = pairs()
    labels = np.arange(40) % 3
    found = replace(found, labels=torch.tensor(labels), classes=("car", "bus", "bicycle"))
    same, other = replace(truth, labels=labels), replace(truth, labels=(labels + 1) % 3)
    right, wrong = compare_labels(found, same), compare_labels(found, other)
    floats = compare_labels(found, replace(other, labels=other.labels.astype(float)))
    with pytest.raises(BoxcovError, match=r"labels of the objects are 1 to 3, .* begin at 1\?"):
        compare_labels(found, replace(truth, labels=labels + 1))
    assert floats == wrong
    assert right is not None
    assert wrong is not None
    assert not right.seen
    assert "another order, so that bicycle is labelled car, car is labelled bus" in wrong.seen
    assert "bus is labelled bicycle (40 pairs). Read so" in wrong.seen
    assert wrong.todo == "number them as the detector does"
    mixed = np.where(np.arange(40) < 20, labels, (labels + 1) % 3)  # confused, but in no order
    unclear = compare_labels(found, replace(truth, labels=mixed))
    assert unclear is not None
    assert not unclear.seen


def test_labels_from_another_origin_are_named() -> None:
    """Of the ego car instead of the LiDAR, 1.8 m above it."""
    found, truth = pairs()
    truth.boxes[:, 0] += 0.9
    truth.boxes[:, 2] += 1.8
    compared = compare_labels(found, truth)
    assert compared is not None
    assert re.search(r"x, y, z have another origin, at \[-0\.9, -?0\.0, -1\.8\] m", compared.seen)
