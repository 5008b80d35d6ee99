"""The objects of an image, as the targets of every image detector give them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from boxcov.errors import BoxcovError


def objects_of(
    target: Mapping[str, Any], frame: int, classes: int, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Boxes (n, 4) as x1 y1 x2 y2 and labels (n,) below ``classes`` of one frame's target, checked,
    of the kind of ``like`` and beside it.

    >>> import torch
    >>> objects_of({"boxes": [[0, 0, 2, 4]], "labels": torch.tensor([7])}, 3, 5, torch.zeros(1))
    Traceback (most recent call last):
    ...
    boxcov.errors.BoxcovError: targets of frame 3: boxes must be a tensor (n, 4), got a list
    >>> objects_of({"boxes": torch.tensor([[0.0, 0, 2, 4]]), "labels": torch.tensor([7])}, 3, 5, torch.zeros(1))
    Traceback (most recent call last):
    ...
    boxcov.errors.BoxcovError: targets of frame 3: labels from 7 to 7, but 5 classes
    """
    for name, shape in (("boxes", "(n, 4)"), ("labels", "(n,)")):
        if not isinstance(target.get(name), Tensor):
            raise BoxcovError(
                f"targets of frame {frame}: {name} must be a tensor {shape}, got a {type(target.get(name)).__name__}"
            )
    boxes, labels = target["boxes"].to(like), target["labels"].to(like.device).long()
    if boxes.dim() != 2 or boxes.shape[1] != 4 or labels.shape != boxes.shape[:1]:
        raise BoxcovError(
            f"targets of frame {frame}: boxes must have the shape (n, 4) for x1 y1 x2 y2 and labels (n,), "
            f"got {tuple(boxes.shape)} and {tuple(labels.shape)}"
        )
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise BoxcovError(
            f"targets of frame {frame}: labels from {int(labels.min())} to {int(labels.max())}, but {classes} classes"
        )
    size = boxes[:, 2:] - boxes[:, :2]
    if not bool(((size > 0) & boxes[:, :2].isfinite() & size.isfinite()).all()):
        raise BoxcovError(
            f"targets of frame {frame}: boxes must be finite x1 y1 x2 y2 with x1 < x2 and y1 < y2"
        )
    return boxes, labels


def check_one_a_frame(targets: Any, frames: int) -> None:
    """Whether there is a target for each frame of a batch.

    >>> check_one_a_frame([{}], 2)
    Traceback (most recent call last):
    ...
    boxcov.errors.BoxcovError: 2 frames in the batch, but targets for 1
    """
    if len(targets) != frames:
        raise BoxcovError(f"{frames} frames in the batch, but targets for {len(targets)}")
