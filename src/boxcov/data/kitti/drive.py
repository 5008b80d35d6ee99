"""A KITTI drive in the object layout as a sequence, with identities, times and ego poses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import cos, isfinite, log, pi, radians, tan
from os.path import isdir
from pathlib import Path

import torch

from boxcov.data.kitti.camera import read_imu_pose
from boxcov.data.kitti.sequence import CLASSES, Frame, Kitti, frames, read_labels
from boxcov.data.poses import Pose, rotation_matrix
from boxcov.errors import BoxcovError
from boxcov.input_file import read_text

_EARTH = 6378137.0  # metres: radius
_OXTS = 30  # numbers in a file of the inertial system


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
        try:
            values = [float(word) for word in read_text(path).split()]
        except (OSError, ValueError) as error:
            raise BoxcovError(f"{path}: cannot be read ({error}): unpack oxts again") from None
        if len(values) != _OXTS or not all(map(isfinite, values)) or abs(values[0]) > 85:
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
