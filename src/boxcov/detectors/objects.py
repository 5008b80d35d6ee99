"""Inputs and targets of the image detectors, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from boxcov.errors import BoxcovError


def check_images(images: Tensor, divisor: int) -> None:
    """Raise an error unless images are (B, 3, h, w) with sides divisible by ``divisor``."""
    shape = tuple(images.shape)
    if len(shape) != 4 or shape[1] != 3 or shape[2] % divisor or shape[3] % divisor:
        raise BoxcovError(
            f"images must be (B, 3, h, w) with sides divisible by {divisor}, "
            f"got {shape}: letterbox them"
        )


def objects_of(
    targets: Sequence[Mapping[str, Any]], classes: int, like: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Return the boxes (n, 4), x1 y1 x2 y2, and labels (n,) of each frame's target, checked.

    They have the dtype and device of ``like`` (B, ...). classes: the number of classes.
    """
    check_one_per_frame(targets, len(like))
    return [_objects(target, b, classes, like) for b, target in enumerate(targets)]


def _objects(
    target: Mapping[str, Any], frame: int, classes: int, like: Tensor
) -> tuple[Tensor, Tensor]:
    for name, shape in (("boxes", "(n, 4)"), ("labels", "(n,)")):
        if not isinstance(target.get(name), Tensor):
            raise BoxcovError(
                f"targets of frame {frame}: {name} must be a tensor {shape}, "
                f"got a {type(target.get(name)).__name__}"
            )
    boxes, labels = target["boxes"].to(like), target["labels"].to(like.device).long()
    if boxes.dim() != 2 or boxes.shape[1] != 4 or labels.shape != boxes.shape[:1]:
        raise BoxcovError(
            f"targets of frame {frame}: boxes must have the shape (n, 4) for x1 y1 x2 y2 "
            f"and labels (n,), got {tuple(boxes.shape)} and {tuple(labels.shape)}"
        )
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise BoxcovError(
            f"targets of frame {frame}: labels from {int(labels.min())} to {int(labels.max())}, "
            f"but {classes} classes"
        )
    size = boxes[:, 2:] - boxes[:, :2]
    if not bool(((size > 0) & boxes[:, :2].isfinite() & size.isfinite()).all()):
        raise BoxcovError(
            f"targets of frame {frame}: boxes must be finite x1 y1 x2 y2 with x1 < x2 and y1 < y2"
        )
    return boxes, labels


def check_one_per_frame(targets: Any, frames: int) -> None:
    """Raise if the number of targets is not the number of frames."""
    if len(targets) != frames:
        raise BoxcovError(f"{frames} frames in the batch, but targets for {len(targets)}")
