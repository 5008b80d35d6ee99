from __future__ import annotations

from dataclasses import replace
from math import exp, log

import pytest
import torch
from torch import Tensor

from boxcov.detectors.boxes import iou
from boxcov.detectors.pyramid import suppression_matrix
from boxcov.detectors.yolox.config import Config
from boxcov.detectors.yolox.selection import candidates, grid_of, reported_boxes, select
from helpers.yolox_cases import SMALL

MAPS = [torch.zeros(1, 1, 8 // 2**i, 12 // 2**i) for i in range(3)]  # of an image of 64 x 96


def values_of(seed: int = 0, frames: int = 1, classes: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(frames, 126, 5 + classes, generator=generator, dtype=torch.float64)
    values[:, :, 2:4] = values[:, :, 2:4] / 4 + 0.7
    return values


def sigmoid(x: float) -> float:
    return 1 / (1 + exp(-x))


def test_boxes_cell_by_cell() -> None:
    grid, values = grid_of(MAPS), values_of()[0]
    boxes = reported_boxes(values, torch.zeros(126, dtype=torch.long), grid, SMALL)
    number = 0
    for stride, rows, columns in ((8, 8, 12), (16, 4, 6), (32, 2, 3)):
        for row in range(rows):
            for column in range(columns):
                dx, dy, w, h = values[number, :4].tolist()
                x, y, w, h = (
                    (column + dx) * stride,
                    (row + dy) * stride,
                    exp(w) * stride,
                    exp(h) * stride,
                )
                assert boxes[number].tolist() == pytest.approx(
                    [x - w / 2, y - h / 2, x + w / 2, y + h / 2]
                )
                number += 1
    assert number == 126


def test_the_logit_is_accurate_for_scores_close_to_one() -> None:
    config = replace(SMALL, logit=True)
    values = values_of().float()[0]
    values[0, 4:] = 16.0
    values[1, 4:] = -60.0
    labels = torch.arange(126) % 3
    found = reported_boxes(values, labels, grid_of(MAPS), config)[:, 4]
    p = values.double()[:, 4].sigmoid() * values.double()[torch.arange(126), 5 + labels].sigmoid()
    torch.testing.assert_close(found.double(), torch.logit(p), rtol=1e-4, atol=1e-4)
    assert found[0] == pytest.approx(16 - log(2), abs=1e-3)


def slow_nms(values: Tensor, config: Config) -> list[tuple[int, int]]:
    """Cells and labels that are reported of one image, in plain loops."""
    boxes = reported_boxes(
        values, torch.zeros(len(values), dtype=torch.long), grid_of(MAPS), SMALL
    ).tolist()
    rows = []
    for cell, numbers in enumerate(values.tolist()):
        named = [sigmoid(x) for x in numbers[5:]]
        score = sigmoid(numbers[4]) * max(named)
        if score > config.threshold:
            rows.append((-score, cell, named.index(max(named))))
    kept: list[tuple[int, int]] = []
    for _, cell, label in sorted(rows):
        if all(
            label != other or slow_iou(boxes[cell], boxes[rival]) <= config.overlap
            for rival, other in kept
        ):
            kept.append((cell, label))
    return kept[: config.max_boxes]


def slow_iou(a: list[float], b: list[float]) -> float:
    w, h = (max(0.0, min(a[i + 2], b[i + 2]) - max(a[i], b[i])) for i in (0, 1))
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (a, b)]
    return w * h / (sum(areas) - w * h)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("overlap", "most"), [(0.3, 100), (0.1, 9), (1.0, 100)])
def test_what_is_reported_is_what_the_greedy_loop_keeps(
    seed: int, overlap: float, most: int
) -> None:
    config = replace(SMALL, threshold=0.2, overlap=overlap, max_boxes=most)
    values = values_of(seed, frames=2)
    found = select(values, grid_of(MAPS), config)
    for frame in range(2):
        mine = found.frame == frame
        assert list(zip(found.where.cell[mine].tolist(), found.labels[mine].tolist())) == slow_nms(
            values[frame], config
        )
    assert torch.equal(found.where.level, grid_of(MAPS).level[found.where.cell])


@pytest.mark.parametrize("most", [100, 3])
def test_removed_by_is_the_best_box_of_the_same_class(most: int) -> None:
    config = replace(SMALL, threshold=0.2, overlap=0.2, max_boxes=most)
    values = values_of(5, frames=2)
    found, every = select(values, grid_of(MAPS), config), candidates(values, grid_of(MAPS), config)
    cell = every.where.cell
    boxes = reported_boxes(
        values[every.frame, cell], every.labels, grid_of(MAPS)[cell], SMALL
    ).tolist()
    rows = list(zip(found.frame.tolist(), found.where.cell.tolist()))
    place = {
        (f, c): i for i, (f, c) in enumerate(zip(every.frame.tolist(), every.where.cell.tolist()))
    }
    assert set(rows) <= set(place)
    for i, by in enumerate(every.removed_by.tolist()):
        better = [
            row
            for row, (f, c) in enumerate(rows)
            if f == every.frame[i]
            and place[f, c] < i
            and every.labels[place[f, c]] == every.labels[i]
            and slow_iou(boxes[place[f, c]], boxes[i]) > 0.2
        ]
        assert by == (better[0] if better else -1)
    assert int((every.removed_by >= 0).sum()) > 5


def test_none_one_and_ties() -> None:
    values = torch.full((2, 126, 8), -20.0)
    assert len(select(values, grid_of(MAPS), SMALL)) == 0
    values[1, 40, 4:6] = 5.0
    found = select(values, grid_of(MAPS), SMALL)
    assert (found.frame.tolist(), found.where.cell.tolist(), found.labels.tolist()) == (
        [1],
        [40],
        [0],
    )
    values[1, [10, 60], 4:6] = 5.0  # equal scores: in the order of the cells
    assert select(values, grid_of(MAPS), SMALL).where.cell.tolist() == [10, 40, 60]
    assert suppression_matrix(torch.zeros(0, 4), torch.zeros(0), 0.5).shape == (0, 0)
    assert not bool(
        suppression_matrix(torch.zeros(2, 4), torch.zeros(2), 0.5).any()
    )  # without area, nothing overlaps
    assert len(candidates(torch.full((2, 126, 8), -20.0), grid_of(MAPS), SMALL)) == 0


def test_iou_pair_by_pair() -> None:
    low = torch.rand(7, 2, dtype=torch.float64) * 4
    boxes = torch.cat([low, low + torch.rand(7, 2, dtype=torch.float64) * 4], 1)
    found = iou(boxes[:4, None], boxes)
    for i in range(4):
        for j in range(7):
            assert float(found[i, j]) == pytest.approx(
                slow_iou(boxes[i].tolist(), boxes[j].tolist())
            )
