"""The formats that ``boxcov predict`` and ``boxcov convert`` write: refused before the work where they do not fit the data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from boxcov.data import coco, kitti, nuscenes
from boxcov.data.coco.results import ALIASES, IMAGE_FIELDS
from boxcov.data.poses import BOX_FIELDS, Pose, transform_detections
from boxcov.detections import Detections
from boxcov.detector import Detector
from boxcov.errors import BoxcovError
from boxcov.export import ros, tables
from boxcov.export.choose import Which
from boxcov.export.rerun import write_rrd
from boxcov.files import replacing
from boxcov.pipeline.sources import KITTI_AS_NUSCENES, Turned

TURN_BACK = Pose(
    torch.tensor([[0.0, 1.0, 0.0], [-1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]), torch.zeros(3)
)  # from nuScenes' axes to KITTI's
MESSAGES = ("ros", "autoware")
FRAMES = (
    "nuscenes",
    "kitti",
    "coco",
    "rerun",
    *MESSAGES,
)  # formats that say more with the frames than without, or need them
PACKAGES = {"parquet": ("pyarrow", "analysis"), "rerun": ("rerun", "rerun")}


@dataclass(frozen=True)
class Words:
    """What the formats of messages must know beside the boxes."""

    frame_id: str = "lidar"
    covariance: Which = "predictive"


def check(
    format: str,
    frames: Sequence[Any] | None,
    boxes: Detector | Detections,
    calibrated: bool = False,
    words: Words | None = None,
) -> None:
    """Whether ``boxes``, or those of a detector to come, in ``frames`` can be written in this format."""
    fields = boxes.fields if isinstance(boxes, Detections) else tuple(boxes.box_fields)
    if format == "nuscenes" and not isinstance(frames, nuscenes.NuScenes):
        raise BoxcovError(
            "the format nuscenes is for frames of nuScenes: give --data nuscenes:ROOT, or take the format native"
        )
    if format == "nuscenes" and fields != BOX_FIELDS:
        raise BoxcovError(
            f"the format nuscenes holds boxes {' '.join(BOX_FIELDS)}; those of this detector are {' '.join(fields)}"
        )
    if format == "kitti" and not isinstance(frames, kitti.Kitti | Turned):
        raise BoxcovError(
            "the format kitti is for frames of KITTI: give --data kitti:ROOT, or take the format native"
        )
    if format == "coco" and fields != IMAGE_FIELDS:
        raise BoxcovError(
            f"the format coco holds boxes x1 y1 x2 y2 in images; those of this detector are {' '.join(fields)}"
        )
    if format == "coco" and not isinstance(frames, coco.Coco):
        raise BoxcovError(
            "the format coco is for images of COCO: give --data coco:ROOT, or take the format native"
        )
    if format == "autoware" and not set(BOX_FIELDS[:7]) <= set(fields):
        raise BoxcovError(
            f"the format autoware holds boxes {' '.join(BOX_FIELDS[:7])}; those of this detector are {' '.join(fields)}"
        )
    if format == "ros" and not (set(BOX_FIELDS[:7]) <= set(fields) or fields[:4] == IMAGE_FIELDS):
        raise BoxcovError(
            f"the format ros holds boxes {' '.join(BOX_FIELDS[:7])} or x1 y1 x2 y2; those of this detector are {' '.join(fields)}"
        )
    if format in MESSAGES and not calibrated and (words or Words()).covariance == "predictive":
        raise BoxcovError(
            f"the format {format} is for trackers, which take its covariance for that of the errors: give --calibrated with a posterior that boxcov "
            "calibrate wrote, or say --covariance epistemic"
        )
    package, extra = PACKAGES.get(format, ("json", ""))
    if find_spec(package) is None:
        raise BoxcovError(f"the format {format} needs {package}: pip install 'boxcov[{extra}]'")


def write(
    format: str, out: Path, frames: Any, found: Detections, words: Words | None = None
) -> None:
    """All boxes of all frames, in a format that ``check`` has let pass; ``frames`` may be None where it is not one of ``FRAMES``."""
    if format == "native":
        found.save(out)
    elif format == "csv":
        tables.write_csv(out, found)
    elif format == "parquet":
        tables.write_parquet(out, found)
    elif format == "rerun":
        write_rrd(out, found, frames, "BGR" if isinstance(frames, coco.Coco) else "RGB")
    elif format in MESSAGES:
        _write_messages(format, out, frames, found, words or Words())
    else:
        _write_results(format, out, frames, found)


def _write_results(format: str, out: Path, frames: Any, found: Detections) -> None:
    each = (part for part in found.frames(len(frames)))
    if format == "nuscenes":
        nuscenes.write_results(out, frames, each)
    elif format == "kitti" and isinstance(frames, Turned):
        kitti.write_results(out, frames.drive, (as_kitti(part) for part in each))
    elif format == "kitti":
        kitti.write_results(out, frames, (replace(part, classes=kitti.CLASSES) for part in each))
    else:
        coco.write_results(out, frames, each, also=ALIASES)


def _write_messages(format: str, out: Path, frames: Any, found: Detections, words: Words) -> None:
    """One message a frame, with the time of the frame where the data set knows it, in the axes of the data set's own sensor."""
    if isinstance(frames, Turned):
        found = transform_detections(found, TURN_BACK)
    image = found.fields[:4] == IMAGE_FIELDS
    make = (
        ros.detected_objects
        if format == "autoware"
        else ros.detection2d_array
        if image
        else ros.detection3d_array
    )
    kinds = {
        "autoware": "autoware_perception_msgs/DetectedObjects",
        "ros": f"vision_msgs/Detection{2 if image else 3}DArray",
    }
    count = found.meta.get("frames") if frames is None else len(frames)
    messages = []
    for number, part in enumerate(found.frames(count)):
        time = frames.timestamp(number) if isinstance(frames, nuscenes.NuScenes) else 0
        stamp = (time // 1_000_000, time % 1_000_000 * 1000)
        messages.append(make(part, words.frame_id, stamp, covariance=words.covariance))
    about = {
        "type": kinds[format],
        "covariance": words.covariance,
        "uncertainty": dict(found.meta),
        "messages": messages,
    }
    with replacing(out) as temporary:
        temporary.write_text(json.dumps(about), encoding="utf-8")


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
    labels = torch.tensor(
        [kitti.CLASSES.index(name) for name in names if name is not None], dtype=torch.long
    )
    return transform_detections(replace(known, labels=labels, classes=kitti.CLASSES), TURN_BACK)


def plain(about: dict[str, Any]) -> dict[str, Any]:
    """As a file would give it back: tuples are lists, keys are text.

    >>> plain({"depth": ("a", "b")})
    {'depth': ['a', 'b']}
    """
    again: dict[str, Any] = json.loads(json.dumps(about))
    return again
