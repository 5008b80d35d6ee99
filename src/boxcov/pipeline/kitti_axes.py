"""KITTI frames for a detector of nuScenes: other axes (y ahead instead of x) and other classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import pi
from typing import Any

import torch
from torch import Tensor

from boxcov.data import kitti, simulated
from boxcov.data.poses import Pose, transform_detections, wrap_angle
from boxcov.data.sequence import FrameSequence
from boxcov.detections import Detections

NUSCENES_CLASS = {"Car": "car", "Pedestrian": "pedestrian", "Cyclist": "bicycle"}
TO_KITTI = Pose(
    torch.tensor([[0.0, 1.0, 0.0], [-1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]), torch.zeros(3)
)  # from the axes of nuScenes to those of KITTI


def has_kitti_classes(classes: Sequence[str]) -> bool:
    """Return whether a detector has the classes of KITTI, in upper or lower case."""
    return [name.lower() for name in classes] == [name.lower() for name in kitti.CLASSES]


class KittiAsNuScenes(FrameSequence):
    """KITTI frames in the axes and classes of nuScenes, converted when they are read."""

    def __init__(self, frames: kitti.Kitti) -> None:
        super().__init__(len(frames))
        self.frames = frames

    @property
    def names(self) -> list[str]:
        names = self.frames.names
        return [names[index] for index in self.indices]

    @property
    def has_labels(self) -> bool:
        return self.frames.has_labels

    def load(self, index: int) -> Any:
        return frame_to_nuscenes(self.frames[index])


def frame_to_nuscenes(frame: Any) -> Any:
    """Return a KITTI frame in the axes and classes of nuScenes."""
    clouds, targets = frame
    classes = torch.tensor(
        [simulated.CLASSES.index(NUSCENES_CLASS[name]) for name in kitti.CLASSES]
    )
    converted = []
    for target in targets:
        b = target["boxes"]
        yaw = wrap_angle(b[:, 6:7] + pi / 2)
        boxes = torch.cat([-b[:, 1:2], b[:, :1], b[:, 2:6], yaw, b[:, 7:]], 1)
        converted.append({**target, "boxes": boxes, "labels": classes[target["labels"]]})
    return [points_to_nuscenes(cloud) for cloud in clouds], converted


def points_to_nuscenes(cloud: Tensor) -> Tensor:
    """Return points (N, 3 or more) with the axes of KITTI in those of nuScenes."""
    return torch.cat([-cloud[:, 1:2], cloud[:, :1], cloud[:, 2:]], 1)


def detections_to_kitti(found: Detections) -> Detections:
    """Return the cars, pedestrians and bicycles of ``found`` in the axes and classes of KITTI."""
    numbers = {theirs: kitti.CLASSES.index(name) for name, theirs in NUSCENES_CLASS.items()}
    labels = torch.tensor([numbers.get(name, -1) for name in found.classes])[found.labels]
    known = labels >= 0
    found = replace(found[known], labels=labels[known], classes=kitti.CLASSES)
    return transform_detections(found, TO_KITTI)
