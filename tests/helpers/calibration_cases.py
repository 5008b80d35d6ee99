"""Records whose errors have a known variance, and a calibration made by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from boxcov import Calibration
from boxcov.evaluate.records import Records

FIELDS = ("x", "y", "yaw")
POWERS = ((0.8, 0.0, 0.0), (0.0, 0.0, 0.0), (0.5, 0.0, 0.0))


def make_records(boxes: np.ndarray, truth: np.ndarray, fields: Sequence[str], **arrays) -> Records:
    """Paired boxes of one class, ten per frame, unless ``arrays`` say otherwise."""
    n, D = boxes.shape
    defaults = {
        "classes": ("car",),
        "uncertainty": np.ones(n),
        "scores": np.full(n, 0.5),
        "labels": np.zeros(n, int),
        "frame": np.arange(n) // 10,
        "iou": np.ones(n),
        "l2": np.zeros(n),
        "covariance": np.tile(np.eye(D), (n, 1, 1)),
    }
    return Records(fields=tuple(fields), boxes=boxes, truth=truth, **{**defaults, **arrays})


def draw_records(
    n: int = 900, seed: int = 0, powers: Sequence[Sequence[float]] = POWERS, base: float = -2.0
) -> Records:
    """Errors with log variance ``base + powers @ log variances - 0.3 score logit``."""
    rng = np.random.default_rng(seed)
    variances = rng.lognormal(0, 1.0, (n, 3))
    boxes = np.concatenate([rng.normal(0, 20, (n, 2)), rng.uniform(-3, 3, (n, 1))], 1)
    scores = rng.uniform(0.1, 0.95, n)
    logit = np.log(scores / (1 - scores))[:, None]
    log_r = base + np.log(variances) @ np.array(powers).T - 0.3 * logit
    return make_records(
        boxes,
        boxes - rng.normal(size=(n, 3)) * np.exp(0.5 * log_r),
        FIELDS,
        classes=("car", "bus"),
        uncertainty=variances.sum(1),
        scores=scores,
        labels=rng.integers(0, 2, n),
        frame=np.arange(n) // 15,
        covariance=variances[:, :, None] * np.eye(3),
    )


def make_calibration(
    fields: Sequence[str], classes: Sequence[str], estimator: str = "exact"
) -> Calibration:
    """A calibration of kind "score" that depends on field, class and score."""
    D = len(fields)
    return Calibration(
        "score",
        tuple(fields),
        tuple(classes),
        estimator,
        log_residual=tuple(
            tuple(-1.0 - 0.1 * f - c for f in range(D)) for c in range(len(classes))
        ),
        features=("score",),
        slopes=((-0.5,),) * D,
        centre=(0.2,),
        spread=(1.5,),
        limits=((-3.0, 3.0),),
    )
