"""Small data sets in the official layouts with known content, and paths to real ones."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from boxcov import Detections
from boxcov.data.poses import BOX_FIELDS, Pose

VERSION = "v1.0-trainval"
LANDMARKS = np.random.default_rng(0).uniform(
    [570, 1470, -1], [630, 1530, 4], (50, 3)
)  # fixed in the global frame
KEY_TIMES = (0.0, 0.5, 1.0, 3.2)  # seconds: a gap that is too long for a velocity from one side
SWEEPS_BETWEEN = 4
MOUNT = (Rotation.from_euler("zyx", [-90, 2, -1], degrees=True), np.array([0.9, 0.1, 1.8]))
CAR_SPEED = np.array([3.0, -1.0])


def real(name: str) -> Path:
    """Return the folder of a real data set, or skip the test."""
    shared = Path(os.environ.get("BOXCOV_DATA", Path(__file__).parents[2] / "../shared/data"))
    if not (shared / name).is_dir():
        pytest.skip(f"no real frames at {shared / name}: set BOXCOV_DATA")
    return shared / name


def quaternion(rotation: Rotation) -> list[float]:
    x, y, z, w = rotation.as_quat()
    return [float(w), float(x), float(y), float(z)]


def ego(time: float) -> tuple[Rotation, np.ndarray]:
    """A car that drives a bend over uneven ground."""
    turn = Rotation.from_euler("zyx", [40 + 12 * time, 1.5 * np.sin(time), -1 + time], degrees=True)
    return turn, np.array([600 + 8 * time, 1500 + 3 * time, 0.1 * time])


def sensor(time: float) -> tuple[Rotation, np.ndarray]:
    """From LIDAR_TOP to the global frame."""
    R, t = ego(time)
    return R * MOUNT[0], R.apply(MOUNT[1]) + t


def car_centre(time: float) -> np.ndarray:
    return np.array([610 + CAR_SPEED[0] * time, 1510 + CAR_SPEED[1] * time, 0.8])


def nuscenes_root(root: Path) -> Path:
    """One train scene with four key frames, an empty val scene, and a camera to be ignored."""
    tables: dict[str, list[dict[str, Any]]] = {
        "scene": [
            {"token": "scene", "name": "scene-0001"},
            {"token": "other", "name": "scene-0003"},
        ],
        "sensor": [
            {"token": "lidar", "channel": "LIDAR_TOP"},
            {"token": "camera", "channel": "CAM_FRONT"},
        ],
        "calibrated_sensor": [
            {
                "token": f"mount-{name}",
                "sensor_token": name,
                "translation": MOUNT[1].tolist(),
                "rotation": quaternion(MOUNT[0]),
            }
            for name in ("lidar", "camera")
        ],
        "sample": [],
        "sample_data": [],
        "ego_pose": [],
        "category": [
            {"token": name, "name": name}
            for name in (
                "vehicle.car",
                "movable_object.barrier",
                "human.pedestrian.adult",
                "human.pedestrian.stroller",
            )
        ],
        "instance": [
            {"token": "the car", "category_token": "vehicle.car"},
            {"token": "the barrier", "category_token": "movable_object.barrier"},
            {"token": "the walker", "category_token": "human.pedestrian.adult"},
            {"token": "the stroller", "category_token": "human.pedestrian.stroller"},
        ],
        "sample_annotation": [],
    }
    for number, time in enumerate(KEY_TIMES):
        tables["sample"].append(
            {
                "token": f"sample-{number}",
                "timestamp": round(1e6 * time) + 10**15,
                "scene_token": "scene",
            }
        )
        tables["sample_annotation"] += _annotations(number, time)
    tables["sample"].reverse()  # the order of a table means nothing
    previous = ""
    for number, time in enumerate(KEY_TIMES):
        turns = [
            (time - 0.05 * back, back == 0)
            for back in range(SWEEPS_BETWEEN if number else 0, -1, -1)
        ]
        for at, is_key in turns:
            row = _turn(root, f"sample-{number}", at, is_key, previous)
            previous = row["token"]
            camera = {
                **row,
                "token": f"camera {previous}",
                "calibrated_sensor_token": "mount-camera",
                "filename": "x.jpg",
                "prev": "",
            }
            tables["sample_data"] += [row, camera]
            tables["ego_pose"].append(
                {
                    "token": f"pose {at:.2f}",
                    "translation": ego(at)[1].tolist(),
                    "rotation": quaternion(ego(at)[0]),
                }
            )
    (root / VERSION).mkdir(parents=True)
    for name, rows in tables.items():
        (root / VERSION / f"{name}.json").write_text(json.dumps(rows, indent=0))
    return root


def _turn(root: Path, sample: str, time: float, is_key: bool, previous: str) -> dict[str, Any]:
    """Write a sweep with points on the landmarks and, at 0.5 m, on the ego car."""
    R, t = sensor(time)
    seen = np.concatenate([R.inv().apply(LANDMARKS - t), [[0.5, -0.5, 0.2]]])
    name = f"{'samples' if is_key else 'sweeps'}/LIDAR_TOP/{time:.2f}.pcd.bin"
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    features = np.stack(
        [np.arange(len(seen)), np.full(len(seen), 7)], 1
    )  # intensity: the landmark's number; ring
    np.concatenate([seen, features], 1).astype(np.float32).tofile(root / name)
    return {
        "token": f"turn {time:.2f}",
        "sample_token": sample,
        "ego_pose_token": f"pose {time:.2f}",
        "calibrated_sensor_token": "mount-lidar",
        "timestamp": round(1e6 * time) + 10**15,
        "is_key_frame": is_key,
        "filename": name,
        "prev": previous,
    }


def _annotations(number: int, time: float) -> list[dict[str, Any]]:
    def row(
        what: str, centre: Any, size: list[float], degrees: float, neighbours: bool
    ) -> dict[str, Any]:
        return {
            "token": f"{what} {number}",
            "sample_token": f"sample-{number}",
            "instance_token": f"the {what}",
            "translation": list(map(float, centre)),
            "size": size,
            "rotation": quaternion(Rotation.from_euler("z", degrees, degrees=True)),
            "prev": f"{what} {number - 1}" if neighbours and number else "",
            "next": f"{what} {number + 1}" if neighbours and number < len(KEY_TIMES) - 1 else "",
            "num_lidar_pts": 10 * number,
        }

    rows = [
        row("car", car_centre(time), [1.9, 4.5, 1.6], -18.0, True),
        row("stroller", [590, 1490, 0.5], [0.6, 0.9, 1.0], 0.0, True),
        row("barrier", [605, 1480, 0.5], [2.5, 0.5, 1.0], 100.0, True),
    ]
    return (
        [*rows, row("walker", [615, 1495, 0.9], [0.7, 0.7, 1.8], 10.0, False)]
        if number == 0
        else rows
    )


KITTI_R0 = Rotation.from_euler("xyz", [0.3, -0.5, 0.4], degrees=True)
KITTI_TR = Rotation.from_matrix([[0, -1, 0], [0, 0, -1], [1, 0, 0]]) * Rotation.from_euler(
    "xyz", [0.6, 0.4, -0.5], degrees=True
)
KITTI_T = np.array([-0.004, -0.076, -0.272])
KITTI_POSE = Pose(
    torch.from_numpy((KITTI_R0 * KITTI_TR).as_matrix()), torch.from_numpy(KITTI_R0.apply(KITTI_T))
)
KITTI_LABELS = """Car 0.00 0 -1.58 587.01 173.33 614.12 200.12 1.65 1.67 3.64 -0.65 1.71 46.70 -1.59
Van 0.10 1 1.20 100.00 150.00 300.00 250.00 2.10 1.90 5.20 -6.00 1.60 14.00 0.80
Cyclist 0.00 0 -2.46 665.45 160.00 717.93 217.99 1.72 0.47 1.65 2.45 1.35 22.10 -2.35
DontCare -1 -1 -10 503.89 169.71 590.61 190.13 -1 -1 -1 -1000 -1000 -1000 -10
"""


def kitti_root(root: Path, frames: int = 2) -> Path:
    """Frames of 8 points: the centres of three objects and five points far away."""
    folder = root / "training"
    for name in ("velodyne", "label_2", "calib", "image_2"):
        (folder / name).mkdir(parents=True)
    header = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack(">II", 1242, 375)
    Tr = np.column_stack([KITTI_TR.as_matrix(), KITTI_T])
    P2 = np.array([[721.5, 0, 609.6, 44.9], [0, 721.5, 172.9, 0.2], [0, 0, 1, 0.003]])
    matrices = {"P2": P2, "R0_rect": KITTI_R0.as_matrix(), "Tr_velo_to_cam": Tr}
    calibration = "".join(
        f"{name}: {' '.join(f'{v:.12e}' for v in matrix.ravel())}\n"
        for name, matrix in matrices.items()
    )
    rows = [list(map(float, line.split()[1:])) for line in KITTI_LABELS.splitlines()[:3]]
    centres = np.array([row[10:13] for row in rows]) - [[0, row[7] / 2, 0] for row in rows]
    centres = KITTI_TR.inv().apply(KITTI_R0.inv().apply(centres) - KITTI_T)
    far = np.array([[70, 20, 0]] * 5)
    cloud = np.concatenate([centres, far])
    for number in range(frames):
        np.column_stack([cloud, np.linspace(0, 1, 8)]).astype(np.float32).tofile(
            folder / f"velodyne/{number:06d}.bin"
        )
        (folder / f"label_2/{number:06d}.txt").write_text(KITTI_LABELS)
        (folder / f"calib/{number:06d}.txt").write_text(calibration)
        (folder / f"image_2/{number:06d}.png").write_bytes(header)
    return root


def edited(root: Path, table: str, change: Callable[[list[dict[str, Any]]], Any]) -> Path:
    """The table after a change of its rows in place."""
    path = root / VERSION / f"{table}.json"
    rows = json.loads(path.read_text())
    change(rows)
    path.write_text(json.dumps(rows))
    return path


def random_detections(
    boxes: torch.Tensor, labels: torch.Tensor, classes: tuple[str, ...], seed: int = 0
) -> Detections:
    """Return detections of these boxes with random covariances."""
    generator = torch.Generator().manual_seed(seed)
    m, D = boxes.shape
    A = torch.randn(m, D, D, generator=generator, dtype=torch.float64) * 0.1
    return Detections(
        boxes=boxes,
        scores=torch.rand(m, generator=generator),
        labels=labels,
        frame=torch.zeros(m, dtype=torch.long),
        fields=BOX_FIELDS[:D],
        classes=classes,
        covariance=A @ A.transpose(1, 2),
        meta={"method": "mcglm", "samples": 10},
    )
