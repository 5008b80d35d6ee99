"""A small network overfits a scene and finds its boxes: all parts use the same coordinates."""

from __future__ import annotations

from dataclasses import replace
from math import pi

import pytest
import torch

from boxcov.detectors.centerpoint import CenterPoint
from boxcov.detectors.centerpoint.config import Dense, Pillars, Reporting, Voxels
from helpers.centerpoint_cases import pillar_config, voxel_config

TASKS = (("car",), ("pedestrian", "cone"))


def scene(config):
    """Three boxes full of points, off the diagonal, so that x and y cannot be confused."""
    reach = config.point_range[3]
    boxes = torch.tensor(
        [
            [0.6 * reach, -0.5 * reach, -1.0, 0.25 * reach, 0.5 * reach, 1.5, 0.4, 3.0, -1.0],
            [-0.7 * reach, 0.1 * reach, -0.5, 0.1 * reach, 0.15 * reach, 1.8, -2.0, 0.0, 1.0],
            [
                0.2 * reach,
                0.7 * reach,
                -0.8,
                0.1 * reach,
                0.1 * reach,
                1.0,
                1.5,
                float("nan"),
                float("nan"),
            ],
        ]
    )
    generator = torch.Generator().manual_seed(0)
    points = []
    for x, y, z, w, l, h, yaw, *_ in boxes.tolist():
        along, across, up = (torch.rand(3, 120, generator=generator) - 0.5) * torch.tensor(
            [[l], [w], [h]]
        )
        yaw = torch.tensor(yaw)
        xyz = torch.stack(
            [
                x + along * yaw.cos() - across * yaw.sin(),
                y + along * yaw.sin() + across * yaw.cos(),
                z + up,
            ],
            1,
        )
        points.append(torch.cat([xyz, along.unsqueeze(1), torch.zeros(120, 1)], 1))
    return torch.cat(points), {"boxes": boxes, "labels": torch.tensor([0, 1, 2])}


@pytest.mark.parametrize("kind", ["pillar", "voxel"])
def test_a_network_overfits_a_scene(kind):
    rules = Reporting(threshold=0.3, radii=(4.0, 1.0))
    if kind == "pillar":
        dense = Dense(
            widths=(16, 24),
            layers=(1, 1),
            strides=(2, 2),
            up_widths=(16, 16),
            up_strides=(1, 2),
            shared=24,
            branch=16,
        )
        config = pillar_config(encoder=Pillars(widths=(16,)), dense=dense)
    else:
        dense = Dense(
            widths=(16, 24),
            layers=(1, 1),
            strides=(1, 2),
            up_widths=(16, 16),
            up_strides=(1, 2),
            shared=24,
            branch=16,
        )
        config = voxel_config(encoder=Voxels(widths=(8, 8, 12, 16)), dense=dense)
    config = replace(config, tasks=TASKS, reporting=rules)
    detector = CenterPoint(config)
    points, targets = scene(config)
    optimiser = torch.optim.Adam(detector.parameters(), 1e-2)
    encoded = detector.encode([targets], torch.zeros(1))
    for step in range(150):
        # the norms' statistics of this one scene, in the end
        for module in detector.train().modules():
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
                module.momentum = 0.3
        for group in optimiser.param_groups:
            group["lr"] = 1e-2 * (1 - step / 150)
        loss = detector.loss(detector([points]), encoded).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    found = detector.eval().detect([points])
    assert sorted(found.labels.tolist()) == [0, 1, 2]
    for box, label in zip(targets["boxes"], targets["labels"].tolist()):
        mine = found.boxes[found.labels == label][0]
        known = box.isfinite()
        off = (mine - box)[known].abs()
        off[6] = ((mine - box)[6] + pi).remainder(2 * pi).sub(pi).abs()
        assert float(off.max()) < 0.3
