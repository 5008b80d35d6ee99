"""Boxes in LiDAR coordinates to KITTI's camera coordinates and back, with the Jacobians.

KITTI's boxes are ``h w l x y z rotation_y``; x y z is the centre of the bottom face.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from boxcov._files.input_file import read_bytes, reading
from boxcov.data.poses import BOX_FIELDS, Pose, into_axes, rotate_yaw
from boxcov.errors import BoxcovError

LIDAR_FIELDS = BOX_FIELDS[:7]  # KITTI has no velocities
CAMERA_FIELDS = ("h", "w", "l", "x", "y", "z", "rotation_y")  # the order of a label's columns

# the heading (cos, sin, 0) of rotation_y is (cos, 0, -sin) in the camera frame, whose y points down
_UPRIGHT = torch.tensor([[1.0, 0, 0], [0, 0, 1], [0, -1, 0]], dtype=torch.float64)
_AXES = torch.tensor([[0.0, -1, 0], [0, 0, -1], [1, 0, 0]])  # from LiDAR to camera, roughly


@dataclass(frozen=True)
class CameraCalibration:
    """The poses of KITTI's sensors."""

    pose: Pose  # from LiDAR to rectified camera coordinates
    P2: Tensor  # (3, 4) projection into the left colour image


def read_calibration(path: Path) -> CameraCalibration:
    """Read a file of the folder ``calib``."""
    R0, Tr, P2 = (_matrix(path, name) for name in ("R0_rect", "Tr_velo_to_cam", "P2"))
    R = R0 @ Tr[:, :3]
    if not torch.allclose(R @ R.T, torch.eye(3, dtype=R.dtype), atol=1e-2):
        raise BoxcovError(
            f"{path}: R0_rect and Tr_velo_to_cam are not a rotation ({R.tolist()}): the file is "
            "damaged; unpack it again"
        )
    if not (R * _AXES).sum(1).min() > 0.5:
        raise BoxcovError(
            f"{path}: R0_rect and Tr_velo_to_cam do not lead from a LiDAR (x ahead, y left, z up) "
            "to a camera (x right, y down, z ahead): is it the inverse, or of another data set?"
        )
    return CameraCalibration(Pose(R, R0 @ Tr[:, 3]), P2)


def read_imu_pose(path: Path) -> Pose:
    """Return the pose from the inertial system to the LiDAR, of a file of the folder ``calib``."""
    Tr = _matrix(path, "Tr_imu_to_velo")
    return Pose(Tr[:, :3], Tr[:, 3])


def to_camera(boxes: Tensor, pose: Pose) -> tuple[Tensor, Tensor]:
    """Return boxes (m, 7) ``x y z w l h yaw`` in camera coordinates, and the Jacobian (m, 7, 7).

    ``rotation_y`` is the angle of the heading about the camera's y axis: ``-yaw - pi / 2`` if the
    sensors are aligned.
    """
    w, l, h = boxes[:, 3:6].unbind(1)
    location = pose(boxes[:, :3]) + F.pad(h[:, None] / 2, (1, 1))  # y points down
    rotation, slope = rotate_yaw(_UPRIGHT.T @ pose.R, boxes[:, 6])
    J = boxes.new_zeros(len(boxes), 7, 7)
    J[:, 0, 5] = J[:, 1, 3] = J[:, 2, 4] = 1
    J[:, 3:6, :3] = pose.R
    J[:, 4, 5] = 0.5
    J[:, 6, 6] = slope
    return torch.cat([torch.stack([h, w, l], 1), location, rotation[:, None]], 1), J


def from_camera(rows: Tensor, pose: Pose) -> tuple[Tensor, Tensor]:
    """Return camera boxes (m, 7) as LiDAR boxes, and the Jacobian: the inverse of ``to_camera``."""
    to_lidar = pose.inverse()
    h, w, l = rows[:, :3].unbind(1)
    centre = to_lidar(rows[:, 3:6] - F.pad(h[:, None] / 2, (1, 1)))
    yaw, slope = rotate_yaw(to_lidar.R @ _UPRIGHT, rows[:, 6])
    J = rows.new_zeros(len(rows), 7, 7)
    J[:, :3, 3:6] = to_lidar.R
    J[:, :3, 0] = -to_lidar.R[:, 1] / 2
    J[:, 3, 1] = J[:, 4, 2] = J[:, 5, 0] = 1
    J[:, 6, 6] = slope
    return torch.cat([centre, torch.stack([w, l, h], 1), yaw[:, None]], 1), J


def image_boxes(rows: Tensor, P2: Tensor, width: int, height: int) -> Tensor:
    """Return the projections (m, 4) left top right bottom of camera boxes (m, 7).

    Only corners in front of the camera count; a box without any has zeros.
    """
    h, w, l = (size[:, None] for size in rows[:, :3].unbind(1))
    signs = torch.cartesian_prod(*[torch.tensor([-0.5, 0.5], dtype=rows.dtype)] * 3)  # (8, 3)
    x, z = into_axes(signs[:, 0] * l, signs[:, 2] * w, rows[:, 6:])  # (m, 8)
    corner = torch.stack([x, (signs[:, 1] - 0.5) * h, z], 2) + rows[:, None, 3:6]
    u, v, depth = (corner @ P2[:, :3].T + P2[:, 3]).unbind(2)
    in_front = depth > 0.1  # (m, 8)
    u, v = (u / depth).clamp(0, width - 1), (v / depth).clamp(0, height - 1)
    low = [side.masked_fill(~in_front, torch.inf).amin(1) for side in (u, v)]
    high = [side.masked_fill(~in_front, 0).amax(1) for side in (u, v)]
    return torch.stack(low + high, 1).where(in_front.any(1, keepdim=True), 0)


def parse_numbers(words: Sequence[str]) -> list[float]:
    """Return the numbers of a line; none if a word is no finite number."""
    try:
        values = [float(word) for word in words]
    except ValueError:
        return []
    return values if all(map(isfinite, values)) else []


def _matrix(path: Path, name: str) -> Tensor:
    """Return the matrix (3, 4) of a line of the file, (3, 3) for R0_rect."""
    with reading(path, "a calibration file", "unpack the calibration archive there"):
        lines = read_bytes(path).decode("ascii", errors="replace").splitlines()
    text = dict(line.split(":", 1) for line in lines if ":" in line).get(name, "")
    columns, values = 3 if name == "R0_rect" else 4, parse_numbers(text.split())
    if len(values) != 3 * columns:
        raise BoxcovError(
            f"{path}: no line '{name}:' of {3 * columns} numbers: the file is damaged, or not of "
            "KITTI's object detection data; unpack it again"
        )
    return torch.tensor(values, dtype=torch.float64).reshape(3, columns)
