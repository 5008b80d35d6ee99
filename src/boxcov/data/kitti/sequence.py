"""KITTI object frames as inputs of a detector: points and boxes in the LiDAR's coordinates.

A drive in the same layout is a sequence with identities, times and ego poses.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import cos, isfinite, log, pi, radians, tan
from os.path import isdir  # False, not an error, for a path that is too long or has a NUL
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from boxcov._files.input_file import read_text, reading, shorten
from boxcov.data.kitti.camera import (
    CameraCalibration,
    from_camera,
    parse_numbers,
    read_calibration,
    read_imu_pose,
)
from boxcov.data.points import check_layout, check_objects, count_points, read_points
from boxcov.data.poses import Pose, rotation_matrix
from boxcov.data.sequence import FrameSequence
from boxcov.errors import BoxcovError

CLASSES = ("Car", "Pedestrian", "Cyclist")  # those of the official evaluation
# fmt: off
TYPES = ("Car", "Van", "Truck", "Pedestrian", "Person_sitting", "Cyclist", "Tram", "Misc")
# fmt: on
_EARTH = 6378137.0  # metres: radius
_OXTS = 30  # numbers in a file of the inertial system

Frame = tuple[list[Tensor], list[dict[str, Any]]]


class Kitti(FrameSequence):
    """Frames of one split; made by ``frames``. Files are read when frames are indexed."""

    def __init__(self, folder: Path, all_tokens: list[str], classes: tuple[str, ...]) -> None:
        super().__init__(len(all_tokens))
        self.folder, self.all_tokens, self.classes = folder, all_tokens, classes

    @property
    def tokens(self) -> list[str]:
        """The number of each frame as its files are named."""
        return [self.all_tokens[index] for index in self.indices]

    @property
    def names(self) -> list[str]:
        """The file of each frame's points."""
        return [str(self.folder / "velodyne" / f"{token}.bin") for token in self.tokens]

    @property
    def has_labels(self) -> bool:
        return isdir(self.folder / "label_2")

    def calibration(self, item: int) -> CameraCalibration:
        """Return the camera calibration of a frame."""
        token = self.all_tokens[self.indices[item]]
        return read_calibration(self.folder / "calib" / f"{token}.txt")

    def load(self, index: int) -> Frame:
        token = self.all_tokens[index]
        path = self.folder / "velodyne" / f"{token}.bin"
        points = read_points(path, columns=4)  # (N, 4)
        check_layout(points, "kitti", path)
        boxes, labels = self._boxes(token)
        count = count_points(points, boxes)
        target = {"boxes": boxes, "labels": labels, "points": count, "token": token}
        points[:, 3] *= 255
        return [torch.cat([points, torch.zeros(len(points), 1)], 1)], [target]

    def _boxes(self, token: str) -> tuple[Tensor, Tensor]:
        """Return boxes (n, 9) in the LiDAR's coordinates, and labels (n,)."""
        folder = self.folder / "label_2"
        entries = read_labels(folder / f"{token}.txt") if self.has_labels else []
        cases = {name.lower(): name for name in self.classes}
        for kind, _ in entries:
            if kind not in self.classes and kind.lower() in cases:
                raise BoxcovError(
                    f"{folder / token}.txt: objects of the type {kind!r}, which is not the class "
                    f"{cases[kind.lower()]!r}: give classes= as the labels spell them"
                )
        entries = [(kind, values) for kind, values in entries if kind in self.classes]
        rows = torch.tensor([values[7:14] for _, values in entries], dtype=torch.float64)
        pose = read_calibration(self.folder / "calib" / f"{token}.txt").pose
        boxes, _ = from_camera(rows.reshape(-1, 7), pose)
        velocity = torch.full((len(boxes), 2), torch.nan)
        labels = torch.tensor([self.classes.index(kind) for kind, _ in entries], dtype=torch.long)
        return torch.cat([boxes.float(), velocity], 1), labels


def frames(root: str | Path, split: str = "training", classes: Sequence[str] = CLASSES) -> Kitti:
    """Return the frames of ``root/split`` (``velodyne``, ``label_2``, ``calib``) by number.

    A frame is ``(inputs, targets)``, each a list of one. The input is a point cloud (N, 5)
    ``x y z intensity dt`` in the LiDAR's coordinates (x forward, y left), intensity from 0 to 255,
    dt 0.

    The target is a dict: ``boxes`` (n, 9) ``x y z w l h yaw vx vy`` in the same coordinates, z at
    half height, yaw from x to y, velocities NaN; ``labels`` (n,), indices into ``classes`` (objects
    of other types are left out); ``points`` (n,), the number of points in each box; ``token``, the
    frame's number as its files are named. An empty label file is a frame without objects. The
    split ``testing`` has no labels.

    >>> frames("nowhere")
    Traceback (most recent call last):
    ...
    boxcov.errors.BoxcovError: nowhere/training/velodyne: no such folder: ...
    """
    folder = Path(root) / split
    if not isdir(folder / "velodyne"):
        raise BoxcovError(
            f"{folder / 'velodyne'}: no such folder: give the root that holds training and testing"
        )
    if not isdir(folder / "label_2") and split != "testing":
        raise BoxcovError(f"{folder / 'label_2'}: no such folder: unpack the label archive there")
    names = [path.stem for path in (folder / "velodyne").glob("*.bin")]
    tokens = sorted(names, key=lambda name: (len(name), name))  # by number
    if not tokens:
        raise BoxcovError(f"{folder / 'velodyne'}: no .bin file: unpack the point clouds there")
    return Kitti(folder, tokens, (classes,) if isinstance(classes, str) else tuple(classes))


def read_labels(path: Path) -> list[tuple[str, list[float]]]:
    """Return types and numbers (14, or 15 with a score) of a label or result file.

    DontCare regions are left out.
    """
    with reading(path, "a label file", "unpack the label archive there"):
        lines = read_text(path).splitlines()
    found = []
    for number, line in enumerate(lines, 1):
        kind, *words = line.split() or ["DontCare"]
        if kind == "DontCare":
            continue
        values = parse_numbers(words)
        if len(values) not in (14, 15) or min(values[7:10]) <= 0:
            raise BoxcovError(
                f"{path}, line {number}: {shorten(line)!r} is not a label: expected a type, "
                "14 numbers (sizes above 0) and optionally a score"
            )
        found.append((kind, values))
    check_objects(len(found), path)
    return found


# drives


class KittiDrive(Kitti):
    """The frames of one drive; made by ``sequences``."""

    def __init__(self, one: Kitti, rate: float) -> None:
        super().__init__(one.folder, one.all_tokens, one.classes)
        self.rate = rate
        if odd := [token for token in self.all_tokens if not token.isdecimal()]:
            raise BoxcovError(
                f"{self.folder / 'velodyne' / odd[0]}.bin: {odd[0]!r} is no number: the times of a "
                "drive follow from the numbers of its frames"
            )

    def load(self, index: int) -> Frame:
        inputs, (target,) = super().load(index)
        keys = [key for key in self._keys(target["token"]) if key[0] in self.classes]
        target["ids"] = torch.tensor([self.identities[key] for key in keys], dtype=torch.long)
        return inputs, [target]

    def timestamp(self, item: int) -> int:
        """Return the time of a frame in microseconds, 0 at the start.

        It follows from the numbers of the frames, of which recordings lack some.
        """
        first, token = self.all_tokens[0], self.all_tokens[self.indices[item]]
        return round(1e6 * (int(token) - int(first)) / self.rate)

    def pose(self, item: int) -> Pose:
        """Return the pose from the LiDAR of a frame to the world: x east, y north, z up."""
        first, token = self.all_tokens[0], self.all_tokens[self.indices[item]]
        latitude, *_ = self._inertial(first)
        origin, here = (_mercator(self._inertial(name), latitude) for name in (first, token))
        to_lidar = read_imu_pose(self.folder / "calib" / f"{token}.txt")
        return Pose(here.R, here.t - origin.t) @ to_lidar.inverse()

    @cached_property
    def identities(self) -> dict[tuple[str, ...], int]:
        """A number for each type and size, which every object of a drive keeps."""
        known: dict[tuple[str, ...], int] = {}
        for token in self.all_tokens:
            keys = self._keys(token)
            for key in keys:
                if keys.count(key) > 1:
                    raise BoxcovError(
                        f"{self.folder / 'label_2' / token}.txt: two objects {' '.join(key)}: "
                        "type and size do not tell identities. Are these frames of one drive?"
                    )
                known.setdefault(key, len(known))
        return known

    def _keys(self, token: str) -> list[tuple[str, ...]]:
        path = self.folder / "label_2" / f"{token}.txt"
        entries = read_labels(path) if self.has_labels else []
        return [(kind, *(f"{side:.2f}" for side in values[7:10])) for kind, values in entries]

    def _inertial(self, token: str) -> list[float]:
        """Return latitude, longitude, altitude, roll, pitch and yaw."""
        path = self.folder / "oxts" / f"{token}.txt"
        if not isdir(path.parent):
            raise BoxcovError(
                f"{path.parent}: no such folder: the ego poses of a drive are computed from the "
                "files of its inertial system (oxts). Without them, track in LiDAR coordinates"
            )
        with reading(path, "a file of the inertial system", "unpack oxts again"):
            values = parse_numbers(read_text(path).split())
        if len(values) != _OXTS or abs(values[0]) > 85:
            raise BoxcovError(f"{path}: no ego pose: expected {_OXTS} numbers, latitude first")
        return values[:6]


def sequences(
    root: str | Path,
    split: str = "training",
    classes: Sequence[str] = CLASSES,
    *,
    rate: float = 10.0,
) -> list[KittiDrive]:
    """Return the frames of ``root/split``, which are those of one drive, as a sequence.

    Frames are as of ``frames``; targets also hold ``ids`` (n,): in a drive, type and size tell
    an object. ``timestamp(item)`` follows from the number of the frame, 0 for the first one, at
    ``rate`` numbers per second (KITTI records 10). ``pose(item)`` needs the files of the inertial
    system, ``root/split/oxts/NUMBER.txt``, as in the raw recordings.
    """
    if not (isfinite(rate) and rate > 0):
        raise BoxcovError(f"rate must be frames per second above 0, got {rate!r}")
    return [KittiDrive(frames(root, split, classes), rate)]


def _mercator(values: Sequence[float], latitude: float) -> Pose:
    """Return the pose of the inertial system in the Mercator projection at a latitude."""
    lat, lon, alt, *angles = values
    scale = cos(radians(latitude)) * _EARTH
    place = [scale * radians(lon), scale * log(tan(pi * (90 + lat) / 360)), alt]
    R = torch.eye(3, dtype=torch.float64)
    for axis, angle in ((3, angles[2]), (2, angles[1]), (1, angles[0])):  # about z, then y, x
        half = torch.tensor(angle / 2, dtype=torch.float64)
        quaternion = torch.zeros(4, dtype=torch.float64)
        quaternion[0], quaternion[axis] = half.cos(), half.sin()
        R = R @ rotation_matrix(quaternion)
    return Pose(R, torch.tensor(place, dtype=torch.float64))
