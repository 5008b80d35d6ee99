"""Boxes of the shipped CenterPoint on simulated frames and drives, for the studies of tracking.

python studies/tracking_boxes.py --out OUT            all of them; the studies collect their own

One file per set or drive; those that exist are kept, so that a stopped run resumes. The sets are
fixed here, before any result is looked at: ``fit`` (single frames) is for error models, ``tune``
for the settings of every method, ``test`` (five seeds) and ``margin`` (single frames) are read
once, for the tables. ``fast`` is the first half of three drives ``tune`` at 10 Hz.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from boxcov import Detections, ExactGLM, Posterior
from boxcov.data import simulated
from boxcov.data.poses import Pose
from boxcov.detectors import centerpoint

SECONDS, RATE = 20.0, 2
FIT_SEED, FIT_FRAMES = 6101, 200
TUNE_SEED, TUNE_DRIVES = 6201, 6
TEST_SEEDS, TEST_DRIVES = (6301, 6302, 6303, 6304, 6305), 3
TUNE = [f"tune-{TUNE_SEED}-{number}" for number in range(TUNE_DRIVES)]
TEST = [f"test-{seed}-{number}" for number in range(TEST_DRIVES) for seed in TEST_SEEDS]
PASSES = "margin-6102-0"  # single frames for studies/margin.py
FAST_RATE, FAST_FRAMES = 10, 100
FAST = [f"fast-{TUNE_SEED}-{number}" for number in range(3)]
SETS = [f"fit-{FIT_SEED}-0", *TUNE, *TEST, PASSES, *FAST]


@dataclass(frozen=True)
class Drive:
    """The boxes of one drive, and its objects."""

    name: str
    found: list[Detections]  # of each frame, with signals
    targets: list[dict[str, Tensor]]
    poses: list[Pose]
    times: list[float]  # seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of all results")
    parser.add_argument("--most", type=int, default=10**9, help="frames of each set")
    parser.add_argument("--sets", nargs="*", default=SETS, help="names of the sets")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    collect(args.out, args.sets, args.most)


def collect(out: Path, names: Sequence[str], most: int = 10**9) -> None:
    """Write the boxes of sets that are not there yet."""
    out.mkdir(parents=True, exist_ok=True)
    missing = [name for name in names if not (out / f"{name}.npz").exists()]
    if not missing:
        return
    detector = centerpoint.load("small")
    model = ExactGLM(detector, Posterior.load("small", detector))
    for name in missing:
        save(out / f"{name}.npz", model, frames_of(name)[:most])
        print(name, flush=True)


def frames_of(name: str) -> Any:
    """Return the frames of a set: single ones, or a drive."""
    kind, seed, number = name.split("-")
    if kind in ("fit", "margin"):
        return simulated.frames("clear", seed=int(seed), count=FIT_FRAMES)
    rate, most = (FAST_RATE, FAST_FRAMES) if kind == "fast" else (RATE, None)
    drives = simulated.sequences("clear", int(seed), int(number) + 1, SECONDS, rate)
    return drives[int(number)][:most]


def save(path: Path, model: ExactGLM, frames: Sequence[Any]) -> None:
    """Write the boxes of all frames, their objects, poses and times."""
    rows: dict[str, list[Any]] = {}
    for number in range(len(frames)):
        inputs, (target,) = frames[number]
        found = model.with_signals(inputs)
        for name in ("boxes", "scores", "labels", "covariance", "signals"):
            rows.setdefault(name, []).append(getattr(found, name))
        rows.setdefault("frame", []).append(torch.full_like(found.labels, number))
        for name, value in target.items():
            rows.setdefault(f"target {name}", []).append(value)
        rows.setdefault("target frame", []).append(torch.full_like(target["labels"], number))
        if hasattr(frames, "pose"):
            pose = frames.pose(number)
            rows.setdefault("R", []).append(pose.R[None])
            rows.setdefault("t", []).append(pose.t[None])
            rows.setdefault("time", []).append(torch.tensor([1e-6 * frames.timestamp(number)]))
    arrays = {name: torch.cat(parts).numpy() for name, parts in rows.items()}
    part = path.with_suffix(".part.npz")  # an interrupted run leaves no half file
    np.savez(part, **{"signal names": list(found.meta["signals"])}, **arrays)
    part.rename(path)


def load(root: Path, name: str) -> Drive:
    """Return the boxes of a set."""
    with np.load(root / f"{name}.npz") as file:
        data = {key: torch.from_numpy(file[key]) for key in file.files if key != "signal names"}
        names = [str(signal) for signal in file["signal names"]]
    detector_fields = ("x", "y", "z", "w", "l", "h", "yaw", "vx", "vy")
    whole = Detections(
        *(data[key] for key in ("boxes", "scores", "labels", "frame")),
        detector_fields,
        simulated.CLASSES,
        data["covariance"],
        signals=data["signals"],
        meta={"method": "exact", "signals": names},
    )
    count = int(max(data["frame"].max(), data["target frame"].max())) + 1
    targets = []
    for number in range(count):
        rows = data["target frame"] == number
        keys = [key for key in data if key.startswith("target ") and key != "target frame"]
        targets.append({key.removeprefix("target "): data[key][rows] for key in keys})
    poses = [Pose(R, t) for R, t in zip(data.get("R", []), data.get("t", []))]
    found = [whole[whole.frame == number] for number in range(count)]
    return Drive(name, found, targets, poses, data.get("time", torch.zeros(0)).tolist())


if __name__ == "__main__":
    main()
