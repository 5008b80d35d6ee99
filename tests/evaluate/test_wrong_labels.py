"""The probability that a label is wrong, on boxes with known errors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from boxcov import BoxcovError, Detections
from boxcov.data.poses import BOX_FIELDS
from boxcov.evaluate.ground_truth import GroundTruth
from boxcov.evaluate.label_pairs import pair_labels
from boxcov.evaluate.wrong_labels import disagreement, log_density
from helpers.export_boxes import in_image, with_error_model
from helpers.label_boxes import CLASSES, boxes_at, labels_of

stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
NONE = GroundTruth(np.zeros((0, 9)), np.zeros(0, int), np.zeros(0, int), 1)


def by_label(found: Detections, truth: GroundTruth) -> dict[int, tuple[str, float]]:
    rows = disagreement(found, truth)
    return {int(i): (str(k), v) for i, k, v in zip(rows.label, rows.kind, rows.value)}


def probability(ratios: float) -> float:
    """Of a wrong label, given the sum of the likelihood ratios."""
    return 0.01 * ratios / (1 + 0.01 * ratios)


def ratio(wide: float, density: float, no_object: float = 0.01) -> float:
    """Of a pair that is one by chance, or whose errors have a density if the label is right."""
    chance = 0.02 * no_object / (0.02 * no_object + 1 - no_object)
    return wide / ((1 - chance) * density + chance * wide)


def test_labels_that_agree_are_right() -> None:
    found = boxes_at([0.0, 10.0])
    rows = disagreement(found, labels_of(found))
    assert rows.label.tolist() == [0, 1]
    assert rows.box.tolist() == [0, 1]
    assert bool((rows.value < 0.001).all())


def test_probability_of_a_shifted_label_by_hand() -> None:
    found = boxes_at([0.0])
    truth = labels_of(found)
    truth.boxes[0, 0] -= 0.8  # eight scales
    t0, t8 = stats.t.pdf([0, 8], 5) / 0.1
    sides = np.prod([stats.norm.pdf(0, 0, 0.5) / side for side in (2.0, 4.0, 1.5)])
    place = ratio(1 / 16, t0 * t8)
    height, heading = 0.1 * ratio(1 / 4, t0), 0.1 * ratio(1 / np.pi, t0)
    expected = probability(place + height + heading + ratio(float(sides), t0**3))
    assert by_label(found, truth)[0] == ("place", pytest.approx(expected, rel=1e-5))
    truth.boxes[0, 0] += 1.6  # the sign does not count
    assert by_label(found, truth)[0][1] == pytest.approx(expected, rel=1e-5)


def test_error_counts_in_scales_not_in_metres() -> None:
    found = boxes_at([0.0, 10.0])
    found.scale[1] = 1.0  # type: ignore[index]
    truth = labels_of(found)
    truth.boxes[:, 0] += 1.0
    rows = by_label(found, truth)
    assert rows[0][1] > 10 * rows[1][1]


def test_turned_heading_and_velocity_are_no_error() -> None:
    found = boxes_at([0.0])
    truth = labels_of(found)
    right = by_label(found, truth)[0][1]
    truth.boxes[0, 6:] += [np.pi, 5.0, 5.0]
    assert by_label(found, truth)[0][1] == pytest.approx(right, rel=1e-3)
    truth.boxes[0, 6] += np.pi / 2
    kind, value = by_label(found, truth)[0]
    assert kind == "heading"
    assert value > 0.5


def test_dropped_label_is_a_box_without_one() -> None:
    found = boxes_at([0.0, 10.0])
    found.no_object[1] = 0.5  # type: ignore[index]
    rows = disagreement(found, NONE)
    assert rows.kind.tolist() == ["no label", "no label"]
    np.testing.assert_allclose(rows.value, [probability(99), probability(1)], rtol=1e-5)


def test_other_class_by_hand() -> None:
    found = boxes_at([0.0])
    truth = labels_of(found)
    truth.labels[0] = 1
    missed = (1 + 1) / (1 + 2)  # the only bus has no box
    # two other classes; no other label, so each size is as usual as any
    expected = probability(99 / 2 / missed + 0.1 / missed + 1)
    rows = disagreement(found, truth)
    assert (rows.kind.tolist(), rows.box.tolist(), rows.label.tolist()) == (["class"], [0], [0])
    assert rows.value[0] == pytest.approx(expected, rel=1e-5)


def test_weak_box_of_its_class_does_not_save_a_label() -> None:
    found = boxes_at([0.0, 0.0], labels=torch.tensor([0, 1]))
    found.no_object[1] = 0.9  # type: ignore[index]
    truth = labels_of(found[:1])
    assert by_label(found, truth)[0][1] < 0.01  # a car and a bad bus box: the label is right
    truth.labels[0] = 1
    rows = disagreement(found, truth)
    assert (rows.kind.tolist(), rows.box.tolist()) == (["class"], [0])
    assert rows.value[0] == pytest.approx(probability(99 * 9 / 2), abs=1e-3)


def test_label_without_a_box_by_the_habit_of_its_class() -> None:
    found = boxes_at([float(x) for x in range(0, 200, 5)])
    truth = labels_of(found)
    missed = 2 / 42
    x = np.log(truth.boxes[:, 3:6])
    unusual = log_density(x, truth.labels, truth.labels - 1) - log_density(
        x, truth.labels, truth.labels
    )
    rows = by_label(found[torch.arange(40) != 7], truth)
    expected = probability(0.1 / missed + np.exp(unusual[7]))
    assert rows[7] == ("no box", pytest.approx(expected, rel=1e-5))


def test_size_that_no_other_of_its_class_has() -> None:
    found = boxes_at([float(x) for x in range(0, 200, 5)])
    truth = labels_of(found)
    truth.boxes[7, 3:6] *= 1.6
    some = found[torch.arange(40) != 7]
    for boxes in (found, some):  # also if the detector does not see it
        rows = by_label(boxes, truth)
        assert rows[7][0] == "size"
        assert rows[7][1] == max(value for _, value in rows.values())


def test_near_box_is_taken_rather_than_a_surer_one() -> None:
    found = boxes_at([1.5, 0.1])
    found.no_object[:] = torch.tensor([0.01, 0.2])  # type: ignore[index]
    pairs = pair_labels(found, labels_of(boxes_at([0.0])))
    assert pairs.own.tolist() == [1]
    found.no_object[1] = 0.9  # type: ignore[index]
    assert pair_labels(found, labels_of(boxes_at([0.0]))).own.tolist() == [0]


def test_boxes_at_one_place_are_one_finding() -> None:
    found = boxes_at([0.0, 0.5, 10.0, 10.5], labels=torch.tensor([0, 1, 1, 2]))
    found.no_object[:] = torch.tensor([0.1, 0.2, 0.2, 0.1])  # type: ignore[index]
    truth = labels_of(found[:1])
    pairs = pair_labels(found, truth)
    assert pairs.own.tolist() == [0]
    assert pairs.other.tolist() == [1]
    assert pairs.alone.tolist() == [3]  # the better one of two
    rows = disagreement(found, truth)
    assert (rows.kind.tolist()[1:], rows.box.tolist()[1:]) == (["no label"], [3])


def test_boxes_of_other_frames_do_not_count() -> None:
    found = boxes_at([0.0, 0.0], frame=torch.tensor([0, 1]))
    truth = labels_of(found[:1])
    rows = disagreement(found, replace(truth, frames=3))
    assert rows.frame.tolist() == [0, 1]
    assert rows.kind.tolist()[1] == "no label"
    with pytest.raises(BoxcovError, match="the last frame of the detections is 1"):
        disagreement(found, truth)


@pytest.mark.parametrize(("boxes", "labels"), [(0, 0), (0, 3), (3, 0), (1, 1)])
def test_frames_without_boxes_or_labels(boxes: int, labels: int) -> None:
    found, truth = boxes_at([9.0 * i for i in range(boxes)]), boxes_at([9.0 * i for i in range(3)])
    rows = disagreement(found, labels_of(truth[:labels]))
    assert len(rows.value) == max(boxes, labels)
    assert bool(((rows.value >= 0) & (rows.value <= 1)).all())


def test_wrong_labels_of_images() -> None:
    found = with_error_model(in_image(3))
    found.boxes[:] = torch.tensor([[0.0, 0, 40, 40], [100, 0, 140, 40], [200, 0, 240, 40]])
    found.no_object[:] = 0.01  # type: ignore[index]
    found.scale[:] = 1.0  # type: ignore[index]
    truth = labels_of(found)
    truth.boxes[0, 2] += 12  # one side is off by twelve scales
    truth.labels[1] = 1 - truth.labels[1]
    rows = by_label(found, truth)
    assert [rows[i][0] for i in range(2)] == ["place", "class"]
    assert min(rows[0][1], rows[1][1]) > 10 * rows[2][1]


def test_objects_of_an_image_may_overlap() -> None:
    """A dog in front of a cat, IoU 0.33: its label is missing, that of the cat is right."""
    found = with_error_model(in_image(2))
    found.boxes[:] = torch.tensor([[0.0, 0, 40, 40], [20, 0, 60, 40]])
    pairs = pair_labels(found, labels_of(found[:1]))
    assert (pairs.own.tolist(), pairs.other.tolist(), pairs.alone.tolist()) == ([0], [-1], [1])
    found.boxes[1, 0::2] -= 15  # IoU 0.78
    pairs = pair_labels(found, labels_of(found[:1]))
    assert (pairs.own.tolist(), pairs.other.tolist(), pairs.alone.tolist()) == ([0], [1], [])


def test_disagreement_needs_an_error_model() -> None:
    found = boxes_at([0.0])
    bare = Detections(
        found.boxes, found.scores, found.labels, found.frame, BOX_FIELDS, CLASSES, found.covariance
    )
    with pytest.raises(BoxcovError, match="disagreement needs an error model"):
        disagreement(bare, labels_of(found))


def test_density_of_sides_by_hand() -> None:
    x, labels = np.log([[2.0], [2.0], [4.0]]), np.array([0, 0, 1])
    off = x - x.mean()
    variance = (off**2).mean() + 0.1**2
    broad = stats.norm.pdf(off[:, 0], 0, np.sqrt(variance))
    np.testing.assert_allclose(np.exp(log_density(x, labels, labels - 9)), broad)
    own = np.exp(log_density(x, labels, labels))
    peak = stats.norm.pdf(0, 0, 0.04)  # the smallest bandwidth fits equal sides best
    np.testing.assert_allclose(own, [(peak + broad[0]) / 2] * 2 + [broad[2]])
    assert log_density(np.zeros((0, 3)), labels[:0], labels[:0]).shape == (0,)
