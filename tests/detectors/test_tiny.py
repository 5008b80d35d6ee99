from __future__ import annotations

import math
import threading

import pytest
import torch

from boxcov.data import shapes
from boxcov.detectors.tiny import TinyCenter


def test_it_learned_to_detect(tiny: TinyCenter) -> None:
    """Most objects of unseen scenes are found to half a metre, with few boxes elsewhere."""
    truth = hits = extra = 0
    for inputs, targets in shapes.frames(count=30, seed=99):
        found = tiny.detect(inputs)
        found = found[found.scores > 0.3]
        boxes = targets[0]["boxes"]
        distance = torch.cdist(boxes[:, :2], found.boxes[:, :2])
        truth += len(boxes)
        hits += int((distance.amin(1) < 0.5).sum()) if len(found) else 0
        extra += int((distance.amin(0) > 2).sum())
    assert hits / truth > 0.85
    assert extra / truth < 0.15


class WaitingCenter(TinyCenter):
    """Stays in its pass until another thread is done."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = threading.local()

    def forward(self, inputs):
        if wait := getattr(self.waits, "wait", None):
            wait()
        return super().forward(inputs)


def test_detect_in_train_mode_is_safe_in_threads(image: torch.Tensor) -> None:
    detector = WaitingCenter()
    before = {name: buffer.clone() for name, buffer in detector.named_buffers()}
    in_pass, other_done = threading.Event(), threading.Event()

    def second() -> None:
        in_pass.wait(60)
        detector.waits.wait = lambda: (other_done.set(), first.join())
        detector.detect(image)

    def wait_for_second() -> None:
        in_pass.set()
        other_done.wait(60)

    def run_first() -> None:
        detector.waits.wait = wait_for_second
        detector.detect(image)

    first = threading.Thread(target=run_first)
    later = threading.Thread(target=second)
    later.start()
    first.start()
    later.join()
    assert all(torch.equal(before[name], buffer) for name, buffer in detector.named_buffers())
    assert detector.training


def test_detect_in_train_mode_is_that_of_eval_mode(tiny: TinyCenter, image: torch.Tensor) -> None:
    expected = tiny.detect(image)
    own = TinyCenter(threshold=tiny.threshold, most=tiny.most)
    own.load_state_dict(tiny.state_dict())
    own.train()
    own.head.eval()
    modes = [each.training for each in own.modules()]
    assert torch.equal(own.detect(image).boxes, expected.boxes)
    with pytest.raises(RuntimeError):
        own.detect(image[:, :0])
    assert [each.training for each in own.modules()] == modes
    state = tiny.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in own.state_dict().items())


def test_the_loss_is_one_value_a_frame(tiny: TinyCenter) -> None:
    items = [shapes.frames(count=3, seed=5)[i] for i in range(3)]
    together = tiny.loss(tiny(torch.cat([x for x, _ in items])), [t for _, ts in items for t in ts])
    alone = torch.cat([tiny.loss(tiny(x), ts) for x, ts in items])
    assert torch.allclose(together, alone, rtol=1e-4)


def test_targets_decode_to_their_boxes() -> None:
    detector = TinyCenter()
    _, targets = shapes.frames(count=1, seed=2)[0]
    encoded = detector.encode(targets, torch.zeros(1, 2, 32, 32))
    frame, row, column = encoded.mask.nonzero(as_tuple=True)
    boxes = detector._boxes(encoded.values[frame, :, row, column], row, column)
    expected = targets[0]["boxes"]
    order, wanted = boxes[:, 0].argsort(), expected[:, 0].argsort()
    assert torch.allclose(boxes[order], expected[wanted], atol=1e-4)
    assert float(boxes[:, 4].abs().max()) <= math.pi


@pytest.mark.parametrize("yaw", [0.0, math.pi])
def test_objects_off_the_map_are_skipped(yaw: float) -> None:
    targets = [{"boxes": torch.tensor([[-0.1, 5.0, 2.0, 4.0, yaw]]), "labels": torch.tensor([0])}]
    assert not bool(TinyCenter().encode(targets, torch.zeros(1, 2, 32, 32)).mask.any())
