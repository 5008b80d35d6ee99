"""Selections of fixed size hold what ``select`` reports, in its order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from boxcov import BoxcovError
from boxcov.detectors.nms import greedy_nms
from boxcov.detectors.pyramid import ScoredBoxes, static_selection
from boxcov.detectors.tiny import TinyCenter
from boxcov.detectors.yolox.selection import grid_of
from boxcov.export.onnx.value_reads import find_value_reads
from boxcov.static_selection import StaticLimits, best_rows, static_nms
from helpers.centerpoint_cases import cloud, detector_of, pillar_config
from helpers.yolox_cases import images, small


def pillar(**rules: Any) -> Any:
    config = pillar_config()
    return detector_of(replace(config, reporting=replace(config.reporting, threshold=0.1, **rules)))


def check(detector: Any, inputs: Any, limits: StaticLimits) -> int:
    with torch.no_grad():
        raw = detector(inputs)
        plain, fixed = detector.select(raw), detector.select_static(raw, limits)
        n = int(fixed.count)
        assert n == min(len(plain), limits.boxes)
        assert torch.equal(fixed.valid, torch.arange(len(fixed.selection)) < n)
        assert torch.equal(fixed.selection.scores[:n], plain.scores[:n])
        assert torch.equal(fixed.selection.labels[:n], plain.labels[:n])
        assert torch.equal(
            detector.decode(raw, fixed.selection)[:n], detector.decode(raw, plain)[:n]
        )
    return int(fixed.left_off)


@pytest.mark.parametrize(
    "rules",
    [
        {"nms": "rotated", "max_boxes": 7},
        {"nms": "circle", "max_boxes": 99},
        {"per_class": False, "overlap": 0.01},
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_centerpoint(rules: dict[str, Any], seed: int) -> None:
    detector = pillar(**rules)
    inputs = [cloud(detector.config, seed)]
    assert check(detector, inputs, StaticLimits(boxes=600, candidates=500, pairs=200_000)) == 0
    assert (
        check(detector, inputs, StaticLimits(boxes=5, candidates=500, pairs=200_000))
        == len(detector.detect(inputs)) - 5
    )


def test_levels_of_kinds_are_constants() -> None:
    """``instances`` groups boxes by level, which a graph can follow for constants alone."""
    scores, low = torch.tensor([0.9, 0.8, 0.7]), torch.tensor([[0.0, 0], [9, 9], [20, 20]])
    cell, number = torch.tensor([0, 5, 4]), torch.zeros(3, dtype=torch.long)
    every = torch.ones(3, dtype=torch.bool)
    with find_value_reads([scores, low, cell]) as lines:
        boxes = torch.cat([low, low + 4], 1)
        found = ScoredBoxes(scores, boxes, cell, number, number, above=every, reported=every)
        static = static_selection(
            found, StaticLimits(boxes=3), counts=[4, 1, 1], overlap=0.5, max_boxes=3
        )
        rows = [(kind.where.level == n).nonzero()[:, 0] for n, kind in enumerate(static.of_kind)]
    assert not lines
    assert static.kind.tolist() == [0, 2, 1]
    assert [len(each) for each in rows] == [3, 3, 3]


def test_boxes_beyond_the_limits_are_counted() -> None:
    detector = pillar()
    inputs = [cloud(detector.config)]
    with torch.no_grad():
        raw = detector(inputs)
        above = [int((maps["heatmap"].sigmoid() > 0.1).sum()) for maps in raw["tasks"]]
        few = detector.select_static(raw, StaticLimits(boxes=500, candidates=3, pairs=10_000))
        assert int(few.left_off) == sum(max(count - 3, 0) for count in above) > 0
        pairs = detector.select_static(raw, StaticLimits(boxes=500, candidates=500, pairs=1))
        assert int(pairs.left_off) > 0


@pytest.mark.parametrize("nms", ["rotated", "circle"])
def test_centerpoint_in_batches(nms: str) -> None:
    detector = pillar(nms=nms)
    clouds = [cloud(detector.config, 0), cloud(detector.config, 1)[:0], cloud(detector.config, 1)]
    assert check(detector, clouds, StaticLimits(boxes=900, candidates=500, pairs=400_000)) == 0


def test_equal_scores_keep_their_order() -> None:
    scores = torch.tensor([0.5, 0.7, 0.5, 0.7, 0.5, 0.9])
    kept = torch.tensor([True, True, True, True, True, False])
    index, count, excess = best_rows(scores.repeat(40), kept.repeat(40), 200)
    expected = [i for best in (1, 0) for i in range(240) if i % 6 != 5 and i % 2 == best]
    assert index.tolist() == expected
    assert (int(count), int(excess)) == (200, 0)


def test_yolox() -> None:
    detector = small(max_boxes=200)
    x = 40 * images() ** 0.5
    assert check(detector, x, StaticLimits(boxes=200, candidates=200)) == 0
    with torch.no_grad():
        assert (
            int(detector.select_static(detector(x), StaticLimits(boxes=200, candidates=5)).left_off)
            > 0
        )
        with pytest.raises(BoxcovError, match="takes one image, got a batch of 2"):
            detector.select_static(detector(x.expand(2, -1, -1, -1)), StaticLimits())


def test_rows_of_another_level_lie_on_it() -> None:
    detector = small()
    with torch.no_grad():
        raw = detector(images())
        fixed, grid = detector.select_static(raw, StaticLimits(boxes=6)), grid_of(raw["features"])
    for level, selection in enumerate(fixed.of_kind):
        assert set(selection.where.level.tolist()) == {level}
        assert set(grid.level[selection.where.cell].tolist()) == {level}
        own = fixed.kind == level
        assert torch.equal(selection.where.cell[own], fixed.selection.where.cell[own])


def test_tiny(tiny, image) -> None:
    assert check(tiny, image, StaticLimits()) == 0
    everything = TinyCenter(threshold=0.0, most=9).eval()
    assert check(everything, image, StaticLimits(boxes=4)) == 5
    assert check(tiny, torch.zeros_like(image), StaticLimits()) == 0
    with torch.no_grad(), pytest.raises(BoxcovError, match="takes one image, got a batch of 2"):
        tiny.select_static(tiny(image.expand(2, -1, -1, -1)), StaticLimits())


@pytest.mark.parametrize("seed", range(20))
def test_suppression_is_greedy(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rivals = (torch.rand(3, 12, 12, generator=generator) < 0.3).triu(1)
    group, first, second = rivals.nonzero(as_tuple=True)
    expected = greedy_nms(
        group * 12 + first, group * 12 + second, torch.ones(3, 12, dtype=torch.bool)
    )
    stays, settled = static_nms(rivals.float())
    assert bool(settled)
    assert torch.equal(stays, expected)


def test_a_chain_longer_than_the_rounds_is_reported() -> None:
    chain = torch.diag_embed(torch.ones(1, 39), 1)
    assert not bool(static_nms(chain)[1])
