"""Does u rise when a detector of one real LiDAR looks at another? Fine-tunes the small CenterPoint on each of two drives, then swaps them.

    python studies/real_shift.py --nuscenes ROOT --kitti ROOT [--device cuda] [--steps 500]

For each detector: posterior of its own training frames, then u of head, neck and backbone (each alone, the paper's form, k = 10) and 1 - score on
held-out frames of its own drive and on the other drive. Prints AUROC of telling the other drive, by box and by frame. One street each: a look, not
a study.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import boxcov
from boxcov.data.augment import Augmentation
from boxcov.detectors import centerpoint
from boxcov.detectors.training import Recipe, train
from boxcov.evaluate.ranking import auroc
from boxcov.pipeline.frames import load_frames, preload_frames
from boxcov.pipeline.options import DataOptions
from boxcov.pipeline.reproduce.plan import DEPTHS, Run
from boxcov.pipeline.reproduce.workspace import restrict_posterior

Row = tuple[str, str, float, float, float]


def tuned(frames: Sequence[Any], device: str, steps: int) -> centerpoint.CenterPoint:
    """The small CenterPoint, fine-tuned on ``frames``."""
    detector = centerpoint.load("small").to(device)
    train(detector, frames, Recipe(steps=steps, batch=4, rate=5e-4, augmentation=Augmentation()))
    return detector.eval()


def measured(
    detector: centerpoint.CenterPoint,
    learned: Sequence[Any],
    own: Sequence[Any],
    other: Sequence[Any],
    name: str,
) -> list[Row]:
    """For each u: how many times larger it is on the other drive (median), and AUROC of telling it, by box and by frame."""
    whole = boxcov.fit(detector, learned, depth="backbone")
    rows = []
    for short, depth in zip("HNB", DEPTHS.values()):
        model = boxcov.MCGLM(
            detector, restrict_posterior(whole, Run("mcglm", "paper", depth, alone=True), detector)
        )
        rows.append(
            _row(
                name,
                short,
                [
                    [model(x).uncertainty.log().cpu().numpy() for x, _ in part]
                    for part in (own, other)
                ],
                True,
            )
        )
    scores = [
        [1 - detector.detect(x).scores.cpu().numpy() for x, _ in part] for part in (own, other)
    ]
    return [*rows, _row(name, "1 - score", scores, False)]


def _row(name: str, u: str, parts: list[list[np.ndarray]], logarithm: bool) -> Row:
    boxes = [np.concatenate(part) for part in parts]
    frames = [np.array([one.mean() for one in part if len(one)]) for part in parts]
    away = [
        np.concatenate([np.zeros(len(a), bool), np.ones(len(b), bool)]) for a, b in (boxes, frames)
    ]
    middle = [float(np.median(one)) for one in boxes]
    rise = float(np.exp(middle[1] - middle[0])) if logarithm else middle[1] / middle[0]
    return (
        name,
        u,
        rise,
        auroc(away[0], np.concatenate(boxes)),
        auroc(away[1], np.concatenate(frames)),
    )


def compare(nuscenes: Sequence[Any], kitti: Sequence[Any], device: str, steps: int) -> list[Row]:
    """Both ways: 28 + 12 key frames of nuScenes, 50 + 20 frames of KITTI, the last ones held out."""
    drives = {"nuScenes": (nuscenes[:28], nuscenes[28:40]), "KITTI": (kitti[:50], kitti[57:77])}
    rows = []
    for (name, (learned, own)), (_, (_, other)) in zip(drives.items(), reversed(drives.items())):
        rows += measured(tuned(learned, device, steps), learned, own, other, name)
    return rows


def show(rows: list[Row]) -> None:
    print(
        f"{'detector of':12}{'u':12}{'times own drive':>16}{'AUROC, boxes':>14}{'AUROC, frames':>15}"
    )
    for name, u, rise, box, frame in rows:
        print(f"{name:12}{u:12}{rise:16.2f}{box:14.2f}{frame:15.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nuscenes", required=True)
    parser.add_argument("--kitti", required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=500)
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
