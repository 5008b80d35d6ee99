"""The order of frames, boxes and labels on boxes with known errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from boxcov import BoxcovError, Detections
from boxcov.data.poses import BOX_FIELDS
from boxcov.evaluate import label_order, matching
from boxcov.evaluate.ground_truth import GroundTruth
from boxcov.evaluate.label_order import (
    box_values,
    disagreement,
    frame_values,
    relative_deviation,
)
from boxcov.evaluate.matching import pair_classes

pytest.importorskip("scipy", reason="scipy is not installed")
CLASSES = ("car", "bus", "truck")


def boxes_at(x: list[float], **changes: Any) -> Detections:
    """Cars at y = 0 that the error model knows to 0.1 in each field, P(no object) 1 %."""
    m, D = len(x), len(BOX_FIELDS)
    boxes = torch.tensor([0.0, 0.0, 1.0, 2.0, 4.0, 1.5, 0.0, 0.0, 0.0]).repeat(m, 1)
    boxes[:, 0] = torch.tensor(x)
    zero = torch.zeros(m, dtype=torch.long)
    about = {"thresholds": [0.4, 0.5], "threshold": 0.4, "levels": [0.95], "dof": [5.0] * D}
    found = Detections(
        boxes,
        torch.full((m,), 0.9),
        zero,
        zero,
        BOX_FIELDS,
        CLASSES,
        torch.eye(D).repeat(m, 1, 1),
        no_object=torch.full((m,), 0.01),
        iou_below=torch.full((m, 2), 0.1),
        scale=torch.full((m, D), 0.1),
        predictive=torch.eye(D).repeat(m, 1, 1),
        region_widths=torch.ones(m, 1, D),
        joint_widths=torch.ones(m, 1, D),
        meta={"error_model": about},
    )
    return replace(found, **changes)


def labels_of(found: Detections) -> GroundTruth:
    """Labels that agree with the boxes."""
    boxes, labels, frame = (found.numpy()[name].copy() for name in ("boxes", "labels", "frame"))
    return GroundTruth(boxes.astype(float), labels, frame, 1)


def by_label(found: Detections, truth: GroundTruth) -> dict[int, tuple[str, float]]:
    rows = disagreement(found, truth)
    return {int(i): (k, v) for i, k, v in zip(rows.label, rows.kind, rows.value.round(3))}


def test_labels_that_agree_have_no_value() -> None:
    found = boxes_at([0.0, 10.0])
    assert by_label(found, labels_of(found)) == {0: ("place", 0.0), 1: ("place", 0.0)}


def test_error_counts_in_scales_not_in_metres() -> None:
    from scipy.stats import t

    found = boxes_at([0.0, 10.0, 20.0])
    found.scale[1] = 1.0  # type: ignore[index]
    truth = labels_of(found)
    truth.boxes[:2, 0] += 0.5
    truth.boxes[2, 0] -= 0.5  # the sign does not count
    rows = by_label(found, truth)
    p = 1 - (1 - 2 * t.sf(5, 5)) ** 7  # the worst of seven fields, five scales off
    assert rows[0][1] == rows[2][1] == pytest.approx(-0.99 * np.log10(p), abs=1e-3)
    assert rows[0][1] > 10 * rows[1][1]


def test_turned_heading_and_velocity_are_no_error_of_place() -> None:
    found = boxes_at([0.0])
    truth = labels_of(found)
    truth.boxes[0, 6:] += [np.pi, 5.0, 5.0]
    assert by_label(found, truth)[0] == ("place", pytest.approx(0, abs=1e-3))


def test_dropped_label_is_a_box_without_one() -> None:
    found = boxes_at([0.0, 10.0])
    found.no_object[1] = 0.5  # type: ignore[index]
    none = GroundTruth(np.zeros((0, 9)), np.zeros(0, int), np.zeros(0, int), 1)
    rows = disagreement(found, none)
    assert rows.kind.tolist() == ["no label", "no label"]
    np.testing.assert_allclose(rows.value, [2.0, np.log10(2)], atol=1e-6)


def test_other_class_counts_both_surprises() -> None:
    found = boxes_at([0.0, 10.0])
    truth = labels_of(found)
    truth.labels[0] = 1
    rows = by_label(found, truth)
    missed = (1 + 1) / (1 + 2)  # the only bus has no box
    assert rows[0] == ("class", pytest.approx(2 - np.log10(missed), abs=1e-3))
    assert rows[1] == ("place", 0.0)


def test_label_without_a_box_by_the_habit_of_its_class() -> None:
    found = boxes_at([float(x) for x in range(0, 120, 3)])
    truth = labels_of(found)
    rows = by_label(found[torch.arange(40) != 7], truth)
    assert rows[7] == ("no box", pytest.approx(-np.log10(2 / 42), abs=1e-3))


def test_boxes_and_labels_are_paired_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def count(fields: Any, predictions: Any, *rest: Any) -> Any:
        calls.append(len(predictions[0]))
        return pair_classes(fields, predictions, *rest)

    monkeypatch.setattr(matching, "pair_classes", count)
    monkeypatch.setattr(label_order, "pair_classes", count)
    found = boxes_at([0.0, 10.0, 20.0])
    truth = labels_of(found)
    truth.labels[0] = 1
    assert by_label(found, truth)[0][0] == "class"
    assert calls == [3, 1]  # all boxes, then those without a label of their class


@pytest.mark.parametrize(("boxes", "labels"), [(0, 0), (0, 3), (3, 0), (1, 1)])
def test_frames_without_boxes_or_labels(boxes: int, labels: int) -> None:
    found, truth = boxes_at([9.0 * i for i in range(boxes)]), boxes_at([9.0 * i for i in range(3)])
    rows = disagreement(found, labels_of(truth[:labels]))
    assert len(rows.value) == max(boxes, labels)
    assert np.isfinite(rows.value).all()


def test_disagreement_needs_an_error_model() -> None:
    found = boxes_at([0.0])
    bare = Detections(
        found.boxes, found.scores, found.labels, found.frame, BOX_FIELDS, CLASSES, found.covariance
    )
    with pytest.raises(BoxcovError, match="disagreement needs an error model"):
        disagreement(bare, labels_of(found))


def test_deviation_has_no_unit() -> None:
    C = np.array([1.0, 4.0, 9.0])[:, None, None] * np.eye(2)
    scaled = np.diag([1.0, 1000.0]) @ C @ np.diag([1.0, 1000.0])
    np.testing.assert_allclose(relative_deviation(C), [0.5, 1.0, 1.5])
    np.testing.assert_allclose(relative_deviation(scaled), [0.5, 1.0, 1.5])


def test_deviation_of_clipped_sides_and_of_no_boxes() -> None:
    C = np.stack([np.diag([4.0, 0.0]), np.diag([4.0, 1.0]), np.diag([4.0, 1.0])])
    np.testing.assert_allclose(relative_deviation(C), [1.0, 1.0, 1.0])
    assert relative_deviation(np.zeros((0, 9, 9))).shape == (0,)
    np.testing.assert_allclose(relative_deviation(np.zeros((2, 3, 3))), [1.0, 1.0])


def test_boxes_that_the_detector_doubts_come_last() -> None:
    found = boxes_at([0.0, 10.0, 20.0])
    found.scores[:] = torch.tensor([0.9, 0.1, 0.9])
    found.no_object[:] = torch.tensor([0.5, 1.0, 0.0])  # type: ignore[index]
    found.iou_below[:] = 0.0  # type: ignore[index]
    found.covariance[0] *= 4  # type: ignore[index]
    np.testing.assert_allclose(box_values(found, "risk"), [0.45, 0.1, 0.0], atol=1e-6)
    np.testing.assert_allclose(box_values(found, "epistemic"), [1.8, 0.1, 0.9], atol=1e-6)


def test_values_of_frames() -> None:
    values, frame = np.array([1.0, 2.0, 6.0]), np.array([2, 2, 0])
    assert frame_values(values, frame, 4).tolist() == [6, 0, 3, 0]
    assert frame_values(values, frame, 4, "mean").tolist() == [6, 0, 1.5, 0]
    assert frame_values(values, frame, 4, "max").tolist() == [6, 0, 2, 0]
    assert frame_values(np.zeros(0), np.zeros(0, int), 2).tolist() == [0, 0]
    with pytest.raises(BoxcovError, match="aggregate must be sum, mean, max"):
        frame_values(values, frame, 4, "median")  # type: ignore[arg-type]
