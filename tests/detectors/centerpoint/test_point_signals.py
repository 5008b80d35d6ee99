"""Signals from points: equal to a brute-force reference, and they see where points end."""

from __future__ import annotations

from math import cos, floor, log, log1p, pi, sin

import numpy as np
import pytest
import torch

from boxcov.detectors.centerpoint import Config
from boxcov.detectors.centerpoint.point_signals import CELL, MARGIN, point_maps, point_signals

CONFIG = Config.small()
X0, Y0 = CONFIG.point_range[:2]


def maps_of(clouds):
    return torch.cat([point_maps(cloud, 0, 1, CONFIG) for cloud in clouds], 1)


def shell(box: list[float], count: int = 4000, seed: int = 0) -> torch.Tensor:
    """Return points on the four sides of a box x y z w l h yaw."""
    rng = np.random.default_rng(seed)
    x, y, z, w, l, h, yaw = box
    side = rng.integers(4, size=count)
    u, v = rng.uniform(-l / 2, l / 2, count), rng.uniform(-w / 2, w / 2, count)
    u = np.where(side == 0, l / 2, np.where(side == 1, -l / 2, u))
    v = np.where(side == 2, w / 2, np.where(side == 3, -w / 2, v))
    points = np.zeros((count, 5), np.float32)
    points[:, 0] = x + u * cos(yaw) - v * sin(yaw)
    points[:, 1] = y + u * sin(yaw) + v * cos(yaw)
    points[:, 2] = z + rng.uniform(-h / 2, h / 2, count)
    points[:, 4] = rng.choice([0.0, 0.1], count)
    return torch.tensor(points)


def reference(cloud: np.ndarray, box: list[float]) -> list[float]:
    """Return the numbers of one box and one set of points, by loops in float64."""
    x, y, z, w, l, h, yaw = box
    cells: dict[tuple[int, int], list[float]] = {}
    for px, py, pz in cloud[:, :3]:
        cells.setdefault((floor((px - X0) / CELL), floor((py - Y0) / CELL)), []).append(pz)
    area = (l + 2 * MARGIN) * (w + 2 * MARGIN) / (17 * 13 * CELL**2)
    inside = around = high_inside = depth = 0.0
    seen = []
    for a in np.linspace(-1, 1, 17):
        for c in np.linspace(-1, 1, 13):
            u, v = (l / 2 + MARGIN) * a, (w / 2 + MARGIN) * c
            px, py = x + u * cos(yaw) - v * sin(yaw), y + u * sin(yaw) + v * cos(yaw)
            heights = cells.get((floor((px - X0) / CELL), floor((py - Y0) / CELL)), [])
            n, top = len(heights) * area, max(heights, default=-1e3) - z
            is_inside = abs(u) < l / 2 and abs(v) < w / 2
            is_high = 0.25 - h / 2 < top < h / 2 + 2 * MARGIN
            inside += n * is_inside
            if is_high:
                seen.append((u, v, top))
                around += n * (not is_inside)
                high_inside += n * is_inside
                depth += n * is_inside * min(l / 2 - abs(u), w / 2 - abs(v))
    counts = [log1p(inside), log1p(around), log1p(high_inside)]
    if not seen:
        return [*counts, *[0.0] * 11]
    U, V, T = np.array(seen).T
    # the axes point away from the sensor
    U = U if x * cos(yaw) + y * sin(yaw) >= 0 else -U
    V = V if y * cos(yaw) - x * sin(yaw) >= 0 else -V
    su, sv = U.std(), V.std()
    return [
        *counts,
        *(U.max() - l / 2, (-U).max() - l / 2, V.max() - w / 2, (-V).max() - w / 2),
        T.max() - h / 2,
        *(U.mean() / l, V.mean() / w, log((su + 0.05) / l), log((sv + 0.05) / w)),
        *((U * V).mean() / (su * sv + 0.05), depth / max(high_inside, 1e-6)),
    ]


BOXES = [
    [10.03, 4.07, -1.0, 1.9, 4.6, 1.6, 0.3],
    [-20.0, -7.3, -0.8, 2.5, 9.0, 3.0, 2.0],
    [30.1, 0.1, -1.0, 0.7, 0.8, 1.7, -1.0],  # no points
]


def test_against_brute_force() -> None:
    ground = torch.rand(3000, 5) * torch.tensor([60.0, 30.0, 0.1, 1.0, 0.0])
    ground += torch.tensor([-30.0, -15.0, -1.9, 0.0, 0.0])
    cloud = torch.cat([shell(BOXES[0]), shell(BOXES[1], seed=1), ground])
    boxes = torch.tensor(BOXES, dtype=torch.float64)
    maps = maps_of([cloud.double()])
    found = torch.stack(
        list(point_signals(maps, boxes, torch.zeros(3, dtype=torch.long), CONFIG).values()), 1
    )
    points = cloud.double().numpy()
    for row, box in enumerate(BOXES):
        expected = [*reference(points, box), *reference(points[points[:, 4] < 0.06], box)]
        # a sample within rounding of a cell's border may fall to either side
        close = np.isclose(found[row].numpy(), expected, atol=2e-3)
        assert close.mean() > 0.85, (row, found[row].tolist(), expected)


def test_a_shifted_box_sees_points_beyond_its_side() -> None:
    box = BOXES[0]
    maps = maps_of([shell(box)])
    ahead = [*box]
    ahead[0] += 0.5 * cos(box[6])
    ahead[1] += 0.5 * sin(box[6])
    found = point_signals(maps, torch.tensor([box, ahead]), torch.zeros(2).long(), CONFIG)
    far, near = found["points all sweeps, far end"], found["points all sweeps, near end"]
    assert far[0] == pytest.approx(0, abs=0.4)
    assert float(far[1] - far[0]) == pytest.approx(-0.5, abs=0.4)
    assert float(near[1] - near[0]) == pytest.approx(0.5, abs=0.4)
    assert float(found["points all sweeps, mean along"][1]) < -0.05


@pytest.mark.parametrize("mirrored", [False, True])
def test_the_far_end_is_the_same_from_every_direction(mirrored: bool) -> None:
    """A box and its points, a quarter turn around the sensor, with its heading reversed."""
    box = BOXES[0]
    cloud = shell(box)
    cloud = cloud[cloud[:, 0] < box[0]]  # what the sensor sees
    turned, other = cloud.clone(), [*box]
    turned[:, 0], turned[:, 1] = -cloud[:, 1], cloud[:, 0]
    other[0], other[1], other[6] = -box[1], box[0], box[6] + pi / 2 + pi
    if mirrored:
        turned[:, 0], other[0], other[6] = -turned[:, 0], -other[0], pi - other[6]
    names = ("far end", "near end", "far side", "near side", "mean along", "mean across", "skew")
    one, two = (
        point_signals(maps_of([points]), torch.tensor([b]), torch.zeros(1).long(), CONFIG)
        for points, b in ((cloud, box), (turned, other))
    )
    for name in (f"points all sweeps, {n}" for n in names):
        assert float(one[name]) == pytest.approx(float(two[name]), abs=0.25), name
    assert float(one["points all sweeps, far end"]) < -1.0  # no points there
    assert abs(float(one["points all sweeps, near end"])) < 0.4


def test_frames_do_not_mix_and_nothing_is_required() -> None:
    cloud = shell(BOXES[0])
    nothing = cloud[:0]
    bad = torch.full((3, 5), torch.nan)
    far = torch.full((3, 5), 1e9)
    maps = maps_of([nothing, torch.cat([cloud, bad, far])])
    boxes = torch.tensor([BOXES[0], BOXES[0]])
    both = point_signals(maps, boxes, torch.tensor([0, 1]), CONFIG)
    alone = point_signals(maps_of([cloud]), boxes[:1], torch.tensor([0]), CONFIG)
    for name, values in both.items():
        assert values.isfinite().all(), name
        assert float(values[1]) == float(alone[name][0]), name
        assert float(values[0]) == 0, name
    empty = point_signals(maps, boxes[:0], torch.zeros(0).long(), CONFIG)
    assert list(empty) == list(both)
    edge = torch.tensor([[51.1, -51.1, 0.0, 2.0, 4.0, 1.5, 0.7], [900.0, 0, 0, 2, 4, 2, 0]])
    for values in point_signals(maps, edge, torch.tensor([1, 1]), CONFIG).values():
        assert values.isfinite().all()
