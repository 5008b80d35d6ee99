"""COCO's images as detectors take them, with their objects in the same pixels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from boxcov.data.coco.annotations import Annotations, read_annotations
from boxcov.data.coco.images import letterbox, read_image
from boxcov.errors import BoxcovError

Frame = tuple[Tensor, list[dict[str, Any]]]
Change = Callable[[Tensor], Tensor]


class Coco(Sequence[Frame]):
    """Images of one split; ``frames[:50]`` is a part of them. Made by ``frames``, read when asked for, and may go to other processes."""

    def __init__(
        self, folder: Path, annotations: Annotations, size: int | None, change: Change | None = None
    ) -> None:
        self.folder, self.annotations, self.size, self.change = folder, annotations, size, change

    def changed(self, change: Change) -> Coco:
        """The same frames with ``change`` done to every image (3, h, w) of bytes, such as a ``boxcov.data.corruptions.Corruption``."""
        return Coco(self.folder, self.annotations, self.size, change)

    @property
    def classes(self) -> tuple[str, ...]:
        return self.annotations.classes

    @property
    def category_ids(self) -> tuple[int, ...]:
        """COCO's number of each class."""
        return self.annotations.category_ids

    @property
    def image_ids(self) -> list[int]:
        """COCO's number of each image."""
        return [picture.id for picture in self.annotations.pictures]

    def __len__(self) -> int:
        return len(self.annotations.pictures)

    def __getitem__(self, item: Any) -> Any:
        if isinstance(item, slice):
            return Coco(
                self.folder,
                replace(self.annotations, pictures=self.annotations.pictures[item]),
                self.size,
                self.change,
            )
        picture = self.annotations.pictures[item]
        path = self.folder / picture.file
        image = read_image(path)
        if tuple(image.shape[1:]) != (picture.height, picture.width):
            height, width = image.shape[1:]
            raise BoxcovError(
                f"{path}: {width} x {height} pixels, and {picture.width} x {picture.height} in the annotations"
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

    def scale(self, item: int) -> float:
        """Pixels that the detector sees, for one of the image itself; without reading the image."""
        picture = self.annotations.pictures[item]
        return (
            1.0 if self.size is None else min(self.size / picture.height, self.size / picture.width)
        )


def frames(
    root: str | Path,
    split: str = "val2017",
    size: int | None = 416,
    classes: Sequence[str] | None = None,
) -> Coco:
    """The images ``root/split`` that ``root/annotations/instances_SPLIT.json`` lists, in its order.

    A frame is ``(inputs, targets)``. The input (1, 3, size, size): blue, green and red from 0 to 255, scaled to fit and put into the upper
    left, grey beside it; with a size of None the image as it is, for a detector that prepares its images itself. The target is a list of
    one dict: ``boxes`` (n, 4) as x1 y1 x2 y2 in the pixels of the input, cut to the image, and ``labels`` (n,) into ``classes``;
    ``crowds`` (k, 4) and ``crowd_labels``, regions that are no single object and count neither for nor against a detector;
    ``image_id``; ``scale``, by which a box is divided to get pixels of the image.
    classes: those of the file by their number unless given, which a detector of COCO has too; objects of others are left out.

    >>> frames("nowhere")
    Traceback (most recent call last):
    ...
    boxcov.errors.BoxcovError: nowhere/annotations/instances_val2017.json: no such file: unpack COCO's annotations there
    """
    if size is not None and (size < 32 or size % 32):
        raise BoxcovError(
            f"size must be a multiple of 32 pixels, or None for images as they are, got {size}"
        )
    annotations = read_annotations(Path(root) / "annotations" / f"instances_{split}.json", classes)
    if not annotations.pictures:
        raise BoxcovError(f"{root}: the split {split} has no images")
    return Coco(Path(root) / split, annotations, size)
