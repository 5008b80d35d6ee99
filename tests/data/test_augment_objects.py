"""Resized objects: points and boxes move together, moving objects too."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from boxcov.data import simulated
from boxcov.data.augment import resize_objects


def test_points_stay_at_their_place_on_the_object() -> None:
    frame = simulated.frames(count=1, seed=3)[0]
    (cloud,), (target,) = frame
    (resized,), (after,) = resize_objects([frame], seed=1)[0]
    assert resized.shape == cloud.shape
    before, boxes = target["boxes"], after["boxes"]
    factor = boxes[:, 3:6] / before[:, 3:6]
    torch.testing.assert_close(factor[:, 0], factor[:, 2])
    logs = factor[:, 0].log().abs()
    assert float(logs.min()) >= 0.1
    assert float(logs.max()) <= 0.6
    bottom = before[:, 2] - before[:, 5] / 2
    torch.testing.assert_close(boxes[:, 2] - boxes[:, 5] / 2, bottom)
    assert torch.equal(boxes[:, [0, 1, 6, 7, 8]], before[:, [0, 1, 6, 7, 8]])
    moved = (resized[:, :3] != cloud[:, :3]).any(1)
    assert 0 < int(moved.sum()) < len(cloud)
    assert torch.equal(resized[:, 3:], cloud[:, 3:])


def test_points_of_older_sweeps_follow_their_object() -> None:
    # one second ago the object was 4 m behind; the point is at its front edge, 1 m ahead
    cloud = torch.tensor([[-3.0, 0.0, 0.5, 1.0, 1.0]])
    box = torch.tensor([[0.0, 0.0, 0.5, 1.0, 2.0, 1.0, 0.0, 4.0, 0.0]])
    (points,), (target,) = resize_objects([([cloud], [{"boxes": box}])])[0]
    half = target["boxes"][0, 4] / 2
    torch.testing.assert_close(points[0, 0] + 4.0, half)


@pytest.mark.parametrize("velocity", [[], [float("nan")] * 2])
def test_objects_of_unknown_velocity_are_resized(velocity: list[float]) -> None:
    """KITTI has no velocities: the boxes grew, and their points stayed."""
    cloud = torch.tensor([[1.0, 0.0, 0.5, 1.0, 0.0]])
    box = torch.tensor([[0.0, 0.0, 0.5, 1.0, 2.0, 1.0, 0.0, *velocity]])
    (points,), (target,) = resize_objects([([cloud], [{"boxes": box}])])[0]
    assert target["boxes"][0, 4] != 2
    torch.testing.assert_close(points[0, 0], target["boxes"][0, 4] / 2)


def test_the_same_seed_gives_the_same_frames() -> None:
    frames = simulated.frames(count=2, seed=4)
    one, two, other = (resize_objects(frames, seed=seed)[1] for seed in (0, np.int64(0), 1))
    assert torch.equal(one[0][0], two[0][0])
    assert not torch.equal(one[0][0], other[0][0])
