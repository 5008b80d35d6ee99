"""Rotated overlap against shapely, suppression against the plain greedy loop."""

from __future__ import annotations

from math import pi

import pytest
import torch

from boxcov.detectors.boxes import rotated_intersection
from boxcov.detectors.nms import (
    circle_pairs,
    greedy_nms,
    rotated_iou,
    rotated_pairs,
)


def rotated_nms(boxes, valid, overlap):
    return greedy_nms(*rotated_pairs(boxes, valid, overlap), valid)


def circle_nms(centres, valid, bound):
    return greedy_nms(*circle_pairs(centres, valid, bound), valid)


def polygon(box):
    affinity = pytest.importorskip("shapely.affinity")
    geometry = pytest.importorskip("shapely.geometry")
    x, y, w, length, yaw = box
    plain = geometry.box(-length / 2, -w / 2, length / 2, w / 2)
    return affinity.translate(affinity.rotate(plain, yaw, origin=(0, 0), use_radians=True), x, y)


def shapely_iou(a, b):
    one, other = polygon(a.tolist()), polygon(b.tolist())
    both = one.intersection(other).area
    union = one.area + other.area - both
    return both / union if union > 0 else 0.0


def boxes(n, seed, spread=4.0):
    generator = torch.Generator().manual_seed(seed)
    centre = spread * torch.randn(n, 2, generator=generator, dtype=torch.float64)
    size = 0.2 + 5 * torch.rand(n, 2, generator=generator, dtype=torch.float64)
    yaw = 8 * torch.rand(n, 1, generator=generator, dtype=torch.float64) - 4
    return torch.cat([centre, size, yaw], 1)


BOX = [1.0, 2.0, 2.0, 4.0, 0.3]
SPECIAL = {
    "identical": (BOX, BOX),
    "half a turn": (BOX, [1.0, 2.0, 2.0, 4.0, 0.3 + pi]),
    "a quarter turn": (BOX, [1.0, 2.0, 4.0, 2.0, 0.3 + pi / 2]),
    "crossed": (BOX, [1.0, 2.0, 2.0, 4.0, 0.3 + pi / 2]),
    "nested": (BOX, [1.1, 2.0, 0.5, 0.5, 1.0]),
    "nested at a side": ([0, 0, 2, 4, 0], [1.5, 0, 1, 1, 0]),
    "nested in a corner": ([0, 0, 2, 4, 0], [1.5, 0.5, 1, 1, 0]),
    "touching sides": ([0, 0, 2, 4, 0], [4, 0, 2, 4, 0]),
    "touching corners": ([0, 0, 2, 4, 0], [4, 2, 2, 4, 0]),
    "corner on a side": ([0, 0, 2, 2, 0], [1 + 2**0.5 / 2, 0, 1, 1, pi / 4]),
    "shared side": ([0, 0, 2, 4, 0], [1, 0, 2, 4, 0]),
    "apart": (BOX, [100.0, 2.0, 2.0, 4.0, 0.3]),
    "a line": (BOX, [1.0, 2.0, 0.0, 4.0, 0.1]),
    "a point": (BOX, [1.0, 2.0, 0.0, 0.0, 0.1]),
    "two points": ([0, 0, 0, 0, 0], [0, 0, 0, 0, 0]),
    "thin": (BOX, [1.0, 2.0, 1e-9, 40.0, 0.1]),
    "far from the origin": ([1e4, 1e4, 2, 4, 0.3], [1e4 + 0.5, 1e4, 2, 4, 0.4]),
    "nearly the same yaw": (BOX, [1.0, 2.0, 2.0, 4.0, 0.3 + 1e-9]),
}


@pytest.mark.parametrize("pair", SPECIAL.values(), ids=SPECIAL)
def test_special_pairs_against_shapely(pair):
    a, b = (torch.tensor([box], dtype=torch.float64) for box in pair)
    expected = shapely_iou(a[0], b[0])
    assert float(rotated_iou(a, b)) == pytest.approx(expected, abs=1e-6)
    assert float(rotated_iou(b, a)) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_random_pairs_against_shapely(seed):
    a, b = boxes(300, seed, 2.0), boxes(300, seed + 50, 2.0)
    expected = torch.tensor([shapely_iou(p, q) for p, q in zip(a, b)], dtype=torch.float64)
    torch.testing.assert_close(rotated_iou(a, b), expected, rtol=0, atol=1e-6)


def test_axis_aligned_neighbours_on_a_grid():
    """Sides on sides everywhere: the case where a clipping that counts a side twice goes wrong."""
    steps = torch.arange(-3, 4, dtype=torch.float64)
    x, y = torch.meshgrid(steps, steps, indexing="ij")
    n = x.numel()
    a = torch.tensor([[0.0, 0.0, 2.0, 4.0, 0.0]], dtype=torch.float64).expand(n, 5)
    b = torch.stack(
        [x.flatten(), y.flatten(), torch.full((n,), 2.0), torch.full((n,), 4.0), torch.zeros(n)], 1
    ).to(torch.float64)
    expected = (4 - x.abs()).clamp(min=0) * (2 - y.abs()).clamp(min=0)
    torch.testing.assert_close(rotated_intersection(a, b), expected.flatten())


def test_single_precision_is_good_enough_to_suppress_with():
    a, b = boxes(500, 0, 2.0), boxes(500, 1, 2.0)
    torch.testing.assert_close(
        rotated_iou(a.float(), b.float()).double(), rotated_iou(a, b), rtol=0, atol=1e-5
    )


def slow_greedy(suppresses, n):
    stays = []
    for j in range(n):
        if not any(suppresses(i, j) for i in stays):
            stays.append(j)
    return [j in stays for j in range(n)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("spread", [0.5, 3.0, 10.0])
def test_rotated_nms_is_the_greedy_loop(seed, spread):
    groups = boxes(120, seed, spread).reshape(3, 40, 5)
    valid = torch.rand(3, 40, generator=torch.Generator().manual_seed(seed)) < 0.8
    found = rotated_nms(groups, valid, 0.2)
    for some, counts, stays in zip(groups, valid, found):
        some = some[counts]
        iou = torch.stack([rotated_iou(box.expand(len(some), 5), some) for box in some])
        assert stays[counts].tolist() == slow_greedy(
            lambda i, j, iou=iou: iou[i, j] > 0.2, len(some)
        )
        assert not bool(stays[~counts].any())


def test_long_chains_of_suppression():
    """Each box touches its neighbours only: every other one stays."""
    n = 101
    row = torch.stack(
        [
            torch.arange(n) * 1.0,
            torch.zeros(n),
            torch.full((n,), 2.0),
            torch.full((n,), 1.5),
            torch.zeros(n),
        ],
        1,
    )
    stays = rotated_nms(row.unsqueeze(0), torch.ones(1, n, dtype=torch.bool), 0.1)
    assert stays[0].tolist() == [i % 2 == 0 for i in range(n)]


@pytest.mark.parametrize("seed", range(4))
def test_circle_nms_is_the_greedy_loop_on_squared_distances(seed):
    centres = boxes(60, seed, 3.0)[:, :2].reshape(2, 30, 2)
    bounds = [4.0, 0.175]
    found = circle_nms(centres, torch.ones(2, 30, dtype=torch.bool), torch.tensor(bounds).double())
    for some, bound, stays in zip(centres, bounds, found):
        assert stays.tolist() == slow_greedy(
            lambda i, j, some=some, bound=bound: (some[i] - some[j]).square().sum() <= bound, 30
        )


def test_nothing_to_suppress():
    none = torch.zeros(6, 0, dtype=torch.bool)
    assert rotated_nms(torch.zeros(6, 0, 5), none, 0.2).shape == (6, 0)
    assert circle_nms(torch.zeros(6, 0, 2), none, torch.zeros(6)).shape == (6, 0)
