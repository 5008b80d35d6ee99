"""COCO's images as inputs of a detector, with their objects in the same pixels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from boxcov.data.coco.annotations import Annotations, read_annotations
from boxcov.data.coco.images import letterbox, read_image
from boxcov.data.sequence import FrameSequence
from boxcov.errors import BoxcovError

Frame = tuple[Tensor, list[dict[str, Any]]]
Change = Callable[[Tensor], Tensor]


class Coco(FrameSequence):
    """Images of one split; made by ``frames``. Images are read when they are indexed."""

    def __init__(self, folder: Path, annotations: Annotations, size: int | None) -> None:
        super().__init__(len(annotations.pictures))
        self.folder, self.annotations, self.size = folder, annotations, size
        self.change: Change | None = None

    def changed(self, change: Change) -> Coco:
        """Return the frames with ``change``, such as a blur, applied to each image (3, h, w)."""
        result = copy(self)
        result.change = change
        return result

    @property
    def has_labels(self) -> bool:
        """False for a file without annotations, as that of the test images."""
        return any(picture.labels for picture in self.annotations.pictures)

    @property
    def classes(self) -> tuple[str, ...]:
        return self.annotations.classes

    @property
    def category_ids(self) -> tuple[int, ...]:
        """COCO's id of each class."""
        return self.annotations.category_ids

    @property
    def image_ids(self) -> list[int]:
        """COCO's id of each image."""
        return [self.annotations.pictures[index].id for index in self.indices]

    def scale(self, item: int) -> float:
        """Return the pixels of the input per pixel of the image, without reading the image."""
        picture = self.annotations.pictures[self.indices[item]]
        if self.size is None:
            return 1.0
        return min(self.size / picture.height, self.size / picture.width)

    def load(self, index: int) -> Frame:
        picture = self.annotations.pictures[index]
        path = self.folder / picture.file
        image = read_image(path)
        height, width = image.shape[1:]
        if (height, width) != (picture.height, picture.width):
            raise BoxcovError(
                f"{path}: {width} x {height} pixels, and {picture.width} x {picture.height} in the "
                "annotations"
            )
        image = image if self.change is None else self.change(image)
        shown, scale = (image.float(), 1.0) if self.size is None else letterbox(image, self.size)
        target = {
            "boxes": scale * torch.tensor(picture.boxes, dtype=torch.float32).reshape(-1, 4),
            "labels": torch.tensor(picture.labels, dtype=torch.long),
            "crowds": scale * torch.tensor(picture.crowds, dtype=torch.float32).reshape(-1, 4),
            "crowd_labels": torch.tensor(picture.crowd_labels, dtype=torch.long),
            "image_id": picture.id,
            "scale": scale,
        }
        return shown.unsqueeze(0), [target]


def frames(
    root: str | Path,
    split: str = "val2017",
    size: int | None = 416,
    classes: Sequence[str] | None = None,
) -> Coco:
    """Return the images in ``root/split`` that ``root/annotations/instances_SPLIT.json`` lists.

    A frame is ``(inputs, targets)``. The inputs (1, 3, size, size) are blue, green and red from 0
    to 255. The image is scaled to fit and placed at the upper left; the rest is grey. With
    ``size=None`` the image keeps its size, for a detector that prepares its images itself.

    The targets are a list of one dict: ``boxes`` (n, 4) x1 y1 x2 y2 in pixels of the input,
    clipped to the image; ``labels`` (n,), indices into ``classes``; ``crowds`` (k, 4) and
    ``crowd_labels`` (k,), regions of several objects, which the evaluation ignores; ``image_id``;
    and ``scale``, the pixels of the input per pixel of the image.

    ``classes`` are all of the file unless given; objects of other classes are left out.

    >>> frames("nowhere")
    Traceback (most recent call last):
    ...
    boxcov.errors.BoxcovError: nowhere/annotations/instances_val2017.json: no such file: ...
    """
    if size is not None and (size < 32 or size % 32):
        raise BoxcovError(
            f"size must be a multiple of 32 pixels, or None for images as they are, got {size}"
        )
    annotations = read_annotations(Path(root) / "annotations" / f"instances_{split}.json", classes)
    if not annotations.pictures:
        raise BoxcovError(f"{root}: the split {split} has no images")
    return Coco(Path(root) / split, annotations, size)
