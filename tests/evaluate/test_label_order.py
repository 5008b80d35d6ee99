"""The order of frames and boxes on boxes with known uncertainty."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from boxcov import BoxcovError
from boxcov.evaluate.label_order import box_values, frame_values, relative_deviation
from helpers.label_boxes import boxes_at


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
    with pytest.raises(BoxcovError, match="by must be one of risk, epistemic, got 'epistemics'"):
        box_values(found, "epistemics")  # type: ignore[arg-type]


def test_values_of_frames() -> None:
    values, frame = np.array([1.0, 2.0, 6.0]), np.array([2, 2, 0])
    assert frame_values(values, frame, 4).tolist() == [6, 0, 3, 0]
    assert frame_values(values, frame, 4, "mean").tolist() == [6, 0, 1.5, 0]
    assert frame_values(values, frame, 4, "max").tolist() == [6, 0, 2, 0]
    assert frame_values(np.zeros(0), np.zeros(0, int), 2).tolist() == [0, 0]
    with pytest.raises(BoxcovError, match="aggregate must be one of sum, mean, max"):
        frame_values(values, frame, 4, "median")  # type: ignore[arg-type]
