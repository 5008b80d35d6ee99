"""Random studies for the tests of the report."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from boxcov.evaluate.records import Records
from boxcov.report.study import Method, Scene, Study

FIELDS = ("x", "y", "z", "w", "l", "h", "yaw", "vx", "vy")
CLASSES = ("car", "pedestrian", "bus")


def random_records(
    seed: int,
    frames: int = 4,
    each: int = 12,
    fields: tuple[str, ...] = FIELDS,
    classes: tuple[str, ...] = CLASSES,
    covariance: bool = True,
) -> Records:
    """Records over 60 m, three in four paired, errors correlated with covariances, ties in u."""
    rng = np.random.default_rng(seed)
    n, D = frames * each, len(fields)
    boxes = np.concatenate([rng.uniform(-30, 30, (n, 2)), rng.uniform(0.8, 4, (n, D - 2))], 1)
    spread = rng.gamma(1.5, 0.2, n)
    roots = rng.normal(size=(n, D, D + 2)) * spread[:, None, None] / 3
    matrices = roots @ roots.transpose(0, 2, 1)
    truth = boxes + spread[:, None] * rng.normal(size=(n, D))
    unpaired = rng.random(n) < 0.25
    truth[unpaired] = np.nan
    l2 = np.linalg.norm((boxes - truth)[:, :2], axis=1)
    u = np.trace(matrices, axis1=1, axis2=2)
    u[: n // 8] = u[n // 8 : 2 * (n // 8)]
    return Records(
        fields=fields,
        classes=classes,
        boxes=boxes,
        uncertainty=u,
        scores=rng.uniform(0.1, 1, n),
        labels=rng.integers(0, len(classes), n),
        frame=np.repeat(np.arange(frames), each),
        truth=truth,
        iou=np.where(unpaired, 0, np.exp(-l2)),
        l2=l2,
        covariance=matrices if covariance else None,
    )


def calibrated_records(
    seed: int, frames: int = 4, each: int = 12, fields: tuple[str, ...] = FIELDS
) -> Records:
    """Random records with risk, Student-t scales and regions; 90 % half widths are 1.6 scales."""
    records = random_records(seed, frames, each, fields)
    rng = np.random.default_rng(seed + 100)
    n, D = records.boxes.shape
    scale = rng.gamma(2.0, 0.2, (n, D))
    matrices = (scale**2)[:, :, None] * np.eye(D)
    regions = scale[:, None] * np.array([0.7, 1.6, 2.0])[:, None]
    return replace(
        records,
        risk=np.clip(rng.beta(1, 1, n) * 0.5 + 0.5 * records.bad, 0, 1),
        scale=scale,
        dof=(5.0,) * D,
        predictive=matrices * 5 / 3,
        regions=regions,
    )


def random_study(
    seed: int = 0, frames: int = 4, each: int = 12, points: int = 2000, title: str = "A study"
) -> Study:
    """A calibrated method, one that is not, and a baseline; a scene per frame but the last."""
    rng = np.random.default_rng(seed)
    records = calibrated_records(seed, frames, each)
    other = random_records(seed + 1, frames, each)
    baseline = random_records(seed, frames, each, covariance=False).with_uncertainty(
        1 - records.scores
    )
    scenes = {
        frame: Scene(
            f"street {frame}",
            np.concatenate([rng.normal(0, 15, (points, 2)), np.zeros((points, 3))], 1),
            np.nan_to_num(records.truth[(records.frame == frame) & records.paired]),
            records.labels[(records.frame == frame) & records.paired],
        )
        for frame in range(frames - 1)
    }
    runtime = [
        {
            "method": name,
            "device": "cpu",
            "boxes": each,
            "samples": k,
            "ms": ms,
            "ratio": ms / 10,
            "peak_mib": 100.0,
        }
        for name, k, ms in (("plain", None, 10.0), ("exact", None, 14.0), ("sampled", 10, 60.0))
    ]
    methods = [
        Method("exact", records, "no sampling"),
        Method("sampled", other),
        Method("1 - score", baseline, "baseline"),
    ]
    return Study(title, {"detector": "random", "seed": seed}, methods, scenes, runtime)
