"""Does u rise when a detector trained on one LiDAR sees another?

Results: docs/results/reproduction.md.

    python studies/real_shift.py --nuscenes ROOT --kitti ROOT [--device cuda] [--steps 500]

The small CenterPoint is fine-tuned on each of two drives, one of nuScenes and one of KITTI. Each
detector gets a posterior of its own training frames. Then u of head, neck and backbone (each alone,
the paper's form, k = 10) and 1 - score are computed on held-out frames of its own drive and on the
other drive. The table shows the AUROC of recognising the other drive, per box and per frame. One
street per data set is an illustration only.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from shift import auroc_of_shift

import boxcov
from boxcov.data.augment import Augmentation
from boxcov.detectors import centerpoint
from boxcov.detectors.training import Recipe, train
from boxcov.pipeline.frames import load_frames, preload_frames
from boxcov.pipeline.options import DataOptions
from boxcov.pipeline.reproduce.plan import DEPTHS, Run
from boxcov.pipeline.reproduce.workspace import restrict_posterior

Row = tuple[str, str, float, float, float]


def fine_tune(frames: Sequence[Any], device: str, steps: int) -> centerpoint.CenterPoint:
    """Return the small CenterPoint, fine-tuned on ``frames``."""
    detector = centerpoint.load("small").to(device)
    train(detector, frames, Recipe(steps=steps, batch=4, rate=5e-4, augmentation=Augmentation()))
    return detector.eval()


def measure(
    detector: centerpoint.CenterPoint,
    training: Sequence[Any],
    own: Sequence[Any],
    other: Sequence[Any],
    name: str,
) -> list[Row]:
    """Return one row per u: its median ratio of other to own drive, and the two AUROCs."""
    whole = boxcov.fit(detector, training, depth="backbone", prior_precision=1.0)
    rows = []
    for short, depth in zip("HNB", DEPTHS.values()):
        model = boxcov.MCGLM(
            detector, restrict_posterior(whole, Run("mcglm", "paper", depth, alone=True), detector)
        )
        values = [
            [model(x).uncertainty.log().cpu().numpy() for x, _ in part] for part in (own, other)
        ]
        rows.append(_row(name, short, values, logarithm=True))
    scores = [
        [1 - detector.detect(x).scores.cpu().numpy() for x, _ in part] for part in (own, other)
    ]
    return [*rows, _row(name, "1 - score", scores, logarithm=False)]


def _row(name: str, u: str, parts: list[list[np.ndarray]], logarithm: bool) -> Row:
    boxes = [np.concatenate(part) for part in parts]
    frames = [np.array([one.mean() for one in part if len(one)]) for part in parts]
    own, other = (float(np.median(part)) for part in boxes)
    ratio = float(np.exp(other - own)) if logarithm else other / own
    return name, u, ratio, auroc_of_shift(*boxes), auroc_of_shift(*frames)


def compare(nuscenes: Sequence[Any], kitti: Sequence[Any], device: str, steps: int) -> list[Row]:
    """Return the rows of both detectors.

    Training and held-out frames: 28 and 12 key frames of nuScenes, 50 and 20 frames of KITTI.
    """
    drives = {"nuScenes": (nuscenes[:28], nuscenes[28:40]), "KITTI": (kitti[:50], kitti[57:77])}
    rows = []
    for (name, (training, own)), (_, (_, other)) in zip(drives.items(), reversed(drives.items())):
        rows += measure(fine_tune(training, device, steps), training, own, other, name)
    return rows


def show(rows: list[Row]) -> None:
    titles = f"{'AUROC, boxes':>14}{'AUROC, frames':>15}"
    print(f"{'detector of':12}{'u':12}{'times own drive':>16}{titles}")
    for name, u, ratio, box, frame in rows:
        print(f"{name:12}{u:12}{ratio:16.2f}{box:14.2f}{frame:15.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nuscenes", required=True, help="root of nuScenes")
    parser.add_argument("--kitti", required=True, help="root of KITTI")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=500, help="training steps")
    args = parser.parse_args()
    found = {
        "nuscenes": preload_frames(
            load_frames(DataOptions(f"nuscenes:{args.nuscenes}", "train", sweeps=3)), args.device
        ),
        "kitti": preload_frames(
            load_frames(DataOptions(f"kitti:{args.kitti}", "training")), args.device
        ),
    }
    show(compare(found["nuscenes"], found["kitti"], args.device, args.steps))
