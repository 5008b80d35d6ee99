from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from scipy.spatial.transform import Rotation
from torch import Tensor

from boxcov import Detections
from boxcov.data.poses import BOX_FIELDS, Pose, propagate, rotation_matrix, transform_detections
from boxcov.errors import BoxcovError
from helpers.data_roots import quaternion, random_detections
from helpers.error_models import make_error_model

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


def move(box: Tensor) -> Tensor:
    """Return one box in the frame of ``pose()``."""
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


def test_covariances_move_by_the_jacobian_of_the_map() -> None:
    found = random_detections(boxes(), torch.zeros(5, dtype=torch.long), ("car",))
    there = transform_detections(found, pose())

    assert found.covariance is not None
    assert there.covariance is not None
    for row, box in enumerate(found.boxes):
        J = torch.autograd.functional.jacobian(move, box)
        assert torch.allclose(there.boxes[row], move(box), atol=1e-12)
        assert torch.allclose(there.covariance[row], J @ found.covariance[row] @ J.T, atol=1e-12)
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


def calibrated(count: int = 5) -> Detections:
    found = random_detections(boxes(count), torch.zeros(count, dtype=torch.long), ("car",))
    return make_error_model(found.fields, found.classes).apply(found)


def test_probabilities_do_not_depend_on_the_frame() -> None:
    found = calibrated()
    there = transform_detections(found, pose())
    for name in ("no_object", "iou_below", "flipped", "misplaced", "risk"):
        assert torch.equal(getattr(there, name), getattr(found, name))
    for row in range(5):
        J = jacobian(found.boxes[row])
        expected = J @ found.predictive[row].double() @ J.T
        torch.testing.assert_close(there.predictive[row], expected, rtol=1e-9, atol=1e-12)


def jacobian(box: Tensor) -> Tensor:
    J: Tensor = torch.autograd.functional.jacobian(move, box)
    return J


def test_scales_and_widths_of_rotated_boxes() -> None:
    """Sizes and yaw keep theirs; those of the centre and the velocity are mixed."""
    found = calibrated()
    turn = pose(Rotation.from_euler("z", 30, degrees=True))
    there = transform_detections(found, turn)
    kept, mixed = [3, 4, 5, 6], [0, 1, 2, 7, 8]
    torch.testing.assert_close(there.scale[:, kept], found.scale[:, kept].double())
    assert bool(there.scale[:, mixed].isnan().all())
    assert there.dof[kept].tolist() == [4.0] * 4
    assert bool(there.dof[mixed].isnan().all())
    torch.testing.assert_close(there.region(0.9)[:, kept], found.region(0.9)[:, kept].double())
    c, s = 0.75**0.5, 0.5

    def turned(widths: Tensor, widths_of_z: Tensor) -> Tensor:
        x, y, _ = widths[:, :3].double().unbind(1)
        return torch.stack([c * x + s * y, s * x + c * y, widths_of_z[:, 2].double()], 1)

    # x and y are both inside at 0.95 in at least 90 %; z is not mixed
    bounds = turned(found.region(0.95), found.region(0.9))
    torch.testing.assert_close(there.region(0.9)[:, :3], bounds)
    joint = found.region(0.99, joint=True)  # no level is high enough for two
    bounds = turned(joint, found.region(0.99))
    torch.testing.assert_close(there.region(0.99)[:, :3], bounds)
    torch.testing.assert_close(there.region(0.99, joint=True)[:, :3], turned(joint, joint))


def test_mapped_half_widths_hold_their_level() -> None:
    """Also in the worst case of x and y, and a velocity with large errors does not widen them."""
    found = calibrated(1)
    levels = found.meta["error_model"]["levels"]
    single = torch.tensor(levels)[None, :, None].repeat(1, 1, 9)  # |x| and |y| are uniform
    far = replace(found, region_widths=single, joint_widths=1e3 * single)
    there = transform_detections(far, pose(Rotation.from_euler("z", 45, degrees=True)))
    x = torch.arange(0.5, 10_000).double() / 10_000
    for level in levels[:-1]:
        y = torch.where(x > 2 * level - 1, 2 * level - x, x) + 1e-6  # uniform, too
        mapped = (x + y) * 0.5**0.5
        same_level = (mapped <= level * 2**0.5).double().mean()
        assert float(same_level) == pytest.approx(2 * level - 1, abs=1e-3)
        width = there.region(level)[0, 0]
        assert float((mapped <= width).double().mean()) >= level
        assert float(width) <= 2**0.5
    assert float(there.region(0.99)[0, 0]) > 1e3
    assert bool((there.region_widths.diff(dim=1) >= 0).all())


def test_mapped_regions_hold_what_the_joint_region_holds() -> None:
    found = calibrated(1)
    turn = pose(Rotation.from_euler("z", 50, degrees=True))
    there = transform_detections(found, turn)
    errors = torch.randn(5_000, 9, generator=torch.Generator().manual_seed(0)).double()
    errors = errors * found.region(0.9, joint=True)[0].double() / 1.5
    R = turn.R
    mapped = torch.cat([errors[:, :3] @ R.T, errors[:, 3:7], errors[:, 7:] @ R[:2, :2].T], 1)
    held = (errors.abs() <= found.region(0.9, joint=True)[0]).all(1)
    held_there = (mapped.abs() <= there.region(0.9, joint=True)[0]).all(1)
    assert 0.1 < float(held.double().mean()) < 0.9
    assert bool(held_there[held].all())


def test_an_infinite_half_width_stays_where_it_is() -> None:
    found = calibrated(2)
    wide = found.joint_widths.clone()
    wide[:, :, 2] = torch.inf
    turn = pose(Rotation.from_euler("z", 30, degrees=True))
    there = transform_detections(replace(found, joint_widths=wide), turn)
    assert bool(there.joint_widths[:, :, 2].isinf().all())
    assert bool(there.joint_widths[:, :, [0, 1, 3, 4, 5, 6, 7, 8]].isfinite().all())


def test_the_covariance_with_the_score_is_mapped() -> None:
    found = random_detections(boxes(), torch.zeros(5, dtype=torch.long), ("car",))
    with_score = torch.randn(5, 9, dtype=torch.float64)
    found = replace(found, score_variance=torch.ones(5), score_covariance=with_score)
    there = transform_detections(found, pose())
    for row, box in enumerate(found.boxes):
        torch.testing.assert_close(there.score_covariance[row], jacobian(box) @ with_score[row])


def test_no_boxes_are_mapped() -> None:
    there = transform_detections(calibrated()[:0], pose())
    assert there.region_widths.shape == (0, 7, 9)
    assert there.meta == transform_detections(calibrated(), pose()).meta
    few = propagate(calibrated()[:0], torch.zeros(0, 1), torch.zeros(0, 1, 9), {"half": "w"})
    assert (few.scale.shape, few.dof.tolist()) == ((0, 1), [4.0])


def test_unknown_errors_of_velocities_spoil_no_other_field() -> None:
    found = calibrated()
    predictive = found.predictive.clone()
    predictive[:, 7:] = predictive[:, :, 7:] = torch.nan
    there = transform_detections(replace(found, predictive=predictive), pose())
    whole = transform_detections(found, pose())
    torch.testing.assert_close(there.predictive[:, :7, :7], whole.predictive[:, :7, :7])
    assert bool(there.predictive[:, 7:].isnan().all())
