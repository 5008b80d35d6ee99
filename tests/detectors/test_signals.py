"""Signals that the families share, against slow loops and answers known by hand."""

from __future__ import annotations

from math import log

import pytest
import torch

from boxcov import Selection
from boxcov.data import shapes
from boxcov.detectors import signals
from boxcov.detectors.tiny import TinyCenter
from helpers.centerpoint_cases import cloud, detector_of, pillar_config
from helpers.signal_cases import assert_equal, assert_promises, slow_window

INF = 1e38


def test_margins_leave_the_background_out() -> None:
    logits = torch.tensor([[9.0, 1.0, 3.0], [0.0, 5.0, 4.0]])
    number = torch.tensor([2, 1])
    assert signals.class_margin(logits, number).tolist() == [-6, 1]
    assert signals.class_margin(logits, number, background=0).tolist() == [2, 1]
    assert signals.class_margin(logits[:, :1], torch.zeros(2, dtype=torch.long)).tolist() == [0, 0]
    found = signals.class_signals(torch.zeros(1, 4), torch.tensor([1]), background=-1)
    assert found["class entropy"].item() == pytest.approx(log(4))
    assert found["background margin"].tolist() == [0]


def test_windows_on_a_pyramid_of_anchors() -> None:
    """Two anchors per cell of 2 x 3, then one per cell of 1 x 2."""
    around = signals.pyramid_window(torch.tensor([3, 12]), [(2, 3), (1, 2)], [2, 1])
    assert around.level.tolist() == [0, 1]
    # anchor 1 of cell (0, 1): all anchors 1 of the two rows
    assert around.index[0][around.inside[0]].tolist() == [1, 3, 5, 7, 9, 11]
    assert around.index[1][around.inside[1]].tolist() == [12, 13]
    assert around.index[:, 4].tolist() == [3, 12]
    assert around.row[0].tolist() == [0, 0, 0, 0, 0, 0, 1, 1, 1]


def test_a_window_is_compared_with_its_middle() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 9, generator=generator)
    values = torch.randn(1, 9, 2, generator=generator)
    inside = torch.tensor([[False, False, False, True, True, True, True, False, True]])
    found = signals.window_signals(logits, values, inside, ("x", "y"))
    rows = inside[0].nonzero()[:, 0]
    expected = slow_window(logits[0, rows].tolist(), values[0, rows].tolist(), 1, ("x", "y"))
    assert_equal(found, {name: [value] for name, value in expected.items()}, atol=1e-5)


def test_a_cell_without_neighbours_is_its_own_peak() -> None:
    inside = torch.zeros(1, 9, dtype=torch.bool)
    inside[0, 4] = True
    found = signals.peak(torch.full((1, 9), 2.0), inside)
    assert found["peak over highest"].tolist() == [0]
    assert found["peak over mean"].tolist() == [2]


def test_neighbours_by_overlap() -> None:
    box = torch.tensor([[0.0, 0.0, 2.0, 2.0]])
    others = torch.tensor([[[0.0, 0, 2, 2], [1, 0, 3, 2], [9, 9, 10, 10], [0, 0, 2, 2]]])
    inside = torch.tensor([[True, True, True, False]])
    logits = torch.tensor([[1.0, -1.0, 5.0, 5.0]])
    found = signals.neighbour_signals(box, others, logits, own=torch.tensor([0]), inside=inside)
    own, other = torch.tensor([1.0, -1.0]).sigmoid().tolist()
    weight = own + other / 3
    assert found["candidates"].item() == pytest.approx(log(1 + weight))
    assert found["nearest overlap"].item() == pytest.approx(1 / 3)
    assert found["nearest margin"].item() == pytest.approx(2)
    assert found["spread x"].item() == pytest.approx(0.5 * log(other / 3 / weight + 1e-6), abs=1e-5)
    assert found["spread h"].item() == pytest.approx(0.5 * log(1e-6), abs=1e-4)
    nothing = signals.neighbour_signals(
        box[:0], others[:0, :0], logits[:0, :0], own=torch.zeros(0).long(), inside=inside[:0, :0]
    )
    assert list(nothing) == list(found)


def test_sides_of_the_image() -> None:
    boxes = torch.tensor([[0.0, 5.0, 10.0, 10.0], [-3.0, -3.0, 30.0, 30.0], [5.0, 5.0, 9.0, 9.0]])
    assert signals.touched_sides(boxes, 20.0, 10.0).tolist() == [2, 4, 0]
    assert signals.touched_sides(boxes, torch.tensor([10.0, 30, 30]), 99.0).tolist() == [2, 3, 0]


@pytest.mark.parametrize("size", [0.0, 1.0, 1e4, INF])
def test_extreme_values_give_finite_signals(size: float) -> None:
    logits = size * torch.tensor([[1.0, -1, 1, -1, 1, -1, 1, -1, 0]])
    values, inside = logits[:, :, None].expand(-1, -1, 4), torch.ones(1, 9, dtype=torch.bool)
    found = {
        **signals.window_signals(logits, values, inside),
        **signals.class_signals(logits, torch.tensor([1]), background=0),
    }
    assert all(bool(v.isfinite().all()) for v in signals.finite(found).values()), found


# TinyCenter and CenterPoint


def test_tiny_center_against_a_slow_loop() -> None:
    detector = TinyCenter(width=4).double()
    generator = torch.Generator().manual_seed(0)
    raw = {
        name: torch.randn(2, n, 4, 5, generator=generator, dtype=torch.float64)
        for name, n in (("heatmap", 2), ("offset", 2), ("size", 2), ("rot", 2))
    }
    where = (torch.tensor([1, 0]), torch.tensor([0, 2]), torch.tensor([4, 2]))  # a corner
    labels = torch.tensor([1, 0])
    found = detector.signals(raw, Selection(where[0], torch.ones(2), labels, where))
    for m, (b, row, column) in enumerate(zip(*(w.tolist() for w in where))):
        cells = [
            (r, c) for r in range(4) for c in range(5) if max(abs(r - row), abs(c - column)) < 2
        ]
        values = []
        for r, c in cells:
            offset, size, rot = (
                raw[name][b, :, r, c].tolist() for name in ("offset", "size", "rot")
            )
            centre = [(c + offset[0]) * detector.cell, (r + offset[1]) * detector.cell]
            values.append([*centre, *size, *rot])
        logits = [raw["heatmap"][b, labels[m], r, c].item() for r, c in cells]
        names = ("x", "y", "w", "l", "sin", "cos")
        for name, value in slow_window(logits, values, cells.index((row, column)), names).items():
            assert found[name][m].item() == pytest.approx(value), name
        heat = raw["heatmap"][b, :, row, column]
        assert found["class margin"][m] == heat[labels[m]] - heat[1 - labels[m]]
        assert found["dim l"][m] == raw["size"][b, 1, row, column]


def test_tiny_center_keeps_the_promises() -> None:
    images = torch.cat([image for image, _ in shapes.frames(count=2)])
    detector = TinyCenter(seed=1, threshold=0.05, most=6, width=4).eval()
    assert_promises(detector, images, [images[:1], images[1:]])


def test_centerpoint_keeps_the_promises() -> None:
    config = pillar_config()
    clouds = [cloud(config, seed) for seed in (0, 1)]
    assert_promises(detector_of(config), clouds, [clouds[:1], clouds[1:]])


def test_centerpoint_heading_length() -> None:
    config = pillar_config()
    detector = detector_of(config)
    with torch.no_grad():
        raw = detector([cloud(config)])
        selection = detector.select(raw)
    found, where = detector.signals(raw, selection), selection.where
    rot = raw["tasks"][where.task[0]]["rot"][0, :, where.row[0], where.column[0]]
    assert found["heading length"][0].item() == pytest.approx(log(rot.norm().item()), abs=1e-4)


def test_logits_of_softmax_scores_and_of_logarithms() -> None:
    logits = torch.tensor([[1.0, 0.0, -2.0]]).double()
    p = logits.softmax(1)[0, 1]
    odds = (p / (1 - p)).log()
    torch.testing.assert_close(signals.softmax_logit(logits, torch.tensor([1]))[0], odds)
    torch.testing.assert_close(signals.logit_of_log(p.log()), odds)
