"""Ego poses from point clouds alone, for drives without an inertial system."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from scipy.spatial import cKDTree
from scipy.spatial.transform import Rotation

from boxcov.data.poses import Pose

VOXEL, NEIGHBOURS = 0.4, 12  # metres; points of a plane
REACH = np.geomspace(2.0, 0.3, 25)  # metres to the nearest point, in each step
OUTLIER = 0.1  # metres from a plane at which a point counts half: others move


def ego_poses(clouds: Iterable[torch.Tensor]) -> list[Pose]:
    """Return the pose of each cloud (N, 3 or more) in the coordinates of the first one."""
    still = Pose(torch.eye(3).double(), torch.zeros(3).double())
    poses, step, before = [still], still, None
    for cloud in clouds:
        points = thin(cloud[:, :3].double().numpy())
        if before is not None:
            step = register(points, before, step)  # the last step is the first guess
            poses.append(poses[-1] @ step)
        before = points
    return poses


def thin(points: np.ndarray) -> np.ndarray:
    """Return the mean of the points (N, 3) in each voxel."""
    _, at = np.unique(np.floor(points / VOXEL).astype(int), axis=0, return_inverse=True)
    count = np.bincount(at.ravel())
    return np.stack([np.bincount(at.ravel(), column) / count for column in points.T], 1)


def register(points: np.ndarray, onto: np.ndarray, guess: Pose) -> Pose:
    """Return the pose from the coordinates of ``points`` (n, 3) to those of ``onto`` (k, 3).

    Iterative closest points: squared distances from the planes around the nearest points, with
    Cauchy weights.
    """
    tree, normals = cKDTree(onto), plane_normals(onto)
    R, t = guess.R.numpy(), guess.t.numpy()
    for reach in REACH:
        moved = points @ R.T + t
        far, at = tree.query(moved, distance_upper_bound=reach)
        near = np.isfinite(far)
        p, n = moved[near], normals[at[near]]
        step = ((onto[at[near]] - p) * n).sum(1)
        weight = 1 / (1 + (step / OUTLIER) ** 2)
        A = np.hstack([np.cross(p, n), n])  # (n, 6) of a small turn and shift
        x = np.linalg.solve((A.T * weight) @ A + 1e-9 * np.eye(6), A.T @ (weight * step))
        turn = Rotation.from_rotvec(x[:3]).as_matrix()
        R, t = turn @ R, turn @ t + x[3:]
    return Pose(torch.from_numpy(R), torch.from_numpy(t))


def plane_normals(points: np.ndarray) -> np.ndarray:
    """Return the normals (n, 3) of the planes through the neighbours of each point."""
    _, at = cKDTree(points).query(points, NEIGHBOURS)
    around = points[at] - points[at].mean(1, keepdims=True)  # (n, NEIGHBOURS, 3)
    return np.linalg.eigh(around.transpose(0, 2, 1) @ around)[1][:, :, 0]
