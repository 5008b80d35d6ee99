"""The loss of frames without objects, and of the detector's own boxes under other labels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from boxcov import check
from boxcov.data import shapes
from boxcov.detectors.tiny import Raw, TinyCenter
from helpers.broken_adapters import Base
from helpers.centerpoint_cases import detector_of, frames, pillar_config
from helpers.spots import spots

FRAME = shapes.frames(count=1)[0]


class MeanOverObjects(Base):
    def loss(self, raw: Raw, targets: Any) -> Tensor:
        objects = torch.tensor([len(target["boxes"]) for target in targets])
        return super().loss(raw, targets) / objects


class RootOfObjects(Base):
    """The value is finite, but its gradient is not."""

    def loss(self, raw: Raw, targets: Any) -> Tensor:
        objects = torch.tensor([len(target["boxes"]) for target in targets])
        return super().loss(raw, targets) + (raw["size"].square().sum((1, 2, 3)) * objects).sqrt()


class FirstObject(Base):
    def loss(self, raw: Raw, targets: Any) -> Tensor:
        return super().loss(raw, targets) + torch.stack([t["boxes"][0, 0] for t in targets])


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (MeanOverObjects, "without objects the loss is not finite"),
        (RootOfObjects, "without objects the gradient of the loss is not finite"),
        (FirstObject, r"without objects loss() raises IndexError"),
    ],
)
def test_a_loss_that_needs_objects_is_found(kind: Any, said: str) -> None:
    report = check(kind(), FRAME)
    assert report["loss"].passed
    assert report["loss: no objects"].passed is False
    assert said in report["loss: no objects"].seen
    assert "max(objects, 1)" in report["loss: no objects"].todo


def test_entries_that_are_not_by_object_stay() -> None:
    class Sized(Base):
        def loss(self, raw: Raw, targets: Any) -> Tensor:
            scale = torch.stack([target["size"][0] for target in targets])
            return super().loss(raw, targets) * scale

    inputs, (target,) = FRAME
    size = torch.full((len(target["boxes"]),), 2.0)  # as many numbers as objects
    assert check(Sized(), (inputs, [{**target, "size": size}]))["loss: no objects"].passed


def sure(background: int) -> tuple[Any, Any]:
    detector, image = spots(background=background)
    boxes = torch.tensor([[0.0, -1.0, 8.0, 7.0], [15.0, 0.0, 23.0, 8.0]])
    return detector, (image, [{"boxes": boxes, "labels": torch.tensor([0, 1])}])


def test_a_loss_that_counts_a_background_class_is_found() -> None:
    right, wrong = (check(*sure(background))["loss: labels"] for background in (0, 1))
    assert right.passed, right.seen
    assert wrong.passed is False, wrong.seen
    assert "labels shifted by one" in wrong.seen
    assert "without a background class" in wrong.todo


def test_unsure_boxes_say_nothing_about_labels() -> None:
    config = pillar_config()
    cases = [(detector_of(config), frames(config, 1)[0]), (TinyCenter(most=6), FRAME)]
    for detector, frame in cases:
        report = check(detector, frame)
        assert report["loss: labels"].passed is None
        assert report["loss: no objects"].passed
