"""Images and targets, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from boxcov.box_layout import SPACE
from boxcov.errors import BoxcovError, counted, join_names


def check_images(images: Tensor, divisor: int) -> None:
    """Raise unless images are floats (B, 3, h, w) with sides divisible by ``divisor``."""
    if not isinstance(images, Tensor) or not images.is_floating_point():
        found = images.dtype if isinstance(images, Tensor) else type(images).__name__
        raise BoxcovError(f"images must be a tensor of floats (B, 3, h, w), got {found}")
    shape = tuple(images.shape)
    if len(shape) != 4 or shape[1] != 3 or not all(n and n % divisor == 0 for n in shape[2:]):
        raise BoxcovError(
            f"images must be (B, 3, h, w) with sides divisible by {divisor}, "
            f"got {shape}: letterbox them"
        )


def objects_of(
    targets: Sequence[Mapping[str, Any]], fields: Sequence[str], classes: int, like: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Return the boxes (n, D) and labels (n,) of each frame's target, checked.

    They have the dtype and device of ``like`` (B, ...). classes: the number of classes.
    """
    if len(targets) != len(like):
        raise BoxcovError(
            f"{counted(len(like), 'frame')} in the batch, but targets for {len(targets)}"
        )
    objects = [_objects(target, b, fields, like) for b, target in enumerate(targets)]
    is_sound = [_sound_boxes(boxes) & _known(labels, classes) for boxes, labels in objects]
    if bool(torch.cat(is_sound).all()):  # one synchronisation with the device for all frames
        return objects
    frame = next(b for b, sound in enumerate(is_sound) if not bool(sound.all()))
    boxes, labels = objects[frame]
    if not bool(_known(labels, classes).all()):
        raise BoxcovError(
            f"targets of frame {frame}: labels from {int(labels.min())} to {int(labels.max())}, "
            f"but {counted(classes, 'class')}"
        )
    sides = "finite x1 y1 x2 y2 with x1 < x2 and y1 < y2"
    expected = sides if boxes.shape[1] == 4 else "finite; only velocities may be NaN"
    raise BoxcovError(f"targets of frame {frame}: boxes must be {expected}")


def _objects(
    target: Mapping[str, Any], frame: int, fields: Sequence[str], like: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the boxes (n, D) and labels (n,) of one frame, of the right shapes."""
    D, place = len(fields), f"targets of frame {frame}"
    if not isinstance(target, Mapping):
        raise BoxcovError(
            f"{place}: must be a dict with boxes and labels, got a {type(target).__name__}"
        )
    for name, shape in (("boxes", f"(n, {D})"), ("labels", "(n,)")):
        found = target.get(name)
        if not isinstance(found, Tensor):
            raise BoxcovError(
                f"{place}: {name} must be a tensor {shape}, got a {type(found).__name__}"
            )
    boxes, labels = target["boxes"].to(like), target["labels"].to(like.device)
    # a detector without velocities can be trained on data that has them
    widths = (D, D + 2) if tuple(fields) == SPACE else (D,)
    if boxes.dim() != 2 or boxes.shape[1] not in widths or labels.shape != boxes.shape[:1]:
        raise BoxcovError(
            f"{place}: boxes must have the shape (n, {D}) for {' '.join(fields)} "
            f"and labels (n,), got {tuple(boxes.shape)} and {tuple(labels.shape)}"
        )
    if labels.is_floating_point() and not bool((labels == labels.round()).all()):
        raise BoxcovError(
            f"{place}: labels must be whole numbers, got {join_names(map(str, labels.tolist()))}"
        )
    return boxes[:, :D], labels.long()


def _sound_boxes(boxes: Tensor) -> Tensor:
    """Return which boxes (n,) are possible: finite, and with an area if they are x1 y1 x2 y2."""
    if boxes.shape[1] != 4:
        return boxes[:, :7].isfinite().all(1)  # the velocities of nuScenes may be unknown
    size = boxes[:, 2:] - boxes[:, :2]
    return ((size > 0) & boxes[:, :2].isfinite() & size.isfinite()).all(1)


def _known(labels: Tensor, classes: int) -> Tensor:
    return (labels >= 0) & (labels < classes)
