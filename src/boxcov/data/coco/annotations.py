"""COCO's annotation file, read and checked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from os.path import isfile
from pathlib import Path
from typing import Any
from warnings import warn

from boxcov.data.points import check_objects
from boxcov.data.sequence import leads_out
from boxcov.errors import BoxcovError, BoxcovWarning, join_names
from boxcov.input_file import conform, read_json, reading

Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Picture:
    """One image and its objects."""

    id: int
    file: str
    width: int
    height: int
    boxes: tuple[Box, ...]  # x1 y1 x2 y2 in pixels, clipped to the image
    labels: tuple[int, ...]
    crowds: tuple[Box, ...]  # regions with several objects of a class
    crowd_labels: tuple[int, ...]


@dataclass(frozen=True)
class Annotations:
    """The images of a file in their order, and its classes."""

    pictures: list[Picture]
    classes: tuple[str, ...]
    category_ids: tuple[int, ...]  # of each class


def read_annotations(path: Path, classes: Sequence[str] | None = None) -> Annotations:
    """Read an annotation file.

    Objects of other ``classes`` are left out. The default is all classes of the file in the order
    of their category ids.
    """
    if not isfile(path):
        raise BoxcovError(f"{path}: no such file: unpack COCO's annotations there")
    with reading(path, "COCO's annotations"):
        return _annotations(read_json(path), classes, path)


def _annotations(content: Any, classes: Sequence[str] | None, path: Path) -> Annotations:
    ids = {
        conform(entry["name"], str, f"{path}: the name of a category"): int(entry["id"])
        for entry in sorted(content["categories"], key=lambda entry: int(entry["id"]))
    }
    if len(set(ids.values())) < len(content["categories"]):
        raise BoxcovError(f"{path}: two categories have the same name or id")
    classes = tuple(ids) if classes is None else tuple(classes)
    unknown = [name for name in classes if name not in ids]
    if unknown:
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
    if len({picture.id for picture in pictures}) < len(pictures):
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
    single: list[tuple[Box, int]] = []
    crowds: list[tuple[Box, int]] = []
    for thing in objects:
        who, category = f"{path}: object {thing.get('id')}", int(thing["category_id"])
        if category not in label_of:
            raise BoxcovError(f"{who} is of category {category}, which the file does not list")
        box, label = _clip(thing["bbox"], width, height, who), label_of[category]
        if box is not None and label is not None:
            (crowds if thing.get("iscrowd") else single).append((box, label))
    columns = [tuple(zip(*rows)) or ((), ()) for rows in (single, crowds)]
    return Picture(number, name, width, height, *columns[0], *columns[1])


def _clip(bbox: Any, width: int, height: int, who: str) -> Box | None:
    """Return a box x y w h as x1 y1 x2 y2 clipped to the image; None if it lies outside."""
    x, y, w, h = map(float, bbox)
    if not all(map(isfinite, (x, y, w, h))):
        raise BoxcovError(f"{who} has the box {bbox}")
    box = max(x, 0.0), max(y, 0.0), min(x + w, float(width)), min(y + h, float(height))
    return box if box[2] > box[0] and box[3] > box[1] else None
