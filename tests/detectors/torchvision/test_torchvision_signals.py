"""Signals of torchvision's detectors; answers known by hand need no torchvision."""

from __future__ import annotations

from math import log

import pytest
import torch

from boxcov.detectors.signals import pyramid_window
from boxcov.detectors.torchvision.signals import BoxOutputs, Regions, anchor_signals, region_signals
from helpers.signal_cases import assert_promises, slow_window


def found_of(background: int | None) -> BoxOutputs:
    return BoxOutputs(
        raw={"reg x": torch.tensor([0.5])},
        logits=torch.tensor([[0.0, 2.0, 3.0]]),
        number=torch.tensor([1]),
        background=background,
        sizes=torch.tensor([[40, 80]]),
    )


def test_an_anchor_among_its_neighbours() -> None:
    around = pyramid_window(torch.tensor([0]), [(1, 2)])
    boxes = torch.tensor([0.0, 4, 8, 12]).repeat(1, 9, 1)
    boxes[0, 5] = torch.tensor([8.0, 4, 16, 12])  # the only neighbour
    scores = torch.zeros(1, 9)
    scores[0, 4:6] = torch.tensor([1.0, -1.0])
    found = {k: v.item() for k, v in anchor_signals(found_of(0), around, boxes, scores).items()}
    values = [[4, 8, log(8), log(8)], [12, 8, log(8), log(8)]]
    expected = slow_window([1.0, -1.0], values, 0, "xywh")
    expected |= {"reg x": 0.5, "class margin": -1, "background margin": 2}
    expected |= {"touched sides": 1, "level": 0}
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-4), name
    assert set(found) == {*expected, "class entropy"}


def test_a_region_among_the_candidates_of_its_frame() -> None:
    boxes = torch.tensor([[[0.0, 0, 8, 8], [4, 0, 12, 8], [0, 0, 8, 8]]])
    regions = Regions(
        own=torch.tensor([0]),
        inside=torch.tensor([[True, True, False]]),  # the last one is another frame's
        boxes=boxes,
        scores=torch.tensor([[2.0, 1.0, 9.0]]),
        proposals=torch.tensor([[0.0, 0, 8, 4], [4, 0, 12, 8], [0, 0, 8, 8]]),
        objectness=torch.tensor([0.75, 1.0, 1.0]),
    )
    found = {k: v.item() for k, v in region_signals(found_of(None), regions).items()}
    assert found["logit"] == 2
    assert found["objectness"] == pytest.approx(log(3))
    assert found["proposal overlap"] == pytest.approx(0.5)
    assert found["nearest overlap"] == pytest.approx(1 / 3)
    assert found["nearest margin"] == 1
    assert found["touched sides"] == 2
    assert "background margin" not in found


@pytest.mark.parametrize("name", ["retinanet", "fcos", "ssd", "faster_rcnn"])
def test_a_batch_gives_what_each_frame_gives(name: str) -> None:
    pytest.importorskip("torchvision")
    cases = pytest.importorskip("helpers.torchvision_cases")
    from boxcov.detectors.torchvision import wrap

    detector = wrap(cases.MODELS[name](), cases.NAMES)
    x = [cases.images(seed=seed)[0] for seed in (0, 1)]
    assert_promises(detector, x, [x[:1], x[1:]])
