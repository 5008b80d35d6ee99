"""The inputs of the error model: named numbers of each box."""

from __future__ import annotations

from dataclasses import replace
from math import log, pi

import pytest
import torch

from boxcov.concatenation import concatenate
from boxcov.detections import Detections
from boxcov.error_model import inputs as inputs_module
from boxcov.error_model.inputs import box_inputs, stack_inputs

LIDAR = ("x", "y", "z", "w", "l", "h", "yaw", "vx", "vy")
IMAGE = ("x1", "y1", "x2", "y2")


def random_boxes(m: int, fields: tuple[str, ...] = LIDAR, seed: int = 0) -> Detections:
    generator = torch.Generator().manual_seed(seed)
    D = len(fields)
    boxes = 20 * torch.rand(m, D, generator=generator)
    if fields == IMAGE:
        boxes[:, 2:] += boxes[:, :2]
    roots = torch.randn(m, D, D, generator=generator)
    return Detections(
        boxes=boxes,
        scores=torch.rand(m, generator=generator),
        labels=torch.randint(0, 2, (m,), generator=generator),
        frame=torch.zeros(m, dtype=torch.long),
        fields=fields,
        classes=("car", "bus"),
        covariance=roots @ roots.mT,
        signals=torch.randn(m, 2, generator=generator),
        meta={"signals": ["peak", "margin"]},
    )


def stacked(found: Detections) -> torch.Tensor:
    named = box_inputs(found)
    return stack_inputs(named, tuple(named))


@pytest.mark.parametrize("fields", [LIDAR, IMAGE])
def test_a_batch_equals_its_frames(fields: tuple[str, ...]) -> None:
    first, second = random_boxes(7, fields, 1), random_boxes(4, fields, 2)
    second = replace(second, frame=second.frame + 1)
    both = stacked(concatenate([first, second]))
    torch.testing.assert_close(both, torch.cat([stacked(first), stacked(second)]))


@pytest.mark.parametrize("fields", [LIDAR, IMAGE])
def test_permuted_boxes_have_permuted_inputs(fields: tuple[str, ...]) -> None:
    found = random_boxes(30, fields)
    found = replace(found, frame=torch.arange(30) % 3)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(stacked(found[order]), stacked(found)[order])


@pytest.mark.parametrize("m", [0, 1, 500])
@pytest.mark.parametrize("fields", [LIDAR, IMAGE, ("w", "h", "yaw")])
def test_any_number_of_boxes_has_finite_inputs(m: int, fields: tuple[str, ...]) -> None:
    named = box_inputs(random_boxes(m, fields))
    assert all(column.shape == (m,) for column in named.values())
    assert bool(stack_inputs(named, tuple(named)).isfinite().all())


def test_many_frames_are_done_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found = random_boxes(60)
    found = replace(found, frame=torch.arange(60) * 7 % 5)  # not in order
    expected = box_inputs(found)
    monkeypatch.setattr(inputs_module, "_MOST", 20)
    again = box_inputs(found)
    assert list(again) == list(expected)
    for name, column in expected.items():
        torch.testing.assert_close(again[name], column)


@pytest.mark.parametrize("fields", [LIDAR, IMAGE])
def test_a_crowded_frame_is_done_in_parts(monkeypatch: pytest.MonkeyPatch, fields) -> None:
    found = random_boxes(60, fields)
    expected = box_inputs(found)
    monkeypatch.setattr(inputs_module, "_MOST", 20)  # 400 pairs at once
    again = box_inputs(found)
    assert list(again) == list(expected)
    for name, column in expected.items():
        torch.testing.assert_close(again[name], column)


def test_optional_inputs_need_their_numbers() -> None:
    found = random_boxes(5)
    full = set(box_inputs(found))
    bare = set(box_inputs(replace(found, covariance=None, signals=None)))
    assert full - bare == {"signal peak", "signal margin"} | {f"variance {f}" for f in LIDAR}
    with_logit = replace(found, score_variance=torch.ones(5))
    assert set(box_inputs(with_logit)) - full == {"variance logit"}
    no_place = set(box_inputs(random_boxes(5, ("w", "h", "yaw"))))
    assert {"score", "log w", "class car"} <= no_place
    assert not {"log range", "nearest box", "log speed"} & no_place


def test_values_of_a_known_frame() -> None:
    boxes = torch.zeros(3, 9)
    boxes[:, 3:6] = torch.tensor([2.0, 4.0, 1.0])
    boxes[0, :2] = torch.tensor([3.0, 4.0])
    boxes[1, :2] = torch.tensor([3.0, 6.0])
    boxes[2, :2] = torch.tensor([30.0, 4.0])
    boxes[0, 6:] = torch.tensor([pi / 2, 3.0, 4.0])
    found = Detections(
        boxes,
        torch.tensor([0.5, 0.9, 0.25]),
        torch.tensor([0, 1, 0]),
        torch.zeros(3, dtype=torch.long),
        LIDAR,
        ("car", "bus"),
        torch.eye(9).repeat(3, 1, 1) * 4.0,
    )
    first = {name: float(column[0]) for name, column in box_inputs(found).items()}
    assert first["score"] == pytest.approx(0.0, abs=1e-6)
    assert first["log l"] == pytest.approx(log(4.0))
    assert first["log range"] == pytest.approx(0.5 * log(26.0))
    assert first["log speed"] == pytest.approx(0.5 * log(25.01))
    assert first["nearest box"] == pytest.approx(log(2.0))
    assert first["nearest of class"] == pytest.approx(log(27.0))
    assert first["boxes in frame"] == pytest.approx(log(4.0))
    assert first["scores nearby"] == pytest.approx(0.9)
    assert (first["class car"], first["class bus"]) == (1.0, 0.0)
    assert first["variance x"] == pytest.approx(log(4.0))


def test_axes_do_not_depend_on_the_front() -> None:
    found = random_boxes(10)
    turned = found.boxes.clone()
    turned[:, 6] += pi
    torch.testing.assert_close(
        stacked(replace(found, boxes=turned)), stacked(found), rtol=1e-4, atol=1e-4
    )


def test_image_neighbours_are_measured_in_sides_of_the_box() -> None:
    boxes = torch.tensor([[1000.0, 1000, 1010, 1010], [985.0, 985, 1025, 1025]])
    zeros = torch.zeros(2, dtype=torch.long)
    found = Detections(boxes, torch.ones(2), zeros, zeros, IMAGE, ("car",))
    nearest = box_inputs(found)["nearest box"].exp()  # the same centre: at the lower limit
    torch.testing.assert_close(nearest, torch.full((2,), 0.05))
    moved = replace(found, boxes=boxes + torch.tensor([[0.0], [1.0]]) * 100)
    ratio = box_inputs(moved)["nearest box"].exp()
    torch.testing.assert_close(ratio, torch.tensor([2.0**0.5 * 10, 2.0**0.5 * 2.5]))


def test_half_precision_boxes_give_float32_inputs() -> None:
    found = random_boxes(6)
    half = replace(found, boxes=found.boxes.half(), scores=found.scores.half())
    named = box_inputs(half)
    assert {column.dtype for column in named.values()} == {torch.float32}
    exact = box_inputs(replace(half, boxes=half.boxes.float(), scores=half.scores.float()))
    for name, column in exact.items():
        torch.testing.assert_close(named[name], column)
