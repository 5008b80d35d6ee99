from __future__ import annotations

from math import log

import pytest
import torch
from torch import nn

from boxcov import Selection
from boxcov.detectors.labels import Labels
from boxcov.detectors.transformers import wrap
from boxcov.detectors.transformers.families import RTDetr
from helpers.signal_cases import assert_promises
from helpers.transformers_cases import MODELS, detr, made, pixels


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_gives_what_each_frame_gives(name: str) -> None:
    x = pixels(2)
    assert_promises(made(name), x, [x[:1], x[1:]])


def test_layers_of_detr_where_the_raw_outputs_hold_them() -> None:
    x = pixels(2)
    detector = wrap(detr(auxiliary_loss=True), threshold=0.3)
    assert_promises(detector, x, [x[:1], x[1:]])
    with torch.no_grad():
        raw = detector(x)
        selection = detector.select(raw)
        frame, query = selection.where
        every = detector.model.bbox_predictor(raw["layers"]).sigmoid()  # (L, B, Q, 4)
        layers = detector.layer_boxes(raw, frame, query)
        torch.testing.assert_close(layers, every[:, frame, query].transpose(0, 1))
        assert "layers x" in detector.signals(raw, selection)


def test_answers_known_by_hand() -> None:
    boxes = torch.tensor([[[0.5, 0.5, 0.2, 0.4], [0.6, 0.5, 0.2, 0.4], [0.1, 0.1, 0.2, 0.2]]])
    raw = {
        "logits": torch.tensor([[[3.0, 2.0, -1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]]),
        "boxes": boxes,
        "all_boxes": torch.stack([boxes.roll(-1, 1), boxes], 1),  # first that of the next query
    }
    detector, zero = RTDetr(nn.Module(), Labels(("cat",), (0,)), 0.3), torch.tensor([0])
    selection = Selection(zero, torch.ones(1), zero, (zero, zero))
    plain = detector.signals(raw, selection)
    detector.background = -1
    found = {name: value.item() for name, value in detector.signals(raw, selection).items()}
    assert set(found) - set(plain) == {"background margin"}
    assert found["logit"] == 3
    assert found["class margin"] == 1
    assert found["background margin"] == 4
    assert found["nearest overlap"] == pytest.approx(1 / 3)
    assert found["nearest margin"] == 3
    assert found["reg x"] == 0
    assert found["dim w"] == pytest.approx(log(0.2 / 0.8))
    assert found["layers x"] == pytest.approx(0.5 * log(0.1**2 / 2 + 1e-6), abs=1e-5)
    assert found["layers h"] == pytest.approx(0.5 * log(1e-6), abs=1e-4)
    assert found["touched sides"] == 0
