"""Simulated drives: frames as of ``frames``, a world that holds together, and traffic."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from boxcov.data import simulated
from boxcov.data.points import count_points
from boxcov.data.poses import wrap_angle
from boxcov.data.simulated import Drive
from boxcov.data.simulated.scene import outlines, overlap
from boxcov.data.simulated.sensor import TOLERANCE
from boxcov.errors import BoxcovError


@pytest.fixture(scope="module")
def drive() -> Drive:
    return simulated.sequences(seed=5, count=7, sweeps=1)[6]


@pytest.fixture(scope="module")
def targets(drive: Drive) -> list[dict[str, Tensor]]:
    return [target[0] for _, target in drive]


def in_world(drive: Drive, item: int, boxes: Tensor) -> Tensor:
    """Return boxes (n, 9) in the world's axes."""
    pose = drive.pose(item)
    boxes = boxes.double()
    turn = torch.atan2(pose.R[1, 0], pose.R[0, 0])
    velocity = boxes[:, 7:] @ pose.R[:2, :2].T
    return torch.cat(
        [pose(boxes[:, :3]), boxes[:, 3:6], wrap_angle(boxes[:, 6:7] + turn), velocity], 1
    )


def tracks(drive: Drive, targets: list[dict[str, Tensor]]) -> dict[int, dict[int, Tensor]]:
    """Return the boxes of each identity in the world, by frame."""
    found: dict[int, dict[int, Tensor]] = {}
    for item, target in enumerate(targets):
        for number, box in zip(target["ids"].tolist(), in_world(drive, item, target["boxes"])):
            found.setdefault(number, {})[item] = box
    return found


def equal(one: object, other: object, ids: bool = True) -> bool:
    """Return whether two frames have the same bytes."""
    (points, target), (other_points, other_target) = one, other  # type: ignore[misc]
    keys = ["boxes", "labels", "points"] + ["ids"] * ids
    same = all(torch.equal(target[0][key], other_target[0][key]) for key in keys)
    return same and torch.equal(points[0], other_points[0])


@pytest.mark.parametrize("scenario", ["clear", "rain", "unseen"])
def test_a_drive_starts_as_the_frame_of_frames(scenario: str):
    drive = simulated.sequences(scenario, seed=3, count=2, seconds=1, sweeps=3)[1]
    assert equal(drive[0], simulated.frames(scenario, seed=3, count=2, sweeps=3)[1], ids=False)
    torch.testing.assert_close(drive.pose(0).R, torch.eye(3).double())
    torch.testing.assert_close(drive.pose(0).t, torch.zeros(3).double())


def test_frames_at_2_hz_are_among_those_at_10_hz():
    slow = simulated.sequences(seed=4, count=1, seconds=2, sweeps=2)[0]
    fast = simulated.sequences(seed=4, count=1, seconds=2, rate=10, sweeps=2)[0]
    assert (len(slow), len(fast)) == (4, 20)
    assert equal(slow[3], fast[15])
    assert slow.timestamp(3) == fast.timestamp(15) == 1_500_000
    assert not equal(fast[15], fast[14])


def test_same_seeds_give_the_same_bytes(drive: Drive):
    again = simulated.sequences(seed=5, count=9, sweeps=1)[6]
    assert equal(drive[25], again[25])
    other = simulated.sequences(seed=6, count=9, sweeps=1)[6]
    assert not equal(drive[0], other[0])


def test_standing_objects_stay_in_the_world(drive: Drive, targets: list[dict[str, Tensor]]):
    still = drive.world.states[:, :, 3].amax(0) == 0
    checked = 0
    for number, boxes in tracks(drive, targets).items():
        if still[number] and len(boxes) > 1:
            rows = torch.stack(list(boxes.values()))
            rows[:, 6] = wrap_angle(rows[:, 6] - rows[0, 6])
            assert float((rows - rows[0]).abs().max()) < 2e-4  # float32 at 50 m
            checked += 1
    assert checked > 20


def test_points_and_boxes_agree_in_later_frames(drive: Drive):
    points, target = drive[30]
    boxes = target[0]["boxes"].clone()
    boxes[:, 3:6] += 2 * TOLERANCE
    assert torch.equal(count_points(points[0], boxes), target[0]["points"])
    assert float(points[0][:, 2].median()) < -1.0  # the ground below the sensor, also after a hill


def test_velocities_are_those_of_the_positions():
    drive = simulated.sequences(seed=5, count=1, seconds=3, rate=10, sweeps=1)[0]
    every = tracks(drive, [target[0] for _, target in drive])
    errors = []
    for boxes in every.values():
        for item, box in boxes.items():
            if item - 1 in boxes:
                errors.append((box[:2] - boxes[item - 1][:2]) / 0.1 - box[7:])
    gap = torch.stack(errors).norm(dim=1)
    # a step is a chord, the velocity a tangent
    assert float(gap.quantile(0.99)) < 0.2
    assert float(gap.median()) < 1e-2


def test_identities_keep_class_and_size(drive: Drive, targets: list[dict[str, Tensor]]):
    seen: dict[int, tuple[int, Tensor]] = {}
    for target in targets:
        ids = target["ids"]
        assert len(ids.unique()) == len(ids)
        for number, label, box in zip(ids.tolist(), target["labels"].tolist(), target["boxes"]):
            first = seen.setdefault(number, (label, box[3:6]))
            assert first[0] == label
            assert torch.equal(first[1], box[3:6])


def test_objects_appear_leave_and_hide(drive: Drive, targets: list[dict[str, Tensor]]):
    frames_of = [set(target["ids"].tolist()) for target in targets]
    assert frames_of[-1] - frames_of[0]
    assert frames_of[0] - frames_of[-1]
    hidden = [
        number
        for number in set().union(*frames_of)
        for k in range(1, len(targets) - 1)
        if number in frames_of[k - 1] and number in frames_of[k + 1] and number not in frames_of[k]
    ]
    assert len(hidden) > 3


def test_traffic_turns_brakes_and_the_ego_car_drives():
    turned = braked = driven = 0
    drives = simulated.sequences(seed=1, count=3, sweeps=1)
    for drive in drives:
        states = drive.world.states
        turned += int(((states[-1, :, 2] - states[0, :, 2]).abs() > 1).sum())
        slower = states[:-20, :, 3] - states[20:, :, 3]  # in 2 s
        braked += int((slower.amax(0) > 3).sum())
        driven += int((states[-1, 0, :2] - states[0, 0, :2]).norm() > 20)
    assert (turned > 10, braked > 20, driven) == (True, True, 3)


def test_nothing_overlaps_at_any_time(drive: Drive):
    states, half = drive.world.states, outlines(drive.world.street).double()
    half[0] = torch.tensor([1.0, 2.4])
    for state in states[::5]:
        pairs = overlap(state[:, :3], half, state[:, :3], half).fill_diagonal_(False)
        assert not pairs.any()


def test_a_part_of_a_drive_keeps_its_times_and_poses(drive: Drive):
    part = drive[10:20]
    assert len(part) == 10
    assert part.timestamp(0) == drive.timestamp(10) == 5_000_000
    assert torch.equal(part.pose(3).t, drive.pose(13).t)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scenario": "snow"}, "unknown scenario"),
        ({"seed": -1}, "seed must be"),
        ({"count": 1.5}, "count must be"),
        ({"rate": 3}, "rate must be 1, 2, 5, 10 frames per second"),
        ({"seconds": 0.1}, "seconds must be from 0.5"),
        ({"seconds": float("nan")}, "seconds must be"),
        ({"sweeps": 0}, "sweeps must be"),
    ],
)
def test_bad_settings_are_named(options: dict[str, object], message: str):
    with pytest.raises(BoxcovError, match=message):
        simulated.sequences(**options)  # type: ignore[arg-type]
