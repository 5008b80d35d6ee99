from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from math import pi
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from boxcov.data import kitti
from boxcov.data.kitti.camera import (
    from_camera,
    image_boxes,
    to_camera,
)
from boxcov.data.points import points_in_boxes
from boxcov.data.poses import Pose
from boxcov.errors import BoxcovError, BoxcovWarning
from helpers.data_roots import KITTI_LABELS, KITTI_POSE, KITTI_T, KITTI_TR, kitti_root, real

ALIGNED = Pose(
    torch.tensor([[0.0, -1, 0], [0, 0, -1], [1, 0, 0]]).double(),
    torch.tensor([0.1, -0.2, 0.3]).double(),
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return kitti_root(tmp_path / "set")


# reading


def test_frames_have_points_and_boxes_in_the_lidars_frame(root: Path) -> None:
    frames = kitti.frames(root)
    assert frames.tokens == ["000000", "000001"]
    (points,), (target,) = frames[0]
    assert points.shape == (8, 5)
    assert torch.allclose(points[:, 3], torch.linspace(0, 255, 8))
    assert bool((points[:, 4] == 0).all())
    assert [kitti.CLASSES[label] for label in target["labels"]] == ["Car", "Cyclist"]
    assert torch.allclose(
        target["boxes"][:, :3], points[[0, 2], :3], atol=1e-5
    )  # the points are the centres
    assert torch.allclose(target["boxes"][0, 3:6], torch.tensor([1.67, 3.64, 1.65]))
    assert float(target["boxes"][0, 6]) == pytest.approx(
        1.59 - pi / 2, abs=0.02
    )  # the sensors are aligned to a degree
    assert bool(target["boxes"][:, 7:].isnan().all())
    assert target["points"].tolist() == [1, 1]
    assert target["token"] == "000000"
    assert frames[1:].tokens == ["000001"]
    assert torch.equal(pickle.loads(pickle.dumps(frames))[1][0][0], points)


def test_types_in_another_case_are_refused(root: Path) -> None:
    """They would be left out as objects of other types are."""
    for path in (root / "training/label_2").iterdir():
        path.write_text(KITTI_LABELS.replace("Car ", "car "))
    with pytest.raises(BoxcovError, match=r"000000\.txt: .* 'car', .* class 'Car'"):
        kitti.frames(root)[0]
    assert len(kitti.frames(root, classes=["car"])[0][1][0]["labels"]) > 0


def test_all_types_on_request(root: Path) -> None:
    (car,) = kitti.frames(root, classes="Car")[0][1]  # a text is one class, not its letters
    assert car["labels"].tolist() == [0]
    (target,) = kitti.frames(root, classes=kitti.TYPES)[0][1]
    assert [kitti.TYPES[label] for label in target["labels"]] == ["Car", "Van", "Cyclist"]


def test_frames_without_objects_and_without_labels(root: Path) -> None:
    (root / "training/label_2/000000.txt").write_text("")
    assert kitti.frames(root)[0][1][0]["boxes"].shape == (0, 9)
    (root / "training").rename(root / "testing")
    for path in (root / "testing/label_2").iterdir():
        path.unlink()
    (root / "testing/label_2").rmdir()
    assert kitti.frames(root, split="testing")[1][1][0]["points"].shape == (0,)


# errors


def assert_fails(root: Path, *words: str, split: str = "training") -> None:
    with pytest.raises(BoxcovError) as caught:
        list(kitti.frames(root, split=split))
    for word in words:
        assert word in str(caught.value)


def test_missing_folders_and_files(root: Path) -> None:
    assert_fails(root / "nowhere", "nowhere", "no such folder")
    assert_fails(root, "testing", "no such folder", split="testing")
    for name in ("calib/000001.txt", "label_2/000001.txt"):
        path = root / "training" / name
        content = path.read_text()
        path.unlink()
        assert_fails(root, str(path), "no such file")
        path.write_text(content)
    (root / "training/label_2").rename(root / "elsewhere")
    assert_fails(root, "label_2", "no such folder")
    (root / "training/velodyne").rename(root / "points")
    (root / "training/velodyne").mkdir()
    (root / "elsewhere").rename(root / "training/label_2")
    assert_fails(root, "velodyne", "no .bin file")


@pytest.mark.parametrize(
    "line",
    [
        "Car 0 0 0 1 2 3 4 1.5 1.6 3.9 1 2",
        "Car 0 0 0 1 2 3 4 1.5 1.6 3.9 1 2 3 0 0.9 7",
        "Car 0 0 0 1 2 3 4 1.5 tall 3.9 1 2 3 0",
        "Car 0 0 0 1 2 3 4 1.5 nan 3.9 1 2 3 0",
        "Car 0 0 0 1 2 3 4 1.5 0.0 3.9 1 2 3 0",
        "Car",
    ],
)
def test_malformed_labels(root: Path, line: str) -> None:
    path = root / "training/label_2/000001.txt"
    path.write_text(f"{KITTI_LABELS}{line}\n")
    assert_fails(root, f"{path}, line 5", repr(line))


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "",
        lambda text: text.replace("P2", "P3"),
        lambda text: text[:-40],
        lambda t: t.replace("e", "x"),
    ],
)
def test_damaged_calibrations(root: Path, change: Callable[[str], str]) -> None:
    path = root / "training/calib/000000.txt"
    path.write_text(change(path.read_text()))
    assert_fails(root, str(path), "no line", "numbers")


def test_calibrations_without_a_rotation_are_refused(root: Path) -> None:
    path = root / "training/calib/000000.txt"
    path.write_text(re.sub("R0_rect: .*", "R0_rect:" + " 0.0" * 9, path.read_text()))
    assert_fails(root, str(path), "not a rotation")


def test_a_calibration_the_other_way_round_is_refused(root: Path) -> None:
    path = root / "training/calib/000000.txt"
    R = KITTI_TR.inv().as_matrix()
    inverse = np.column_stack([R, -R @ KITTI_T]).ravel()
    words = " ".join(map(str, inverse))
    path.write_text(re.sub("velo_to_cam: .*", f"velo_to_cam: {words}", path.read_text()))
    assert_fails(root, str(path), "do not lead from a LiDAR", "is it the inverse")


def test_intensities_of_another_data_set_are_refused(root: Path) -> None:
    path = root / "training/velodyne/000000.bin"
    points = np.fromfile(path, np.float32).reshape(-1, 4)
    points[:, 3] *= 255
    points.tofile(path)
    assert_fails(root, str(path), "the intensity is not between 0 and 1")


def test_damaged_point_files(root: Path) -> None:
    path = root / "training/velodyne/000000.bin"
    path.write_bytes(path.read_bytes()[:-3])
    assert_fails(root, str(path), "125 bytes", "16 bytes")
    path.write_bytes(b"")
    assert_fails(root, str(path), "empty")


def test_nan_points_are_dropped_with_a_warning(root: Path) -> None:
    path = root / "training/velodyne/000000.bin"
    points = np.fromfile(path, dtype=np.float32).reshape(-1, 4)
    points[6, 2] = np.nan
    points.tofile(path)
    with pytest.warns(BoxcovWarning, match=re.escape(f"{path}: 1 of 8 points")):
        (cloud,), _ = kitti.frames(root)[0]
    assert len(cloud) == 7


# the camera's boxes


def lidar_boxes(count: int = 6) -> Tensor:
    boxes = torch.randn(count, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    boxes[:, 0] = 20 + 5 * boxes[:, 0]
    boxes[:, 3:6] = boxes[:, 3:6].abs() + 0.5
    return boxes


def test_rotation_y_of_aligned_sensors() -> None:
    boxes = lidar_boxes()
    rows, _ = to_camera(boxes, ALIGNED)
    assert torch.allclose(
        ((rows[:, 6] + boxes[:, 6] + pi / 2) / 2).sin(), torch.zeros(6).double(), atol=1e-12
    )
    assert torch.allclose(rows[:, 3], 0.1 - boxes[:, 1])
    assert torch.allclose(
        rows[:, 4], -0.2 - boxes[:, 2] + boxes[:, 5] / 2
    )  # the bottom, and y points down


@pytest.mark.parametrize("pose", [ALIGNED, KITTI_POSE])
@pytest.mark.parametrize("convert", [to_camera, from_camera])
def test_jacobians_are_those_of_autograd(
    pose: Pose, convert: Callable[[Tensor, Pose], tuple[Tensor, Tensor]]
) -> None:
    boxes = lidar_boxes()
    values = boxes if convert is to_camera else to_camera(boxes, pose)[0]
    _, J = convert(values, pose)
    for row, value in enumerate(values):
        exact = torch.autograd.functional.jacobian(lambda v: convert(v[None], pose)[0][0], value)
        assert torch.allclose(J[row], exact, atol=1e-12)


def test_there_and_back() -> None:
    boxes = lidar_boxes()
    rows, J = to_camera(boxes, ALIGNED)
    back, J_back = from_camera(rows, ALIGNED)
    assert torch.allclose(back, boxes, atol=1e-12)
    assert torch.allclose(J_back @ J, torch.eye(7).double().expand(6, 7, 7), atol=1e-12)
    back, _ = from_camera(to_camera(boxes, KITTI_POSE)[0], KITTI_POSE)
    assert torch.allclose(back[:, :6], boxes[:, :6], atol=1e-9)
    assert torch.allclose(back[:, 6], boxes[:, 6], atol=2e-3)  # two planes a degree apart


def test_image_boxes_at_the_edges() -> None:
    P2 = torch.tensor([[700.0, 0, 600, 0], [0, 700, 180, 0], [0, 0, 1, 0]]).double()
    behind, left, passing = torch.tensor(
        [[2.0, 2, 2, 0, 1, -9, 0], [2.0, 2, 2, -90, 1, 10, 0], [2.0, 2, 20, 3, 1, 0, -pi / 2]],
        dtype=torch.float64,
    )[:, None]
    assert image_boxes(behind, P2, 1242, 375).tolist() == [[0, 0, 0, 0]]
    assert image_boxes(left, P2, 1242, 375)[0, [0, 2]].tolist() == [0, 0]
    # of a lorry to the right only the front corners, 10 m ahead, can be projected
    assert torch.allclose(
        image_boxes(passing, P2, 1242, 375), torch.tensor([[740.0, 110, 880, 250]]).double()
    )


# on real frames


def test_real_frames_and_boxes() -> None:
    frames = kitti.frames(real("kitti"), classes=kitti.TYPES)
    boxes, filled, beside = 0, 0, 0
    for (points,), (target,) in frames:
        boxes += len(target["boxes"])
        filled += int((target["points"] > 0).sum())
        elsewhere = target["boxes"].clone()
        elsewhere[:, 1] += 2 * elsewhere[:, 4]  # off by two lengths there is less
        beside += int(points_in_boxes(points, elsewhere).sum() < target["points"].sum())
    assert len(frames) == 77
    assert boxes == 356
    assert filled == boxes
    assert beside >= 0.9 * len(frames)
