"""Boxes with known errors, and labels that agree with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from boxcov import Detections
from boxcov.data.poses import BOX_FIELDS
from boxcov.evaluate.ground_truth import GroundTruth

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
