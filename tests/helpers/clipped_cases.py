"""Image boxes clipped at the border: a detector, and boxes with errors of a known distribution."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from boxcov.detections import Detections
from boxcov.detector import Selection
from boxcov.detectors.yolox import YOLOX
from boxcov.evaluate.records import Records

IMAGE = ("x1", "y1", "x2", "y2")
SIZE = 1000.0  # of the image; latent errors are much smaller
WIDTH, HEIGHT = 96.0, 64.0  # of the detector's images
INWARD = np.array([-1.0, -1.0, 1.0, 1.0])  # sign of the error if the object ends inside


def clipped_boxes(n: int, share: float = 0.2, dof: float = np.inf, seed: int = 0) -> Records:
    """Return paired boxes whose latent errors have the standard deviations ``sd`` or t scales.

    A latent error z is drawn for each side. A clipped side lies on the border, and the object
    cannot reach beyond: the error is z if the object ends inside, else 0. ``covariance`` is
    epistemic, so 0 in clipped sides; ``predictive`` is the truth.
    """
    rng = np.random.default_rng(seed)
    sd = np.exp(rng.uniform(1.5, 3.0, (n, 4)))
    z = sd * (rng.normal(size=(n, 4)) if np.isinf(dof) else rng.standard_t(dof, (n, 4)))
    clipped = rng.random((n, 4)) < share
    clipped[:, :2] &= ~clipped[:, 2:]  # one side of each axis
    low = rng.uniform(200, 400, (n, 2))
    boxes = np.concatenate([low, low + rng.uniform(100, 300, (n, 2))], 1)
    boxes = np.where(clipped, np.where(INWARD < 0, 0.0, SIZE), boxes)
    errors = np.where(clipped & (z * INWARD < 0), 0.0, z)
    truth = boxes - errors
    predictive = sd[:, :, None] ** 2 * np.eye(4)
    free = ~clipped
    return Records(
        fields=IMAGE,
        classes=("car",),
        boxes=boxes,
        uncertainty=np.ones(n),
        scores=rng.uniform(0.1, 1, n),
        labels=np.zeros(n, int),
        frame=np.arange(n) * 50 // n,
        truth=truth,
        iou=np.full(n, 0.8),
        l2=np.ones(n),
        covariance=predictive * free[:, :, None] * free[:, None, :],
        predictive=predictive,
    )


def as_detections(records: Records) -> Detections:
    """Return the boxes of the records with their epistemic covariance, in float32."""
    return Detections(
        boxes=torch.tensor(records.boxes).float(),
        scores=torch.tensor(records.scores).float(),
        labels=torch.tensor(records.labels),
        frame=torch.tensor(records.frame),
        fields=records.fields,
        classes=records.classes,
        covariance=torch.tensor(records.covariance).float(),
    )


class ClippedYOLOX(YOLOX):
    """YOLOX whose boxes end at the image border, and whose head is not run by instance."""

    def decode(self, raw: dict, selection: Selection) -> Tensor:
        x1, y1, x2, y2 = super().decode(raw, selection).unbind(1)
        x, y = (
            torch.stack(side).clamp(0, most)
            for side, most in (((x1, x2), WIDTH), ((y1, y2), HEIGHT))
        )
        return torch.stack([x[0], y[0], x[1], y[1]], 1)

    def instances(self, raw: dict, selection: Selection, with_logit: bool = False) -> None:
        return None
