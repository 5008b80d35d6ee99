"""nuScenes key frames as detectors take them: points of several turns of the LiDAR, and boxes, in the sensor's frame."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from boxcov.data.nuscenes.index import Index, read_index
from boxcov.data.points import read_points
from boxcov.data.poses import Pose
from boxcov.errors import BoxcovError

Frame = tuple[list[Tensor], list[dict[str, Any]]]


class NuScenes(Sequence[Frame]):
    """Key frames of one split; ``frames[:28]`` is a part of them. Made by ``frames``, read when asked for, and may go to other processes."""

    def __init__(self, root: Path, contents: Index, sweeps: int, chosen: range) -> None:
        self.root, self.contents, self.sweeps, self.chosen = root, contents, sweeps, chosen

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, item: Any) -> Any:
        if isinstance(item, slice):
            return NuScenes(self.root, self.contents, self.sweeps, self.chosen[item])
        number = self.chosen[item]
        boxes, labels, points = self._boxes(number)
        target = {
            "boxes": boxes.float(),
            "labels": labels,
            "points": points,
            "token": self.contents.tokens[number],
        }
        return [self._points(number)], [target]

    @property
    def tokens(self) -> list[str]:
        """The sample tokens, frame by frame."""
        return [self.contents.tokens[number] for number in self.chosen]

    def pose(self, item: int) -> Pose:
        """From the LIDAR_TOP frame of a frame to the global frame."""
        return self._pose(int(self.contents.key[self.chosen[item]]))

    def timestamp(self, item: int) -> int:
        """When the LiDAR took a frame, in microseconds."""
        return int(self.contents.readings.time[self.contents.key[self.chosen[item]]])

    def _pose(self, turn: int) -> Pose:
        readings = self.contents.readings
        return Pose(torch.from_numpy(readings.R[turn]), torch.from_numpy(readings.t[turn]))

    def _points(self, number: int) -> Tensor:
        """(N, 5): x y z intensity dt of the key frame and the turns before it."""
        readings = self.contents.readings
        key = turn = int(self.contents.key[number])
        to_key = self._pose(key).inverse()
        clouds: list[Tensor] = []
        while turn >= 0 and len(clouds) < self.sweeps:
            cloud = read_points(self.root / readings.file[turn].decode(), columns=5)
            cloud[:, 4] = 1e-6 * float(
                readings.time[key] - readings.time[turn]
            )  # in the place of the beam's number
            if turn != key:
                cloud = cloud[
                    (cloud[:, :2].abs() >= 1).any(1)
                ]  # the car itself, which would leave a trail
                cloud[:, :3] = (to_key @ self._pose(turn))(cloud[:, :3])
            clouds.append(cloud)
            turn = int(readings.previous[turn])
        return torch.cat(clouds)

    def _boxes(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Boxes (n, 9) in the LIDAR_TOP frame and float64, labels (n,) and LiDAR points (n,)."""
        found = self.contents.annotations
        rows = slice(int(found.start[number]), int(found.start[number + 1]))
        centre, size, heading, velocity = (
            torch.from_numpy(a[rows])
            for a in (found.centre, found.size, found.heading, found.velocity)
        )
        to_sensor = self._pose(int(self.contents.key[number])).inverse()
        heading = heading @ to_sensor.R.T
        yaw = torch.atan2(heading[:, 1], heading[:, 0])
        velocity = (
            velocity @ to_sensor.R[:2, :2].T
        )  # of the horizontal vector: nuScenes and CenterPoint leave out its third component
        boxes = torch.cat([to_sensor(centre), size, yaw[:, None], velocity], 1)
        return boxes, torch.from_numpy(found.label[rows]), torch.from_numpy(found.points[rows])


def frames(
    root: str | Path, version: str = "v1.0-trainval", split: str = "train", sweeps: int = 10
) -> NuScenes:
    """The key frames of a split, from the v1.0 tables and point files below ``root``; scenes the tables do not hold are left out.

    A frame is ``(inputs, targets)``, each a list of one. The input: points (N, 5) as x y z intensity dt, in the key frame's LIDAR_TOP frame
    (x right, y forward), of the key frame and the ``sweeps - 1`` turns before it in the tables, or as many as there are; dt is their age in
    seconds. Points on the car itself (nearer than 1 m in x and y) are left out of the turns before, NaN points everywhere, with a warning.

    The target: ``boxes`` (n, 9) as x y z w l h yaw vx vy in the same frame, z at half height, yaw from x to y, velocity NaN where unknown;
    ``labels`` (n,) into ``CLASSES``; ``points`` (n,), the LiDAR points in each box at the key frame; ``token``, the sample's. A set without
    annotations (v1.0-test) has 0 boxes a frame.

    >>> frames("nowhere")
    Traceback (most recent call last):
    ...
    boxcov.errors.BoxcovError: nowhere: no such folder: give the one that holds samples, sweeps and v1.0-trainval
    """
    if sweeps < 1:
        raise BoxcovError(f"sweeps must be at least 1 (the key frame alone), got {sweeps}")
    index = read_index(Path(root), version, split)
    return NuScenes(Path(root), index, sweeps, range(len(index.tokens)))
