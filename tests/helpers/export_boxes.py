"""Detections for the tests of the exports."""

from __future__ import annotations

import torch

from boxcov import Detections
from boxcov.data.poses import BOX_FIELDS
from helpers.error_models import make_error_model

IMAGE = ("x1", "y1", "x2", "y2")


def covariances(m: int, D: int, seed: int = 0) -> torch.Tensor:
    A = torch.randn(m, D, D + 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return 0.01 * A @ A.transpose(1, 2)


def in_space(
    m: int = 5, fields: tuple[str, ...] = BOX_FIELDS, frames: int = 1, calibrated: bool = True
) -> Detections:
    generator = torch.Generator().manual_seed(1)
    boxes = torch.randn(m, len(fields), generator=generator, dtype=torch.float64) * 3
    C = covariances(m, len(fields))
    return Detections(
        boxes=torch.cat([boxes[:, :3], boxes[:, 3:6].abs() + 0.5, boxes[:, 6:]], 1),
        scores=torch.rand(m, generator=generator),
        labels=torch.arange(m) % 3,
        frame=torch.arange(m) % frames,
        fields=fields,
        classes=("car", "pedestrian", "traffic_cone"),
        covariance=C,
        predictive=2 * C if calibrated else None,
        meta={"method": "exact", "frames": frames},
    )


def with_error_model(found: Detections) -> Detections:
    """Return the detections with the results of a small error model."""
    return make_error_model(found.fields, found.classes).apply(found)


def in_image(m: int = 3, calibrated: bool = True) -> Detections:
    generator = torch.Generator().manual_seed(2)
    corner = 100 * torch.rand(m, 2, generator=generator, dtype=torch.float64)
    C = 30 * covariances(m, 4, seed=3)
    return Detections(
        boxes=torch.cat(
            [corner, corner + 5 + 50 * torch.rand(m, 2, generator=generator, dtype=torch.float64)],
            1,
        ),
        scores=torch.rand(m, generator=generator),
        labels=torch.arange(m) % 2,
        frame=torch.zeros(m, dtype=torch.long),
        fields=IMAGE,
        classes=("cat", "dog"),
        covariance=C,
        predictive=2 * C if calibrated else None,
    )
