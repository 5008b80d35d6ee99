"""The numbers of studies/tracking.py on tracks with known errors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from boxcov.data import kitti, simulated
from boxcov.data.poses import Pose
from helpers.data_roots import kitti_root

pytest.importorskip("motmetrics", reason="motmetrics is not installed")
pytest.importorskip("stonesoup", reason="stonesoup is not installed")


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "studies"))
    import tracking_metrics

    yield tracking_metrics
    for name in ("tracking_metrics", "tracking_noise", "tracking_boxes", "tracking_real"):
        sys.modules.pop(name, None)


def drive_of(study: Any, frames: int) -> Any:
    """Two cars that stand at x = 0 and x = 10 in the world; the ego car drives 1 m per frame."""
    cars = torch.zeros(2, 9)
    cars[1, 0], cars[:, 6] = 10.0, 0.3
    pose = [Pose(torch.eye(3).double(), torch.tensor([k, 0, 0]).double()) for k in range(frames)]
    targets = []
    for k in range(frames):
        boxes = cars.clone()
        boxes[:, 0] -= k
        targets.append(
            {"boxes": boxes, "labels": torch.zeros(2).long(), "ids": torch.tensor([7, 8])}
        )
    return study.Drive("two cars", [], targets, pose, [0.5 * k for k in range(frames)])


def row(study: Any, frame: int, number: int, x: float, yaw: float = 0.3) -> Any:
    mean = np.array([x, 0, 0, 0, yaw])
    return study.Row(frame, number, 0, 0.9, mean, 0.04 * np.eye(5), 1.0)


def test_counts_of_units_sum_to_those_of_a_drive(study: Any) -> None:
    """A switch, misses, and a track of nothing."""
    drive = drive_of(study, 4)
    rows = [row(study, 0, 1, 0.1), row(study, 1, 1, 0.1), row(study, 2, 2, 0.1)]
    rows += [row(study, 1, 3, 10.1), *(row(study, k, 4, 40.0) for k in range(3))]
    result = study.accumulate(drive, rows, 0.5)
    whole, units = study.counts(result), study.unit_counts(result)
    assert study.total(units) == whole
    assert whole["num_switches"] == 1
    assert len(units) == 2 + 4
    switches = study.count_cell(lambda count: count["num_switches"], units, ".0f")
    assert switches == "1 [0, 3]"


def test_errors_are_those_in_the_world(study: Any):
    drive = drive_of(study, 2)
    rows = [row(study, 0, 1, 0.4), row(study, 1, 1, 0.0, yaw=0.3 + np.pi), row(study, 1, 2, 10.2)]
    found = study.pairs(drive, rows, 0.5)
    assert set(found) == {(0, 7), (1, 7), (1, 8)}
    assert found[0, 7]["nees"] == pytest.approx(0.4**2 / 0.04 / 5)
    assert found[0, 7]["position square"] == pytest.approx(0.16)
    normal = 0.5 * (0.4**2 / 0.04) + np.log(2 * np.pi * 0.04)
    assert found[0, 7]["position nll"] == pytest.approx(normal)
    assert found[1, 7]["heading square"] == pytest.approx(0, abs=1e-12)  # the axis


def test_switches_misses_and_false_tracks_are_counted(study: Any):
    drive = drive_of(study, 3)
    rows = [row(study, k, number, 0.1) for k, number in enumerate((1, 1, 2))]  # a switch
    rows += [row(study, k, 3, 10.0) for k in (0, 1)]  # a miss in the last frame
    rows += [row(study, 1, 4, 30.0)]  # a false track
    count = study.counts(study.accumulate(drive, rows, 0.5))
    wanted = {"num_objects": 6, "num_misses": 1, "num_false_positives": 1, "num_switches": 1}
    assert {name: count[name] for name in wanted} == wanted
    assert study.mota(count) == pytest.approx(1 - 3 / 6)
    assert study.counts(study.accumulate(drive, rows, 0.95))["num_misses"] == 6


def test_amota_averages_over_recalls(study: Any):
    def count(misses: int, false: int) -> dict[str, float]:
        names = ("num_objects", "num_misses", "num_false_positives", "num_switches")
        return dict(zip(names, (100.0, misses, false, 0)))

    perfect = {0.5: count(0, 0)}
    assert study.amota(perfect) == pytest.approx(1)
    half = {0.5: count(50, 0)}  # recall 0.5 without a false track
    assert study.amota(half) == pytest.approx(0.5)
    assert study.amota({0.5: count(100, 0)}) == 0
    # the first five recalls at the higher threshold, without false tracks
    both = {0.9: count(50, 0), 0.1: count(0, 20)}
    late = [1 - 20 / (r * 100) for r in (0.6, 0.7, 0.8, 0.9, 1.0)]
    assert study.amota(both) == pytest.approx((5 + sum(late)) / 10)


def test_a_kitti_drive_has_axes_and_velocities(study: Any, tmp_path: Path):
    """The objects keep their distance from an ego car that drives 5 m per frame, straight on."""
    import tracking_real

    (drive,) = kitti.sequences(kitti_root(tmp_path, frames=3), classes=kitti.TYPES, rate=5)
    turn = tracking_real.TO_KITTI.R.double()
    poses = [Pose(turn, torch.tensor([5.0 * k, 0, 0]).double()) for k in range(3)]
    real = tracking_real.RealDrive(drive, poses)
    (cloud,), (target,) = drive[1]
    (turned,), (found,) = real[1]
    torch.testing.assert_close(turned[:, 1], cloud[:, 0])  # y is ahead
    torch.testing.assert_close(found["boxes"][:, 1], target["boxes"][:, 0])
    velocity = torch.tensor([0.0, 25.0]).expand(len(found["boxes"]), 2)
    torch.testing.assert_close(found["boxes"][:, 7:], velocity, atol=1e-4, rtol=0)
    names = [kitti.TYPES[label] for label in target["labels"]]
    wanted = {"Car": "car", "Van": "car", "Cyclist": "bicycle"}
    assert [simulated.CLASSES[i] for i in found["labels"]] == [wanted[name] for name in names]
