"""Signals of torchvision's detectors; answers known by hand need no torchvision."""

from __future__ import annotations

from math import exp, log
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from boxcov import Selection
from boxcov.detectors.pyramid import CellIndex
from boxcov.detectors.torchvision.dense import SSD
from boxcov.detectors.torchvision.rcnn import FasterRCNN, RegionIndex
from helpers.signal_cases import assert_promises, slow_window


def model_of(**parts: Any) -> nn.Module:
    """A model whose boxes are the regression values themselves."""
    model = nn.Module()
    for name, part in parts.items():
        setattr(model, name, part)
    return model


CODER = SimpleNamespace(decode_single=lambda values, start: values)


def test_an_anchor_among_its_neighbours() -> None:
    boxes = torch.tensor([[[0.0, 4, 8, 12], [8.0, 4, 16, 12]]])
    head = SimpleNamespace(classification_head=SimpleNamespace(num_columns=3))
    generator = SimpleNamespace(num_anchors_per_location=lambda: [1])
    model = model_of(head=head, anchor_generator=generator, box_coder=CODER)
    detector = SSD(model, ["background", "cat", "dog"], None, None, "rgb")
    raw = {
        "features": {"0": torch.zeros(1, 1, 1, 2)},
        "cls_logits": torch.tensor([[[0.0, 2.0, 3.0], [0.0, -1.0, 0.0]]]),
        "bbox_regression": boxes,
        "anchors": boxes,
        "sizes": [(40, 80)],
    }
    zero = torch.tensor([0])
    selection = Selection(zero, torch.ones(1), zero, CellIndex(zero, zero, zero))
    found = {name: value.item() for name, value in detector.signals(raw, selection).items()}
    logits = [2 - log(1 + exp(3)), -1 - log(2)]
    values = [[4, 8, log(8), log(8)], [12, 8, log(8), log(8)]]
    expected = slow_window(logits, values, 0, "xywh")
    expected |= {"reg x": 0, "reg y": 4, "dim w": 8, "dim h": 12}
    expected |= {"class margin": -1, "background margin": 2, "touched sides": 1, "level": 0}
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-4), name
    assert set(found) == {*expected, "class entropy"}


def test_a_region_among_the_candidates_of_its_frame() -> None:
    boxes = torch.tensor([[0.0, 0, 8, 8], [4, 0, 12, 8], [0, 0, 8, 8]])
    predictor = SimpleNamespace(cls_score=SimpleNamespace(out_features=2))
    model = model_of(roi_heads=SimpleNamespace(box_predictor=predictor, box_coder=CODER))
    detector = FasterRCNN(model, ["background", "cat"], None, None, "rgb")
    proposals = [torch.tensor([[0.0, 0, 8, 4], [4, 0, 12, 8]]), torch.tensor([[0.0, 0, 8, 8]])]
    raw = {
        "class_logits": torch.tensor([[0.0, 2.0], [0.0, 1.0], [0.0, 9.0]]),
        "regression": torch.cat([boxes, boxes], 1),  # of the background and of cats
        "proposals": proposals,
        "proposal_scores": [torch.tensor([0.75, 1.0]), torch.tensor([1.0])],
        "sizes": [(40, 80), (40, 80)],  # the last region is another frame's
    }
    zero, one = torch.tensor([0]), torch.tensor([1])
    selection = Selection(zero, torch.ones(1), zero, RegionIndex(proposals, zero, one))
    found = {name: value.item() for name, value in detector.signals(raw, selection).items()}
    assert found["logit"] == found["background margin"] == 2
    assert found["objectness"] == pytest.approx(log(3))
    assert found["proposal overlap"] == pytest.approx(0.5)
    assert found["nearest overlap"] == pytest.approx(1 / 3)
    assert found["nearest margin"] == 1
    assert found["touched sides"] == 2


@pytest.mark.parametrize("name", ["retinanet", "fcos", "ssd", "faster_rcnn"])
def test_a_batch_gives_what_each_frame_gives(name: str) -> None:
    pytest.importorskip("torchvision")
    cases = pytest.importorskip("helpers.torchvision_cases")
    from boxcov.detectors.torchvision import wrap

    detector = wrap(cases.MODELS[name](), cases.NAMES)
    x = [cases.images(seed=seed)[0] for seed in (0, 1)]
    assert_promises(detector, x, [x[:1], x[1:]])
