"""The selection of boxes: a plain loop, and the selection of fixed shapes, on many frames."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from boxcov.detectors.centerpoint import Config
from boxcov.detectors.centerpoint.decode import boxes_of
from boxcov.detectors.centerpoint.selection import select, select_static
from boxcov.detectors.nms import rotated_iou
from boxcov.static_selection import StaticLimits
from helpers.centerpoint_cases import pillar_config

FRAMES, BATCH = 256, 8  # of each of four kinds: a thousand
CELLS = 6
LIMITS = StaticLimits(boxes=BATCH * 100, candidates=60, pairs=20_000)


def config_with(**rules: Any) -> Config:
    config = pillar_config()
    reporting = replace(config.reporting, threshold=0.6, max_boxes=5, candidates=60, **rules)
    return replace(config, reporting=reporting)


def maps_of(config: Config, seed: int, ties: bool) -> list[dict[str, Tensor]]:
    """Random outputs of a head on a small map; with ties the scores have five values."""
    generator = torch.Generator().manual_seed(seed)
    tasks = []
    for classes in config.tasks:
        sizes = {**config.branches, "heatmap": len(classes)}
        shape = (CELLS, CELLS)
        maps = {
            name: 0.7 * torch.randn(BATCH, n, *shape, generator=generator)
            for name, n in sizes.items()
        }
        heat = maps["heatmap"]
        tasks.append({**maps, "heatmap": heat.round(decimals=0) if ties else heat})
    return tasks


def by_loop(tasks: list[dict[str, Tensor]], config: Config, frame: int) -> list[tuple[int, ...]]:
    """Task, class and cell of the boxes of a frame: one candidate after the other."""
    found: list[tuple[float, tuple[int, ...]]] = []
    for number, maps in enumerate(tasks):
        heat = maps["heatmap"][frame].sigmoid()
        order = heat.flatten().argsort(descending=True, stable=True).tolist()
        kept: list[Tensor] = []
        for place in order[: config.reporting.candidates]:
            label, cell = divmod(place, CELLS * CELLS)
            row, column = divmod(cell, CELLS)
            if not heat[label, row, column] > config.reporting.threshold:
                break
            values = {n: maps[n][frame, :, row, column][None] for n in config.branches}
            box = boxes_of(values, torch.tensor([row]), torch.tensor([column]), config)
            flat = box[:, [0, 1, 3, 4, 6]]
            over = [float(rotated_iou(other, flat)) > config.reporting.overlap for other in kept]
            if any(over) or len(kept) == config.reporting.max_boxes:
                continue
            kept.append(flat)
            found.append((float(heat[label, row, column]), (number, label, cell)))
    return [what for _, what in sorted(found, key=lambda pair: -pair[0])]


def cells_of(selection: Any, config: Config, frame: int) -> list[tuple[int, ...]]:
    mine = selection.frame == frame
    at = selection.where
    first = [config.first_class(int(task)) for task in at.task[mine]]
    labels = selection.labels[mine].tolist()
    cells = (at.row * CELLS + at.column)[mine].tolist()
    return [
        (int(t), label - f, cell)
        for t, label, f, cell in zip(at.task[mine], labels, first, cells, strict=True)
    ]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("nms", ["rotated", "circle"])
def test_fixed_shapes_select_the_same_on_a_thousand_frames(nms: str, ties: bool) -> None:
    config, boxes = config_with(nms=nms), 0
    for seed in range(FRAMES // BATCH):
        tasks = maps_of(config, seed, ties)
        expected, found = select(tasks, config), select_static(tasks, config, LIMITS)
        count = int(found.count)
        assert int(found.left_off) == 0
        assert count == len(expected)
        for name in ("frame", "scores", "labels"):
            assert torch.equal(getattr(found.selection, name)[:count], getattr(expected, name))
        for name in ("task", "row", "column"):
            mine, other = (getattr(s.where, name) for s in (found.selection, expected))
            assert torch.equal(mine[:count], other)
        boxes += count
    assert boxes > 5 * FRAMES


def test_the_selection_is_that_of_a_plain_loop() -> None:
    config = config_with()
    tasks = maps_of(config, seed=1, ties=False)
    found = select(tasks, config)
    for frame in range(BATCH):
        assert cells_of(found, config, frame) == by_loop(tasks, config, frame)
