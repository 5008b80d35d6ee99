"""Boxes of the shipped CenterPoint on simulated frames and drives, for the studies of tracking.

python studies/tracking_boxes.py --out OUT            all of them; the studies collect their own

One file per set or drive. Those that exist are kept, and so are the frames of one that a stopped
run was at. The sets are fixed here, before any result is looked at: ``fit`` (single frames) is for
error models, ``tune`` for the settings of every method, ``test`` (five seeds) and ``margin``
(single frames) are read once, for the tables. ``fast`` has the first 10 s of drives at 10 Hz: one
of the drives ``tune``, and eight others for the tables of the default settings.
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
from frame_results import each_frame, forget
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
FAST_TUNE = f"fast-{TUNE_SEED}-0"
DEFAULT_SEED, DEFAULT_DRIVES = 6401, 8
DEFAULT = [f"fast-{DEFAULT_SEED}-{number}" for number in range(DEFAULT_DRIVES)]
QUICK_FRAMES = 6  # of each set, for runs that show that a study runs
SETS = [f"fit-{FIT_SEED}-0", *TUNE, *TEST, PASSES, FAST_TUNE, *DEFAULT]


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
    parser.add_argument("--sets", nargs="*", default=SETS, help="names of the sets")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    collect(args.out, args.sets)


def collect(out: Path, names: Sequence[str], most: int | None = None) -> None:
    """Write the boxes of sets that are not there yet, at most some frames of each."""
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

    def describe(number: int) -> tuple[list[str], dict[str, Tensor]]:
        inputs, (target,) = frames[number]
        found = model.with_signals(inputs)
        names = ("boxes", "scores", "labels", "covariance", "signals")
        row = {name: getattr(found, name) for name in names}
        row["frame"] = torch.full_like(found.labels, number)
        row |= {f"target {name}": value for name, value in target.items()}
        row["target frame"] = torch.full_like(target["labels"], number)
        if hasattr(frames, "pose"):
            pose = frames.pose(number)
            row |= {"R": pose.R[None], "t": pose.t[None]}
            row["time"] = torch.tensor([1e-6 * frames.timestamp(number)])
        return list(found.meta["signals"]), row

    signals, rows = zip(*each_frame(path, len(frames), describe))
    arrays = {name: torch.cat([row[name] for row in rows]).numpy() for name in rows[0]}
    part = path.with_suffix(".part.npz")  # an interrupted run leaves no half file
    np.savez(part, **{"signal names": signals[-1]}, **arrays)
    part.rename(path)
    forget(path)


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
