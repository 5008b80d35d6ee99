"""Signals of Ultralytics' YOLO on hand-made raw outputs; they need no ultralytics."""

from __future__ import annotations

from math import log
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from boxcov import Selection
from boxcov.detectors.labels import Labels
from boxcov.detectors.pyramid import CellIndex
from boxcov.detectors.ultralytics.detector import Yolo, side_signals
from helpers.signal_cases import slow_window


def test_the_distribution_of_a_side() -> None:
    p = torch.tensor([[0.5, 0.0, 0.5], [0.0, 1.0, 0.0], [1 / 3, 1 / 3, 1 / 3], [0.0, 0.0, 1.0]])
    found = {k: v.item() for k, v in side_signals((p + 1e-30).log()[None]).items()}
    for side, mean, variance, entropy in (
        ("left", 1, 1, log(2)),
        ("top", 1, 0, 0),
        ("right", 1, 2 / 3, log(3)),
        ("bottom", 2, 0, 0),
    ):
        assert found[f"side {side}"] == pytest.approx(mean)
        assert found[f"deviation {side}"] == pytest.approx(0.5 * log(variance + 1e-6), abs=1e-4)
        assert found[f"entropy {side}"] == pytest.approx(entropy, abs=1e-5)
    assert side_signals(torch.full((1, 4, 1), 2.5))["side top"].tolist() == [2.5]


def test_against_a_slow_loop() -> None:
    """One box in the corner of a level of 2 x 2 cells; another level has one cell."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Module()
    model.model = [SimpleNamespace(stride=torch.tensor([8.0, 16.0]))]  # type: ignore[assignment]
    detector = Yolo(model, Labels(("cow",), (2,)), 0.5, 0.7, 8, False)
    raw = {
        "found": 1 + torch.rand(1, 7, 5, generator=generator),
        "logits": torch.randn(1, 3, 5, generator=generator),
        "distances": torch.randn(1, 64, 5, generator=generator),
        "features": [torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 1, 1)],
    }
    zero, cell = torch.tensor([0]), torch.tensor([3])
    found = detector.signals(raw, Selection(zero, torch.ones(1), zero, CellIndex(zero, cell, zero)))
    boxes = raw["found"][0, :4, :4].T
    values = torch.cat([boxes[:, :2], boxes[:, 2:].log()], 1).tolist()
    expected = slow_window(raw["logits"][0, 2, :4].tolist(), values, 3, "xywh")
    own = raw["logits"][0, :, 3]
    expected |= {"class margin": float(own[2] - own[:2].max()), "level": 0}
    p = raw["distances"][0, 16:32, 3].softmax(0)
    expected["side top"] = float((p * torch.arange(16)).sum())
    for name, value in expected.items():
        assert found[name].item() == pytest.approx(value, abs=1e-4), name
    assert found["touched sides"].item() == 0 or float(boxes[3, :2].min()) < 1
    empty = CellIndex(zero[:0], cell[:0], zero[:0])
    assert list(detector.signals(raw, Selection(*(zero[:0],) * 3, empty))) == list(found)
