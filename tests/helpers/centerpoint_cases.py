"""Small CenterPoints and scenes for the tests: whole networks, on a few metres."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from boxcov.detectors.centerpoint import CenterPoint, Config
from boxcov.detectors.centerpoint.config import Dense, Pillars, Reporting, Voxels
from boxcov.detectors.centerpoint.loss import MapTargets

FEW = Reporting(threshold=0.05, max_boxes=2, centre_range=(-99, -99, -99, 99, 99, 99))


def pillar_config(**changes: object) -> Config:
    """12.8 m around the sensor, a map of 8 x 8 cells."""
    base = Config(
        point_range=(-6.4, -6.4, -5.0, 6.4, 6.4, 3.0),
        voxel_size=(0.4, 0.4, 8.0),
        encoder=Pillars(widths=(8,)),
        dense=Dense(widths=(4, 6, 8), layers=(1, 1, 1), up_widths=(4, 4, 4), shared=6, branch=5),
        reporting=FEW,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def voxel_config(**changes: object) -> Config:
    """6.4 m x 6.4 m of 0.1 m voxels, a map of 8 x 8 cells."""
    base = replace(
        Config.voxel(0.1),
        point_range=(-3.2, -3.2, -5.0, 3.2, 3.2, 3.0),
        encoder=Voxels(widths=(4, 4, 6, 6)),
        dense=Dense(
            widths=(6, 8),
            layers=(1, 1),
            strides=(1, 2),
            up_widths=(5, 5),
            up_strides=(1, 2),
            shared=6,
            branch=5,
        ),
        reporting=FEW,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def detector_of(config: Config, seed: int = 0, dtype: torch.dtype = torch.float32) -> CenterPoint:
    """Return a network with nontrivial norms, so that zeros do not stay zeros."""
    detector = CenterPoint(config, seed).to(dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in detector.modules():
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
                assert module.running_mean is not None
                assert module.running_var is not None
                module.running_mean.copy_(
                    0.1 * torch.randn(module.num_features, generator=generator)
                )
                module.running_var.copy_(0.5 + torch.rand(module.num_features, generator=generator))
                module.weight.copy_(
                    0.8 + 0.4 * torch.rand(module.num_features, generator=generator)
                )
                module.bias.copy_(0.3 + 0.3 * torch.rand(module.num_features, generator=generator))
    return detector


def cloud(config: Config, seed: int = 0, count: int = 400) -> Tensor:
    """Return points over the whole range, and some beyond."""
    generator = torch.Generator().manual_seed(seed)
    low, high = (torch.tensor(side) for side in (config.point_range[:3], config.point_range[3:]))
    middle, half = (low + high) / 2, (high - low) / 2
    xyz = middle + 1.1 * half * (2 * torch.rand(count, 3, generator=generator) - 1)
    return torch.cat([xyz, torch.rand(count, 2, generator=generator)], 1)


def target(config: Config, seed: int = 0, each: int = 2) -> dict[str, Tensor]:
    """``each`` boxes of every class on the map, some velocities unknown."""
    generator = torch.Generator().manual_seed(100 + seed)
    labels = torch.arange(len(config.classes)).repeat(each)
    n = len(labels)
    low, high = (torch.tensor(side) for side in (config.point_range[:2], config.point_range[3:5]))
    centre = low + (high - low) * torch.rand(n, 2, generator=generator)
    size = 0.5 + 3 * torch.rand(n, 3, generator=generator)
    rest = torch.randn(n, 3, generator=generator)
    rest[::7, 1:] = torch.nan
    z = torch.randn(n, 1, generator=generator)
    return {
        "boxes": torch.cat([centre, z, size, rest], 1)[:, : len(config.box_fields)],
        "labels": labels,
    }


def frames(config: Config, count: int = 2) -> list[tuple[list[Tensor], list[dict[str, Tensor]]]]:
    return [([cloud(config, i)], [target(config, i)]) for i in range(count)]


def slow_pillars(config: Config, layers: Iterable[Any], clouds: list[Tensor]) -> Tensor:
    """Encode pillar by pillar, padded with zeros, like the original code."""
    rules = config.encoder
    assert isinstance(rules, Pillars)
    nx, ny, _ = config.grid
    canvas = torch.zeros(len(clouds), rules.widths[-1], ny, nx, dtype=torch.float64)
    for b, points in enumerate(clouds):
        pillars: dict[tuple[int, int], list[list[float]]] = {}
        for point in points.tolist():
            x, y, z = (
                int((point[i] - config.point_range[i]) // config.voxel_size[i]) for i in range(3)
            )
            if not (0 <= x < nx and 0 <= y < ny and (z == 0 or rules.any_height)):
                continue
            if (x, y) not in pillars and rules.max_cells and len(pillars) >= rules.max_cells[1]:
                continue
            held = pillars.setdefault((x, y), [])
            if rules.max_points is None or len(held) < rules.max_points:
                held.append(point)
        for (x, y), held in pillars.items():
            p = torch.tensor(held, dtype=torch.float64)
            centre = torch.tensor(
                [
                    (i + 0.5) * s + r
                    for i, s, r in zip((x, y, 0), config.voxel_size, config.point_range)
                ]
            )
            from_centre = (p[:, :3] - centre)[:, : 3 if rules.centre_z else 2]
            rows = torch.cat([p, p[:, :3] - p[:, :3].mean(0), from_centre], 1)
            if rules.padded and rules.max_points:
                rows = F.pad(rows, (0, 0, 0, rules.max_points - len(rows)))
            for layer in layers:
                rows = layer.norm(layer.linear(rows)).relu()
                most = rows.amax(0)
                if not layer.last:
                    rows = torch.cat([rows, most.expand_as(rows)], 1)
            canvas[b, :, y, x] = most
    return canvas


def task_targets(encoded: MapTargets) -> list[SimpleNamespace]:
    """The targets of each task by itself, with labels among the classes of the task."""
    found, first = [], 0
    for task, size in enumerate(encoded.sizes):
        rows = encoded.task == task
        names = ("frame", "row", "column", "values")
        own = {name: getattr(encoded, name)[rows] for name in names}
        heat, label = encoded.heat[:, first : first + size], encoded.label[rows] - first
        found.append(SimpleNamespace(heat=heat, label=label, **own))
        first += size
    return found
