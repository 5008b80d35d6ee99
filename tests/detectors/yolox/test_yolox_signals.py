from __future__ import annotations

from math import log

import pytest
import torch

from boxcov import Selection
from boxcov.detectors.pyramid import CellIndex
from boxcov.detectors.yolox.selection import grid_of
from helpers.signal_cases import assert_promises, slow_window
from helpers.yolox_cases import images, small

SHAPES = [(4, 8), (2, 4), (1, 2)]  # an image of 32 x 64 pixels


def test_a_batch_gives_what_each_frame_gives() -> None:
    x = images(2)
    assert_promises(small(), x, [x[:1], x[1:]])


def test_against_a_slow_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, 42, 8, generator=generator, dtype=torch.float64)
    features = [torch.zeros(1, 1, *shape) for shape in SHAPES]
    grid = grid_of(features)
    frame, cell = torch.tensor([1, 0, 1]), torch.tensor([9, 32, 41])  # one per level
    labels = torch.tensor([2, 0, 1])
    found = small().signals(
        {"values": values, "features": features},
        Selection(frame, torch.ones(3), labels, CellIndex(frame, cell, grid.level[cell])),
    )
    for m, (b, c, label) in enumerate(zip(frame.tolist(), cell.tolist(), labels.tolist())):
        near = (
            (grid.level == grid.level[c])
            & ((grid.row - grid.row[c]).abs() < 2)
            & ((grid.column - grid.column[c]).abs() < 2)
        )
        cells = near.nonzero()[:, 0].tolist()
        scores = [values[b, i, 4].sigmoid() * values[b, i, 5 + label].sigmoid() for i in cells]
        boxes = []
        for i in cells:
            stride, (x, y, w, h) = grid.stride[i].item(), values[b, i, :4].tolist()
            centre = ((grid.column[i].item() + x) * stride, (grid.row[i].item() + y) * stride)
            boxes.append([*centre, w + log(stride), h + log(stride)])
        logits = [torch.logit(score).item() for score in scores]
        expected = slow_window(logits, boxes, cells.index(c), "xywh")
        own = values[b, c]
        expected |= dict(zip(("reg x", "reg y", "dim w", "dim h"), own[:4].tolist()))
        expected |= {"objectness": own[4].item(), "class logit": own[5 + label].item()}
        rest = [own[5 + k].item() for k in range(3) if k != label]
        expected |= {"class margin": own[5 + label].item() - max(rest), "level": m}
        for name, value in expected.items():
            assert found[name][m].item() == pytest.approx(value, rel=1e-6, abs=1e-9), name
    assert set(found) == {*expected, "touched sides"}


def test_saturated_logits_stay_finite() -> None:
    detector, x = small(), images()
    with torch.no_grad():
        raw = detector(x)
        selection = detector.select(raw)
        for size in (1e3, -1e3, 1e8):
            found = detector.signals({**raw, "values": size * raw["values"]}, selection)
            assert all(bool(v.isfinite().all()) for v in found.values()), size
    half = {**raw, "values": raw["values"].half()}
    assert detector.signals(half, selection)["reg x"].dtype == torch.float32
