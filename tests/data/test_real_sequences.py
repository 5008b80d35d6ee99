"""nuScenes scenes and KITTI drives as sequences: identities, times, ego poses, covariances."""

from __future__ import annotations

import shutil
from itertools import pairwise
from math import degrees
from pathlib import Path

import pytest
import torch
from scipy.spatial.transform import Rotation

from boxcov.data import kitti, nuscenes
from boxcov.data.poses import Pose, transform_detections
from boxcov.errors import BoxcovError
from helpers.data_roots import KEY_TIMES, kitti_root, nuscenes_root, random_detections, real

LATITUDE = 49.0


def drive_root(folder: Path, frames: int = 3) -> Path:
    """A KITTI drive to the north at 5 m per frame that turns to the left by 0.1 rad each."""
    root = kitti_root(folder, frames=frames)
    (root / "training/oxts").mkdir()
    mount = [0.0, -1.0, 0.0, 0.3, 1.0, 0.0, 0.0, -0.8, 0.0, 0.0, 1.0, 0.1]  # turned by 90 degrees
    for number in range(frames):
        path = root / f"training/calib/{number:06d}.txt"
        path.write_text(path.read_text() + f"Tr_imu_to_velo: {' '.join(map(str, mount))}\n")
        north = degrees(5.0 * number / 6378137.0)
        values = [LATITUDE + north, 8.0, 110.0 + number, 0.02, -0.01]
        rest = [1.5 + 0.1 * number, *[0.0] * 24]
        (root / f"training/oxts/{number:06d}.txt").write_text(
            " ".join(f"{v:.15f}" for v in values + rest)
        )
    return root


# nuScenes


def test_scenes_are_sequences_with_identities(tmp_path: Path):
    root = nuscenes_root(tmp_path / "set")
    (scene,) = nuscenes.sequences(root, sweeps=1)
    times = [scene.timestamp(item) for item in range(len(scene))]
    assert [round(1e-6 * (t - times[0]), 3) for t in times] == list(KEY_TIMES)
    ids = [target["ids"].tolist() for _, (target,) in scene]
    assert all(len(set(frame)) == len(frame) for frame in ids)
    car = {i for frame, (_, (t,)) in zip(ids, scene) for i, k in zip(frame, t["labels"]) if k == 0}
    assert len(car) == 1


def test_real_barriers_stand_still_in_the_world():
    (scene,) = nuscenes.sequences(real("nuscenes"), sweeps=1)
    assert len(scene) == 40
    places: dict[int, list[torch.Tensor]] = {}
    for item in range(0, 40, 3):
        target = scene[item][1][0]
        found = random_detections(target["boxes"].nan_to_num(), target["labels"], nuscenes.CLASSES)
        boxes = transform_detections(found, scene.pose(item)).boxes
        barrier = nuscenes.CLASSES.index("barrier")
        for number, label, box in zip(target["ids"].tolist(), target["labels"], boxes):
            if label == barrier:
                places.setdefault(number, []).append(box)
    # in the plane: nuScenes' ego poses have no height
    moved = [float((torch.stack(p) - p[0])[:, :2].norm(dim=1).max()) for p in places.values()]
    assert len(moved) > 30
    assert sorted(moved)[len(moved) // 2] < 0.3  # annotators drew each frame by hand
    assert max(moved) < 2.0


# KITTI


def test_a_drive_has_identities_and_times(tmp_path: Path):
    (drive,) = kitti.sequences(drive_root(tmp_path), rate=5)
    ids = [target["ids"].tolist() for _, (target,) in drive]
    assert ids == [[0, 2]] * 3  # Car and Cyclist; the Van is 1
    assert [drive.timestamp(item) for item in range(3)] == [0, 200_000, 400_000]
    assert drive[1:].timestamp(0) == 200_000


def test_times_of_a_drive_count_the_frames_that_are_missing(tmp_path: Path):
    root = drive_root(tmp_path)
    (root / "training/velodyne/000001.bin").unlink()
    (drive,) = kitti.sequences(root)
    assert [drive.timestamp(item) for item in range(2)] == [0, 200_000]
    (root / "training/velodyne/000002.bin").rename(root / "training/velodyne/last.bin")
    with pytest.raises(BoxcovError, match="'last' is no number"):
        kitti.sequences(root)


def test_ego_poses_of_a_drive_are_those_of_its_inertial_system(tmp_path: Path):
    (drive,) = kitti.sequences(drive_root(tmp_path))
    mount = Rotation.from_euler("z", 90, degrees=True)  # from the inertial system to the LiDAR
    for item in range(3):
        pose = drive.pose(item)
        turn = Rotation.from_euler("ZYX", [1.5 + 0.1 * item, -0.01, 0.02])
        expected = (turn * mount.inv()).as_matrix()
        torch.testing.assert_close(pose.R, torch.from_numpy(expected), atol=1e-9, rtol=0)
        lidar = mount.inv().apply([-0.3, 0.8, -0.1])  # its origin in the inertial system
        place = torch.from_numpy(turn.apply(lidar)) + torch.tensor([0.0, 5.0 * item, item])
        torch.testing.assert_close(pose.t, place, atol=1e-4, rtol=0)


def test_a_drive_without_ego_poses_says_what_is_missing(tmp_path: Path):
    (drive,) = kitti.sequences(kitti_root(tmp_path / "none"))
    assert len(drive[0][1][0]["ids"]) == 2
    with pytest.raises(BoxcovError, match="oxts: no such folder: the ego poses"):
        drive.pose(0)
    root = drive_root(tmp_path / "part")
    (root / "training/oxts/000001.txt").unlink()
    (drive,) = kitti.sequences(root)
    with pytest.raises(BoxcovError, match=r"oxts/000001.txt: no such file"):
        drive.pose(1)
    (root / "training/oxts/000001.txt").write_text("49 8 110")
    with pytest.raises(BoxcovError, match="expected 30 numbers"):
        drive.pose(1)


def test_a_drive_without_labels_has_times_and_poses(tmp_path: Path):
    root = drive_root(tmp_path)
    (root / "training").rename(root / "testing")
    shutil.rmtree(root / "testing/label_2")
    (drive,) = kitti.sequences(root, split="testing")
    (target,) = drive[1][1]
    assert (target["boxes"].shape, target["ids"].tolist()) == ((0, 9), [])
    assert drive.timestamp(1) == 100_000
    assert float(drive.pose(1).t[2] - drive.pose(0).t[2]) == pytest.approx(1.0, abs=0.1)


def test_frames_of_several_drives_have_no_identities(tmp_path: Path):
    root = drive_root(tmp_path)
    path = root / "training/label_2/000001.txt"
    first = path.read_text().splitlines()[0]
    path.write_text(f"{first}\n{first}\n")
    with pytest.raises(BoxcovError, match=r"000001\.txt: two objects"):
        kitti.sequences(root)[0][0]


def test_real_drive_keeps_its_identities():
    (drive,) = kitti.sequences(real("kitti"), classes=kitti.TYPES, rate=5)
    seen: dict[int, list[torch.Tensor]] = {}
    for _, (target,) in drive:
        for number, box in zip(target["ids"].tolist(), target["boxes"]):
            seen.setdefault(number, []).append(box)
    assert (len(drive), len(seen)) == (77, 15)
    assert max(map(len, seen.values())) == 77  # the van ahead
    steps = [float((b - a)[:2].norm()) for boxes in seen.values() for a, b in pairwise(boxes)]
    assert max(steps) < 8.0  # metres in 0.2 s or across an occlusion: one object, not two


# covariances in the world


def test_covariances_in_the_world_match_finite_differences():
    generator = torch.Generator().manual_seed(3)
    R = torch.from_numpy(Rotation.from_euler("zyx", [1.2, 0.03, -0.02]).as_matrix())
    pose = Pose(R, torch.tensor([600.0, -1500.0, 3.0]).double())
    boxes = torch.randn(4, 9, generator=generator).double() * 5
    boxes[:, 3:6] = boxes[:, 3:6].abs() + 0.5
    found = random_detections(boxes, torch.zeros(4, dtype=torch.long), ("car",))
    moved = transform_detections(found, pose)

    def carry(box: torch.Tensor) -> torch.Tensor:
        """Carry a box by its points: the centre, one ahead, and the end of the velocity."""
        ahead = box[:3] + torch.stack([box[6].cos(), box[6].sin(), torch.zeros(()).double()])
        later = box[:3] + torch.cat([box[7:], torch.zeros(1).double()])
        centre, ahead, later = pose(torch.stack([box[:3], ahead, later]))
        heading = ahead - centre
        yaw = torch.atan2(heading[1], heading[0])
        return torch.cat([centre, box[3:6], yaw[None], (later - centre)[:2]])

    assert found.covariance is not None
    assert moved.covariance is not None
    for i, box in enumerate(boxes):
        torch.testing.assert_close(moved.boxes[i], carry(box))
        steps = 1e-5 * torch.eye(9).double()
        J = torch.stack([(carry(box + s) - carry(box - s)) / 2e-5 for s in steps], 1)
        expected = J @ found.covariance[i] @ J.T
        torch.testing.assert_close(moved.covariance[i], expected, rtol=1e-6, atol=1e-8)
