"""The fused network equals the detector's own up to rounding, with fixed shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from boxcov._torch.modules import fingerprint
from boxcov.detectors.centerpoint import Config
from boxcov.detectors.centerpoint.fused_network import FusedCenterPoint
from boxcov.detectors.centerpoint.voxels import VoxelGrid, concatenate, voxelise, voxelise_padded
from helpers.centerpoint_cases import cloud, detector_of, pillar_config, voxel_config


def both(config: Any, example: list[Tensor], inputs: list[Tensor]) -> tuple[Any, Any, Tensor]:
    """Raw outputs of the detector and of its fused network, and what the latter left off."""
    detector = detector_of(config).double()
    packed = FusedCenterPoint(detector, example).pack(inputs)
    assert packed is not None
    with torch.no_grad():
        raw, excess = FusedCenterPoint(detector, example)(*packed)
        return detector(inputs), raw, excess


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found["features"], expected["features"], rtol=1e-9, atol=1e-9)
    for mine, task in zip(found["tasks"], expected["tasks"]):
        assert list(mine) == list(task)
        for name in task:
            torch.testing.assert_close(mine[name], task[name], rtol=1e-9, atol=1e-9)


def unlimited_config() -> Config:
    """Pillars as in OpenPCDet: of any number of points, without padding."""
    limits = {"padded": False, "max_points": None, "max_cells": None, "any_height": True}
    config = pillar_config()
    return replace(config, encoder=replace(config.encoder, **limits))  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [pillar_config, voxel_config, unlimited_config])
@pytest.mark.parametrize("frames", [1, 3])
def test_raw_outputs(make: Any, frames: int) -> None:
    config = make()
    example = [cloud(config, seed).double() for seed in range(frames)]
    inputs = [cloud(config, 7 + seed).double() for seed in range(frames)]
    inputs[-1] = inputs[-1][: 9 if frames > 1 else None]
    expected, found, excess = both(config, example, inputs)
    assert int(excess) == 0
    assert_same(found, expected)


def test_maps_of_points() -> None:
    config = pillar_config()
    detector, inputs = detector_of(config), [cloud(config, 1), cloud(config, 2)]
    network = FusedCenterPoint(detector, inputs)
    packed, maps = network.pack(inputs), detector.signal_inputs(inputs)
    assert packed is not None
    assert maps is not None
    own = network.signal_inputs(*packed)
    assert torch.equal(own[..., 1:-1, 1:-1], maps[..., 1:-1, 1:-1])  # padding is at the border


def test_the_detector_stays_as_it_was() -> None:
    config = pillar_config()
    detector = detector_of(config)
    detector.head.train()
    before, modes = fingerprint(detector), [module.training for module in detector.modules()]
    FusedCenterPoint(detector, [cloud(config, 0)])
    assert fingerprint(detector) == before
    assert [module.training for module in detector.modules()] == modes


@pytest.mark.parametrize("make", [pillar_config, voxel_config])
def test_inputs_beyond_the_limits(make: Any) -> None:
    config = make()
    network = FusedCenterPoint(detector_of(config), [cloud(config, 0, count=100)])
    assert network.pack([cloud(config, 1, count=300)]) is None
    assert network.pack([cloud(config, 1, count=9)] * 2) is None
    packed = network.pack([cloud(config, 0, count=100)])
    assert packed is not None
    assert int(network(*packed)[1]) == 0
    # the same points, but in the example all of them were in one cell
    same = cloud(config, 0, count=100).clone()
    same[:, :3] = 0.05
    packed = FusedCenterPoint(detector_of(config), [same]).pack([cloud(config, 0, count=100)])
    assert packed is not None
    assert int(FusedCenterPoint(detector_of(config), [same])(*packed)[1]) > 0


@pytest.mark.parametrize("frames", [1, 2])
def test_a_cells_limit_counts_frame_by_frame(frames: int) -> None:
    grid = VoxelGrid((0, 0, 0, 8, 1, 1), (1, 1, 1), (8, 1, 1), max_points=2, max_cells=3)
    points = torch.zeros(8, 5)
    points[:, 0] = torch.tensor([0.5, 1.5, 2.5, 0.6, 0.7, 1.6, 9.0, torch.nan])
    clouds = [points] * frames
    cells, excess = voxelise_padded(*concatenate(clouds), grid, frames, most=10)
    expected = voxelise(clouds, grid)
    count, held = len(expected.points), len(expected.counts)
    assert int(excess) == 0
    assert torch.equal(cells.points[:count], expected.points)
    assert torch.equal(cells.cell[:count], expected.cell)
    assert set(cells.cell[count:].tolist()) == {10}
    assert torch.equal(cells.counts[:held], expected.counts)
    assert torch.equal(cells.position[:held], expected.position)
    assert int(voxelise_padded(*concatenate(clouds), grid, frames, most=2)[1]) == 3 * frames - 2
    narrow = replace(grid, max_cells=2)
    assert int(voxelise_padded(*concatenate(clouds), narrow, frames, most=10)[1]) == frames
