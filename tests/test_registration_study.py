"""Ego poses of studies/registration.py from clouds of a street with known poses."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation


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
