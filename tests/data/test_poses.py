from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from scipy.spatial.transform import Rotation
from torch import Tensor

from boxcov.data.poses import BOX_FIELDS, Pose, rotation_matrix, transform_detections
from boxcov.errors import BoxcovError
from helpers.data_roots import quaternion, random_detections

TILTED = Rotation.from_euler("zyx", [130, 4, -3], degrees=True)


def pose(rotation: Rotation = TILTED) -> Pose:
    return Pose(
        rotation_matrix(torch.tensor(quaternion(rotation), dtype=torch.float64)),
        torch.tensor([600.0, 1500.0, 3.0]).double(),
    )


def boxes(count: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(count, 9, generator=generator, dtype=torch.float64) * 3
    values[:, 3:6] = values[:, 3:6].abs() + 0.5
    return values


def test_rotation_matrices_are_scipys() -> None:
    turns = Rotation.random(20, rng=0)
    mine = rotation_matrix(
        torch.tensor([quaternion(turn) for turn in turns], dtype=torch.float64) * 3
    )  # of any length
    assert torch.allclose(mine, torch.from_numpy(turns.as_matrix()), atol=1e-12)


def test_poses_compose_and_invert() -> None:
    there, points = pose(), torch.randn(4, 3, dtype=torch.float64)
    assert torch.allclose((there.inverse() @ there)(points), points, atol=1e-9)
    assert torch.allclose((there @ there)(points), there(there(points)), atol=1e-9)
    assert torch.allclose(
        there(points), torch.from_numpy(TILTED.apply(points.numpy())) + there.t, atol=1e-9
    )


def test_covariances_move_by_the_jacobian_of_the_map() -> None:
    found = random_detections(boxes(), torch.zeros(5, dtype=torch.long), ("car",))
    factor = torch.randn(5, 9, 4, dtype=torch.float64)
    there = transform_detections(replace(found, factor=factor), pose())

    def move(box: Tensor) -> Tensor:
        heading = torch.stack([box[6].cos(), box[6].sin(), box.new_zeros(())])
        velocity = torch.stack([box[7], box[8], box.new_zeros(())])
        turned, speed = pose().R @ heading, pose().R @ velocity
        return torch.cat(
            [
                pose().R @ box[:3] + pose().t,
                box[3:6],
                torch.atan2(turned[1], turned[0])[None],
                speed[:2],
            ]
        )

    assert found.covariance is not None
    assert there.covariance is not None
    assert there.factor is not None
    for row, box in enumerate(found.boxes):
        J = torch.autograd.functional.jacobian(move, box)
        assert torch.allclose(there.boxes[row], move(box), atol=1e-12)
        assert torch.allclose(there.covariance[row], J @ found.covariance[row] @ J.T, atol=1e-12)
        assert torch.allclose(there.factor[row], J @ factor[row], atol=1e-12)
    assert torch.equal(there.covariance, there.covariance.transpose(1, 2))


def test_planar_round_trip_is_exact() -> None:
    found = random_detections(boxes(), torch.zeros(5, dtype=torch.long), ("car",))
    turn = pose(Rotation.from_euler("z", 70, degrees=True))
    back = transform_detections(transform_detections(found, turn), turn.inverse())
    assert found.covariance is not None
    assert back.covariance is not None
    assert torch.allclose(back.covariance, found.covariance, atol=1e-10)
    assert torch.allclose(back.boxes[:, :6], found.boxes[:, :6], atol=1e-10)
    assert torch.allclose((back.boxes[:, 6] - found.boxes[:, 6]).cos(), torch.ones(5).double())
    assert torch.allclose(
        torch.trace(back.covariance[0]),
        torch.trace(transform_detections(found, turn).covariance[0]),
    )  # type: ignore[index]


def test_round_trip_error_of_a_tilt() -> None:
    found = random_detections(boxes(500), torch.zeros(500, dtype=torch.long), ("car",))
    tilt = pose(Rotation.from_euler("y", 2, degrees=True))
    back = transform_detections(transform_detections(found, tilt), tilt.inverse())
    off = (
        torch.atan2(
            (back.boxes[:, 6] - found.boxes[:, 6]).sin(),
            (back.boxes[:, 6] - found.boxes[:, 6]).cos(),
        )
        .abs()
        .max()
    )
    assert 0.0004 < float(off) <= 0.0007


def test_other_boxes_cannot_be_moved() -> None:
    found = random_detections(boxes(), torch.zeros(5, dtype=torch.long), ("car",))
    with pytest.raises(BoxcovError, match="x y z w l h yaw vx vy"):
        transform_detections(replace(found, fields=tuple(reversed(BOX_FIELDS))), pose())
