"""Track the boxes of a drive with Stone Soup, and draw the tracks with their ellipses.

    python examples/tracking.py --seconds 20 --out tracks.png
    python examples/tracking.py --nuscenes ROOT --out tracks.png

Needs ``pip install stonesoup matplotlib``. Each box has its own noise R from the error model. The
picture shows the last frame in the world: objects in green, tracks in blue with their way so far,
the 3 sigma ellipse of their position, and an arrow as long as the way of one second. The black
triangle is the ego car.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch

import boxcov
from boxcov.data import nuscenes, simulated
from boxcov.data.poses import Pose
from boxcov.detectors import centerpoint
from boxcov.export.tracker import BoxTrack, Tracker

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import Ellipse

LEAST = 0.1  # boxes that are less likely an object are not tracked
REPORT = 0.4  # tracks that are less likely an object are not drawn


def track(drive: Any) -> list[BoxTrack]:
    """Return the tracks after the last frame of a drive."""
    detector = centerpoint.load("small")
    model = boxcov.ExactGLM(detector, boxcov.Posterior.load("small", detector))
    tracker = Tracker()
    for item in range(len(drive)):
        inputs, (target,) = drive[item]
        found = model(inputs)
        found = found[found.no_object < 1 - LEAST]
        tracks = tracker.update(found, 1e-6 * drive.timestamp(item), drive.pose(item))
        shown = [one for one in tracks if one.existence > REPORT]
        print(f"{item:3d}: {len(found)} boxes, {len(target['ids'])} objects, {len(shown)} tracks")
    return tracks


def corners(box: np.ndarray, x: float, y: float, yaw: float) -> np.ndarray:
    """Return the outline (5, 2) of a box with this place and heading."""
    w, l = box[3], box[4]
    along, across = np.array([1, 1, -1, -1, 1]) * l / 2, np.array([1, -1, -1, 1, 1]) * w / 2
    cos, sin = np.cos(yaw), np.sin(yaw)
    return np.stack([x + along * cos - across * sin, y + along * sin + across * cos], 1)


def draw(drive: Any, tracks: list[BoxTrack], path: Path) -> None:
    """Write a picture of the last frame."""
    figure, axes = plt.subplots(figsize=(9, 9))
    pose: Pose = drive.pose(len(drive) - 1)
    boxes = drive[len(drive) - 1][1][0]["boxes"].double()
    turn = float(torch.atan2(pose.R[1, 0], pose.R[0, 0]))
    for box, place in zip(boxes.numpy(), pose(boxes[:, :3]).numpy()):
        axes.plot(*corners(box, place[0], place[1], box[6] + turn).T, color="tab:green", lw=2)
    for one in (t for t in tracks if t.existence > REPORT):
        way = np.array([np.asarray(s.state_vector, float)[[0, 2], 0] for s in one.states])
        axes.plot(*way.T, color="tab:blue", lw=0.8, alpha=0.6)
        x, vx, y, vy, yaw = one.mean
        axes.plot(*corners(one.box, x, y, yaw).T, color="tab:blue", lw=1)
        values, vectors = np.linalg.eigh(one.covariance[np.ix_([0, 2], [0, 2])])
        angle = np.degrees(np.arctan2(vectors[1, 1], vectors[0, 1]))
        size = 6 * np.sqrt(values)  # 3 sigma to both sides
        axes.add_patch(
            Ellipse((x, y), size[1], size[0], angle=angle, fill=True, color="tab:red", alpha=0.3)
        )
        if np.hypot(vx, vy) > 0.5:
            axes.arrow(x, y, vx, vy, width=0.1, head_width=1.2, color="tab:blue", alpha=0.6)
    ego = pose.t.numpy()
    axes.plot(ego[0], ego[1], "k^", markersize=9)
    axes.set(xlim=(ego[0] - 45, ego[0] + 45), ylim=(ego[1] - 45, ego[1] + 45), aspect="equal")
    axes.set(xlabel="x, m", ylabel="y, m")
    axes.set_title("Objects (green), tracks (blue) with 3 sigma ellipses (red), ego car (black)")
    figure.savefig(path, dpi=80, bbox_inches="tight")
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="length of the drive")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    parser.add_argument("--nuscenes", help="root of nuScenes: its first scene, not a simulated one")
    parser.add_argument("--out", type=Path, default=Path("tracks.png"), help="picture to write")
    given = parser.parse_args()
    if given.nuscenes:
        drive: Any = nuscenes.sequences(given.nuscenes, sweeps=3)[0][: round(2 * given.seconds)]
    else:
        drive = simulated.sequences(seed=given.seed, count=1, seconds=given.seconds)[0]
    draw(drive, track(drive), given.out)


if __name__ == "__main__":
    main()
