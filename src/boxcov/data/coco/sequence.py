"""COCO's images as inputs of a detector, with their objects, read from its annotation file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from math import isfinite
from numbers import Integral
from os.path import isfile  # False, not an error, for a path that is too long or has a NUL
from pathlib import Path
from typing import Any
from warnings import warn

import torch
from torch import Tensor

from boxcov._files.input_file import conform, read_json, reading
from boxcov.data.coco.images import letterbox, read_image
from boxcov.data.points import check_objects
from boxcov.data.sequence import FrameSequence, leads_out
from boxcov.errors import BoxcovError, BoxcovWarning, counted, join_names

Frame = tuple[Tensor, list[dict[str, Any]]]
Change = Callable[[Tensor], Tensor]
Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Picture:
    """One image and its objects."""

    id: int
    file: str
    width: int
    height: int
    objects: list[tuple[Box, int]]  # x1 y1 x2 y2 in pixels, clipped to the image; label
    crowds: list[tuple[Box, int]]  # regions with several objects of a class


@dataclass(frozen=True)
class Annotations:
    """The images of a file in their order, and its classes."""

    pictures: list[Picture]
    classes: tuple[str, ...]
    category_ids: tuple[int, ...]  # of each class


class Coco(FrameSequence):
    """Images of one split; made by ``frames``. Images are read when they are indexed."""

    def __init__(self, folder: Path, annotations: Annotations, size: int | None) -> None:
        super().__init__(len(annotations.pictures))
        self.folder, self.annotations, self.size = folder, annotations, size
        self.classes, self.category_ids = annotations.classes, annotations.category_ids
        self.change: Change | None = None

    def changed(self, change: Change) -> Coco:
        """Return the frames with ``change``, such as a blur, applied to each image (3, h, w)."""
        result = copy(self)
        result.change = change
        return result

    @property
    def has_labels(self) -> bool:
        """False for a file without annotations, as that of the test images."""
        return any(picture.objects for picture in self.annotations.pictures)

    @property
    def image_ids(self) -> list[int]:
        """COCO's id of each image."""
        return [self.annotations.pictures[index].id for index in self.indices]

    @property
    def names(self) -> list[str]:
        """The file of each image."""
        files = (self.annotations.pictures[index].file for index in self.indices)
        return [str(self.folder / file) for file in files]

    def scale(self, item: int) -> float:
        """Return the pixels of the input per pixel of the image, without reading the image."""
        picture = self.annotations.pictures[self.indices[item]]
        size = self.size
        return 1.0 if size is None else min(size / picture.height, size / picture.width)

    def extent(self, item: int) -> tuple[float, float]:
        """Return the width and height of the image in pixels of the input, without the padding."""
        picture, scale = self.annotations.pictures[self.indices[item]], self.scale(item)
        return scale * picture.width, scale * picture.height

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
        boxes, labels = _tensors(picture.objects, scale)
        crowds, crowd_labels = _tensors(picture.crowds, scale)
        target = {"boxes": boxes, "labels": labels, "crowds": crowds, "crowd_labels": crowd_labels}
        return shown.unsqueeze(0), [{**target, "image_id": picture.id, "scale": scale}]


def _tensors(objects: list[tuple[Box, int]], scale: float) -> tuple[Tensor, Tensor]:
    """Return boxes (n, 4) in pixels of the input, and labels (n,)."""
    boxes = torch.tensor([box for box, _ in objects], dtype=torch.float32).reshape(-1, 4)
    return scale * boxes, torch.tensor([label for _, label in objects], dtype=torch.long)


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
    if size is not None and not (isinstance(size, Integral) and size >= 32 and size % 32 == 0):
        raise BoxcovError(
            f"size must be a multiple of 32 pixels, or None for images as they are, got {size}"
        )
    path = Path(root) / "annotations" / f"instances_{split}.json"
    if not isfile(path):
        raise BoxcovError(f"{path}: no such file: unpack COCO's annotations there")
    with reading(path, "COCO's annotations"):
        annotations = _annotations(read_json(path), classes, path)
    if not annotations.pictures:
        raise BoxcovError(f"{root}: the split {split} has no images")
    return Coco(Path(root) / split, annotations, size)


# the annotation file


def _annotations(content: Any, classes: Sequence[str] | None, path: Path) -> Annotations:
    """Return what the file says; the classes are all of it, by category id, unless given."""
    ids = {
        conform(entry["name"], str, f"{path}: the name of a category"): int(entry["id"])
        for entry in sorted(content["categories"], key=lambda entry: int(entry["id"]))
    }
    if len(set(ids.values())) < len(content["categories"]):
        raise BoxcovError(f"{path}: two categories have the same name or id")
    classes = tuple(ids) if classes is None else tuple(classes)
    if unknown := [name for name in classes if name not in ids]:
        raise BoxcovError(f"{path}: no class {join_names(unknown)}: there are {join_names(ids)}")
    label_of: dict[int, int | None] = dict.fromkeys(ids.values())  # None: left out
    label_of |= {ids[name]: label for label, name in enumerate(classes)}
    objects: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for entry in content.get("annotations", ()):
        objects[int(entry["image_id"])].append(entry)
    pictures = [
        _picture(entry, objects.get(int(entry["id"]), []), label_of, path)
        for entry in content["images"]
    ]
    numbers = {picture.id for picture in pictures}
    if stray := sorted(set(objects) - numbers):
        raise BoxcovError(
            f"{path}: objects in {counted(len(stray), 'image')} that it does not list "
            f"({join_names(map(str, stray))})"
        )
    if len(numbers) < len(pictures):
        raise BoxcovError(f"{path}: two images have the same id")
    _warn_of_units(content["images"], objects, path)
    return Annotations(pictures, classes, tuple(ids[name] for name in classes))


def _warn_of_units(images: Any, objects: dict[int, list[dict[str, Any]]], path: Path) -> None:
    """Warn if most boxes cannot be x y width height in pixels: corners, or shares of the image."""
    boxes, beyond, small = 0, 0, 0
    for image in images:
        for thing in objects.get(int(image["id"]), ()):
            x, y, w, h = map(float, thing["bbox"])
            boxes += 1
            beyond += x + w > float(image["width"]) + 1 or y + h > float(image["height"]) + 1
            small += max(w, h) <= 1
    wrong = {"reach beyond the border": beyond, "are at most 1 pixel large": small}
    for what, count in wrong.items():
        if 2 * count > boxes:
            warn(
                f"{path}: {count} of {boxes} boxes {what}: COCO's are x y width height in pixels. "
                "Convert them if these are x1 y1 x2 y2, or shares of the image",
                BoxcovWarning,
                stacklevel=2,
            )


def _picture(
    entry: dict[str, Any],
    objects: list[dict[str, Any]],
    label_of: dict[int, int | None],
    path: Path,
) -> Picture:
    """Return an image with its objects, without those outside the image or of other classes."""
    number, width, height = (int(entry[key]) for key in ("id", "width", "height"))
    name = conform(entry["file_name"], str, f"{path}: image {number}: file_name")
    check_objects(len(objects), f"{path}: image {number}")
    if leads_out(name):
        raise BoxcovError(
            f"{path}: image {number} has the file name {name!r}, which leads out of the folder of "
            "the images"
        )
    if width < 1 or height < 1:
        raise BoxcovError(f"{path}: image {number} is {width} x {height} pixels large")
    picture = Picture(number, name, width, height, [], [])
    for thing in objects:
        who, category = f"{path}: object {thing.get('id')}", int(thing["category_id"])
        if category not in label_of:
            raise BoxcovError(f"{who} is of category {category}, which the file does not list")
        box, label = _clip(thing["bbox"], width, height, who), label_of[category]
        if box is not None and label is not None:
            found = picture.crowds if thing.get("iscrowd") else picture.objects
            found.append((box, label))
    return picture


def _clip(bbox: Any, width: int, height: int, who: str) -> Box | None:
    """Return a box x y w h as x1 y1 x2 y2 clipped to the image; None if it lies outside."""
    x, y, w, h = map(float, bbox)
    if not all(map(isfinite, (x, y, w, h))):
        raise BoxcovError(f"{who} has the box {bbox}")
    box = max(x, 0.0), max(y, 0.0), min(x + w, float(width)), min(y + h, float(height))
    return box if box[2] > box[0] and box[3] > box[1] else None
