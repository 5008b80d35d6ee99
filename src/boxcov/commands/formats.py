"""The formats that ``boxcov predict`` writes: refused before the work where they do not fit the data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from boxcov.commands.sources import KITTI_AS_NUSCENES, Turned
from boxcov.data import coco, kitti, nuscenes
from boxcov.data.coco.results import IMAGE_FIELDS
from boxcov.data.poses import BOX_FIELDS, Pose, moved
from boxcov.detections import Detections
from boxcov.detector import Detector
from boxcov.errors import BoxcovError

TURN_BACK = Pose(torch.tensor([[0.0, 1.0, 0.0], [-1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]), torch.zeros(3))  # from nuScenes' axes to KITTI's


def check(format: str, out: Path, frames: Sequence[Any], detector: Detector) -> None:
    """Whether the boxes of ``detector`` in ``frames`` can be written to ``out`` in this format."""
    fields = tuple(detector.box_fields)
    if format == "nuscenes" and not isinstance(frames, nuscenes.NuScenes):
        raise BoxcovError("the format nuscenes is for frames of nuScenes: give --data nuscenes:ROOT, or take the format native")
    if format == "nuscenes" and fields != BOX_FIELDS:
        raise BoxcovError(f"the format nuscenes holds boxes {' '.join(BOX_FIELDS)}; those of this detector are {' '.join(fields)}")
    if format == "kitti" and not isinstance(frames, kitti.Kitti | Turned):
        raise BoxcovError("the format kitti is for frames of KITTI: give --data kitti:ROOT, or take the format native")
    if format == "coco" and fields != IMAGE_FIELDS:
        raise BoxcovError(f"the format coco holds boxes x1 y1 x2 y2 in images; those of this detector are {' '.join(fields)}")
    if format == "coco" and not isinstance(frames, coco.Coco):
        raise BoxcovError("the format coco is for images of COCO: give --data coco:ROOT, or take the format native")
    if format == "kitti" and out.is_file():
        raise BoxcovError(f"{out}: is a file; the format kitti writes a folder")
    if format != "kitti" and out.is_dir():
        raise BoxcovError(f"{out}: is a folder; give the name of a file")


def write(format: str, out: Path, frames: Any, found: Detections) -> None:
    """All boxes of all frames, in a format that ``check`` has let pass."""
    if format == "native":
        found.save(out)
        return
    each = (part for part in found.frames(len(frames)))
    if format == "nuscenes":
        nuscenes.write_results(out, frames, each)
    elif format == "kitti" and isinstance(frames, Turned):
        kitti.write_results(out, frames.drive, (as_kitti(part) for part in each))
    elif format == "kitti":
        kitti.write_results(out, frames, (replace(part, classes=kitti.CLASSES) for part in each))
    else:
        coco.write_results(out, frames, each)


def as_kitti(found: Detections) -> Detections:
    """Boxes in nuScenes' axes and classes as KITTI has them: x ahead; cars, people and cyclists, nothing else.

    >>> box = torch.tensor([[-2.0, 10.0, 0, 1.8, 4.2, 1.5, 1.5707964, 0, 5], [0.0, 9, 0, 1, 1, 1, 0, 0, 0]])
    >>> two = Detections(box, torch.ones(2), torch.tensor([1, 0]), torch.zeros(2), BOX_FIELDS, ("barrier", "car"))
    >>> there = as_kitti(two)
    >>> there.boxes[0].tolist()[:2], abs(there.boxes[0, 6].item()) < 1e-6, there.classes[there.labels[0]], len(there)
    ([10.0, 2.0], True, 'Car', 1)
    """
    back = {theirs: name for name, theirs in KITTI_AS_NUSCENES.items()}
    names = [back.get(found.classes[label]) for label in found.labels.tolist()]
    known = found[[row for row, name in enumerate(names) if name is not None]]
    labels = torch.tensor([kitti.CLASSES.index(name) for name in names if name is not None], dtype=torch.long)
    return moved(replace(known, labels=labels, classes=kitti.CLASSES), TURN_BACK)


def plain(about: dict[str, Any]) -> dict[str, Any]:
    """As a file would give it back: tuples are lists, keys are text.

    >>> plain({"depth": ("a", "b")})
    {'depth': ['a', 'b']}
    """
    again: dict[str, Any] = json.loads(json.dumps(about))
    return again
