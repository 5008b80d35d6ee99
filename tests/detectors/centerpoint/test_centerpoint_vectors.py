"""Numbers that the formulas of det3d, mmdetection3d and OpenPCDet give for small inputs.

The inputs are in each framework's own order. The expected numbers were worked out from its
published formulas, not by boxcov.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from math import exp, log, pi

import pytest
import torch

import boxcov
from boxcov.detectors import centerpoint
from boxcov.detectors.centerpoint.config import Loss, Reporting
from boxcov.detectors.centerpoint.decode import CellIndex
from boxcov.detectors.centerpoint.loss import encode, frame_losses, gaussian_radius
from boxcov.detectors.centerpoint.selection import select
from boxcov.detectors.centerpoint.voxels import VoxelGrid, voxelise
from helpers.centerpoint_cases import detector_of, pillar_config, task_targets
from helpers.centerpoint_files import assert_same_boxes, exported, saved

CONFIG = pillar_config()
ONE_TASK = replace(CONFIG, tasks=(("car",),))


# decoding

# raw outputs of dim and rot, as each framework orders them, of a car of 2 x 4 x 1.5 m at yaw 0.5
SIZE, YAW = (2.0, 4.0, 1.5), 0.5
SIN, COS = 0.479425538604203, 0.8775825618903728  # of the yaw
OLD = {"dim": (2.0, 4.0, 1.5), "rot": (-COS, -SIN)}  # w l h; sin and cos of -yaw - pi / 2
RAW = {
    "mmdet3d": {"dim": (4.0, 2.0, 1.5), "rot": (SIN, COS)},
    "mmdet3d before 1.0": OLD,
    "det3d": OLD,
    "openpcdet": {"dim": (4.0, 2.0, 1.5), "rot": (COS, SIN)},
}
BRANCHES = {
    "mmdet3d": "pts_bbox_head.task_heads.0.{}.1",
    "det3d": "bbox_head.tasks.0.{}.3",
    "openpcdet": "dense_head.heads_list.0.{}.1",
}


@pytest.mark.parametrize("family", RAW)
def test_a_car_is_decoded_from_each_familys_outputs(family, tmp_path):
    framework = family.partition(" ")[0]
    state = exported(detector_of(CONFIG), framework)
    raw = {
        "dim": [log(s) for s in RAW[family]["dim"]],
        "rot": RAW[family]["rot"],
        "vel": (3.0, 1.0),
    }
    raw |= {("center" if framework == "openpcdet" else "reg"): (0.25, 0.75)}
    raw |= {("center_z" if framework == "openpcdet" else "height"): (-0.5,)}
    for branch, values in raw.items():
        name = BRANCHES[framework].format(branch)
        state[f"{name}.weight"] = torch.zeros_like(state[f"{name}.weight"])
        state[f"{name}.bias"] = torch.tensor(values)
    legacy = {"mmdet3d": False, "mmdet3d before 1.0": True}.get(family)
    # mmdetection3d before 1.0 had 10 point features
    told = pytest.warns(boxcov.BoxcovWarning, match="11 point features")
    with told if legacy else nullcontext():
        detector = centerpoint.load(saved({"state_dict": state}, tmp_path), CONFIG, legacy=legacy)
    with torch.no_grad():
        tasks = detector([torch.zeros(0, 5)])
        one = torch.tensor([0])
        where = CellIndex(one, one, torch.tensor([3]), torch.tensor([5]))
        boxes = detector.decode(tasks, boxcov.Selection(one, torch.ones(1), one, where))
    # x = (5 + 0.25) * 1.6 - 6.4, y = (3 + 0.75) * 1.6 - 6.4
    assert_same_boxes(boxes, torch.tensor([[2.0, -0.4, -0.5, *SIZE, YAW, 3.0, 1.0]]), slack=1e-5)


# voxels


def test_a_voxel_holds_the_mean_of_its_first_points():
    points = torch.tensor([[0.1, 0.1, 0.1], [0.3, 0.1, 0.1], [0.9, 0.9, 0.9], [1.5, 0.1, 0.1]])
    cloud = torch.cat([points, torch.tensor([[8.0, 0], [4.0, 0.1], [100.0, 0.2], [1.0, 0.3]])], 1)
    cells = voxelise([cloud], VoxelGrid((0, 0, 0, 2, 1, 1), (1, 1, 1), (2, 1, 1), max_points=2))
    expected = [[0.2, 0.1, 0.1, 6.0, 0.05], [1.5, 0.1, 0.1, 1.0, 0.3]]
    torch.testing.assert_close(cells.means, torch.tensor(expected))


# NMS


def test_circle_nms_compares_squared_distances():
    """1.9 m apart: closer than the car's bound of 4 squared metres, so one of two is left."""
    heat = torch.full((1, 1, 8, 8), -9.0)
    heat[0, 0, 4, 4], heat[0, 0, 4, 5], heat[0, 0, 4, 7] = 2.0, 1.0, 0.5
    maps = {"heatmap": heat, "height": torch.zeros(1, 1, 8, 8), "dim": torch.zeros(1, 3, 8, 8)}
    maps |= {name: torch.zeros(1, 2, 8, 8) for name in ("reg", "rot", "vel")}
    maps["reg"][0, 0, 4, 5] = 0.3 / 1.6  # 1.6 m + 0.3 m away
    rules = Reporting(nms="circle", radii=(4.0,))
    found = select([maps], replace(ONE_TASK, reporting=rules))
    assert found.where.column.tolist() == [4, 7]  # the third is 4.8 m away
    maps["reg"][0, 0, 4, 5] = 0.5 / 1.6  # 2.1 m
    found = select([maps], replace(ONE_TASK, reporting=rules))
    assert found.where.column.tolist() == [4, 5, 7]


# targets


@pytest.mark.parametrize(
    ("size", "cell", "radius"),
    [
        ((4.6, 1.95), 0.8, 1.5720608587882898),  # a car on the maps of pillar02 and voxel01
        ((4.6, 1.95), 0.6, 2.0960811450510537),  # on that of voxel0075
        ((12.3, 2.9), 0.8, 2.965632024721968),
        ((12.3, 2.9), 0.6, 3.9541760329626245),
        ((0.7, 0.7), 0.6, 0.5045314540392886),
    ],
)
def test_gaussian_radii_of_known_objects(size, cell, radius):
    l, w = (torch.tensor([side / cell], dtype=torch.float64) for side in size)
    assert float(gaussian_radius(l, w)) == pytest.approx(radius, rel=1e-12)


def test_the_smallest_gaussian():
    """Radius 2, sigma 5 / 6, around the cell that holds the centre."""
    target = {"boxes": torch.zeros(1, 9) + 0.5, "labels": torch.tensor([0])}
    heat = encode([target], ONE_TASK, torch.zeros(1, dtype=torch.float64)).heat[0, 0]
    row = [0.05613476283413375, 0.48675225595997174, 1.0, 0.48675225595997174, 0.05613476283413375]
    torch.testing.assert_close(heat[4, 2:7], torch.tensor(row, dtype=torch.float64))
    assert float(heat[3, 3]) == pytest.approx(0.23692775868212182)
    assert float(heat[2, 2]) == pytest.approx(0.003151111598444444)
    assert int((heat > 0).sum()) == 25


# loss


@pytest.mark.parametrize(
    ("framework", "rotation", "velocity", "divisor"),
    [("mmdet3d", 1.0, 0.2, 2.0001), ("det3d", 1.0, 0.2, 2.0001), ("openpcdet", 0.2, 1.0, 2.0)],
)
def test_the_loss_of_two_cars(framework, rotation, velocity, divisor):
    """Maps that are right but for 1 in sin and cos of the yaw, and 1 in vx and vy."""
    config = replace(ONE_TASK, loss=Loss.of(framework))
    boxes = torch.zeros(2, 9, dtype=torch.float64) + 0.1
    boxes[:, 0] = torch.tensor([-3.0, 3.0])
    encoded = encode([{"boxes": boxes, "labels": torch.zeros(2).long()}], config, boxes[:1])
    task, start, maps = task_targets(encoded)[0], 0, {}
    for name, n in config.branches.items():
        maps[name] = torch.zeros(1, n, *config.map_size, dtype=torch.float64)
        values = task.values[:, start : start + n] + (1.0 if name in ("rot", "vel") else 0.0)
        maps[name][0, :, task.row, task.column] = values.T
        start += n
    maps["heatmap"] = torch.full_like(task.heat, -2.19)
    p = 1 / (1 + exp(2.19))
    at, away = -log(p) * (1 - p) ** 2, -log(1 - p) * p**2
    focal = (2 * at + float(((1 - task.heat) ** 4).sum()) * away) / 2
    regression = 0.25 * 2 * (2 * rotation + 2 * velocity) / divisor
    assert float(frame_losses([maps], encoded, config)) == pytest.approx(focal + regression)


def test_yaw_and_rotation_of_the_old_convention():
    """rot = -yaw - pi / 2, so its sine is -cos(yaw) and its cosine -sin(yaw)."""
    rot = torch.tensor(-YAW - pi / 2)
    assert OLD["rot"] == pytest.approx((float(rot.sin()), float(rot.cos())), abs=1e-6)
