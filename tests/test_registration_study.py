"""Ego poses of studies/registration.py from clouds of a street with known poses."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from boxcov.data import kitti
from helpers.data_roots import real


@pytest.fixture
def registration(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "studies"))
    import registration

    yield registration
    sys.modules.pop("registration", None)


def street(rng: np.random.Generator, shift: float) -> np.ndarray:
    """Points on the ground, on walls of houses, and on a car that has moved by ``shift``."""
    u, v = rng.uniform(-25, 25, (2, 4000))
    w = rng.uniform(-1.7, 3, 4000)
    ground = np.stack([u, v, np.full(4000, -1.7)], 1)
    along = np.stack([u, np.where(v > 0, 9.0, -7.0), w], 1)
    across = np.stack([np.where(u > 0, 14.0, -12.0), v, w], 1)[:1500]
    car = np.stack([5 + shift + u[:300] / 12, 2 + v[:300] / 25, w[:300] / 4 - 1], 1)
    return np.concatenate([ground, along, across, car])


def test_registered_poses_are_those_of_the_drive(registration: Any):
    rng = np.random.default_rng(0)
    clouds, poses = [], []
    for k in range(4):  # 1.2 m per frame, turning
        turn, place = Rotation.from_euler("z", 0.05 * k), np.array([1.2 * k, 0.03 * k**2, 0])
        seen = turn.inv().apply(street(rng, 0.8 * k) - place)
        clouds.append(torch.from_numpy(seen + rng.normal(0, 0.01, seen.shape)))
        poses.append((turn.as_matrix(), place))
    found = registration.ego_poses(clouds)
    assert len(found) == 4
    for pose, (R, t) in zip(found, poses):
        np.testing.assert_allclose(pose.t.numpy(), t, atol=0.05)
        np.testing.assert_allclose(pose.R.numpy(), R, atol=0.01)


def test_parked_cars_of_a_real_drive_stand(registration: Any):
    (drive,) = kitti.sequences(real("kitti"), rate=5)
    last = drive[60:]
    poses = registration.ego_poses(clouds[0] for clouds, _ in last)
    places: dict[int, list[torch.Tensor]] = {}
    for pose, (_, (target,)) in zip(poses, last):
        for number, box in zip(target["ids"].tolist(), target["boxes"].double()):
            places.setdefault(number, []).append(pose(box[None, :3])[0, :2])
    spread = {
        number: float((torch.stack(p) - torch.stack(p).mean(0)).square().sum(1).mean().sqrt())
        for number, p in places.items()
    }
    parked = [number for number, value in spread.items() if value < 0.2]
    assert len(parked) >= 8  # of 11; a cyclist, a pedestrian and a car move
    assert float((poses[-1].t - poses[0].t).norm()) > 15  # the ego car does not stand
