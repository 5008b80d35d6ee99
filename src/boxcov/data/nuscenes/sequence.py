"""nuScenes key frames as inputs of a detector: accumulated LiDAR sweeps, and boxes."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from warnings import warn

import numpy as np
import torch
from torch import Tensor

from boxcov.data.nuscenes.index import Index, read_index
from boxcov.data.points import check_layout, read_points
from boxcov.data.poses import Pose
from boxcov.data.sequence import FrameSequence
from boxcov.errors import BoxcovWarning, check_whole

Frame = tuple[list[Tensor], list[dict[str, Any]]]
_LONGEST_STEP = 0.1  # seconds between sweeps, which are 0.05 s apart


class NuScenes(FrameSequence):
    """Key frames of one split; made by ``frames``. Files are read when frames are indexed."""

    def __init__(self, root: Path, table_index: Index, sweeps: int) -> None:
        super().__init__(len(table_index.tokens))
        self.root, self.table_index, self.sweeps = root, table_index, sweeps

    @property
    def tokens(self) -> list[str]:
        """The sample token of each frame."""
        return [self.table_index.tokens[index] for index in self.indices]

    @property
    def names(self) -> list[str]:
        """The sample token of each frame."""
        return self.tokens

    @property
    def has_labels(self) -> bool:
        """False for a version without annotations."""
        return len(self.table_index.annotations.label) > 0

    def pose(self, item: int) -> Pose:
        """Return the pose from the LIDAR_TOP frame of a frame to the global frame."""
        return self._pose(self.table_index.key[self.indices[item]])

    def timestamp(self, item: int) -> int:
        """Return the time of a frame's LiDAR sweep in microseconds."""
        return int(self.table_index.readings.time[self.table_index.key[self.indices[item]]])

    def load(self, index: int) -> Frame:
        found = self.table_index.annotations
        rows = slice(int(found.start[index]), int(found.start[index + 1]))
        target: dict[str, Any] = {"boxes": self._boxes(index, rows).float()}
        columns = {"labels": found.label, "points": found.points, "ids": found.identity}
        target |= {name: torch.from_numpy(column[rows]) for name, column in columns.items()}
        return [self._points(index)], [{**target, "token": self.table_index.tokens[index]}]

    def _pose(self, sweep: int) -> Pose:
        readings = self.table_index.readings
        return Pose(torch.from_numpy(readings.R[sweep]), torch.from_numpy(readings.t[sweep]))

    def _points(self, number: int) -> Tensor:
        """Return (N, 5) ``x y z intensity dt`` of the key frame and the sweeps before it."""
        readings = self.table_index.readings
        key = sweep = int(self.table_index.key[number])
        to_key = self._pose(key).inverse()
        clouds: list[Tensor] = []
        while sweep >= 0 and len(clouds) < self.sweeps:
            path = self.root / readings.file[sweep].decode()
            cloud = read_points(path, columns=5)
            check_layout(cloud, "nuscenes", path)
            # the fifth column of the file is the number of the beam
            cloud[:, 4] = 1e-6 * float(readings.time[key] - readings.time[sweep])
            if sweep != key:
                # without the points on the ego car, which would leave a trail
                cloud = cloud[(cloud[:, :2].abs() >= 1).any(1)]
                cloud[:, :3] = (to_key @ self._pose(sweep))(cloud[:, :3])
            clouds.append(cloud)
            sweep = int(readings.previous[sweep])
        return torch.cat(clouds)

    def _boxes(self, number: int, rows: slice) -> Tensor:
        """Return boxes (n, 9) in the LIDAR_TOP frame."""
        found = self.table_index.annotations
        columns = (found.centre, found.size, found.heading, found.velocity)
        centre, size, heading, velocity = (torch.from_numpy(column[rows]) for column in columns)
        to_sensor = self._pose(self.table_index.key[number]).inverse()
        heading = heading @ to_sensor.R.T
        yaw = torch.atan2(heading[:, 1], heading[:, 0])
        # nuScenes and CenterPoint ignore the vertical component of the velocity
        velocity = velocity @ to_sensor.R[:2, :2].T
        return torch.cat([to_sensor(centre), size, yaw[:, None], velocity], 1)


def frames(
    root: str | Path, version: str = "v1.0-trainval", split: str = "train", sweeps: int = 10
) -> NuScenes:
    """Return the key frames of a split, from the v1.0 tables and point files below ``root``.

    Scenes that the tables do not hold are left out with a warning. A frame is ``(inputs,
    targets)``, each a list of one. The input is a point cloud (N, 5) ``x y z intensity dt`` in the
    LIDAR_TOP frame of the key frame (x right, y forward). It holds the key frame and up to ``sweeps
    - 1`` sweeps before it, of which the start of a scene has fewer (other frameworks repeat the
    oldest); dt is their age in seconds. Points of earlier sweeps on the ego car (nearer than 1 m in
    x and y) are left out. Points with NaN are left out with a warning.

    The target is a dict: ``boxes`` (n, 9) ``x y z w l h yaw vx vy`` in the same coordinates, z at
    half height, yaw from x to y, velocity NaN if unknown; ``labels`` (n,), indices into
    ``CLASSES``; ``points`` (n,), the number of LiDAR points in each box at the key frame;
    ``ids`` (n,), the identity of each object (row of instance.json); ``token``, the sample's. A
    version without annotations (v1.0-test) has no boxes.

    >>> frames("nowhere")
    Traceback (most recent call last):
    ...
    boxcov.errors.BoxcovError: nowhere: no such folder: give the one that holds samples, ...
    """
    check_whole("sweeps", sweeps)
    found = NuScenes(Path(root), read_index(Path(root), version, split), sweeps)
    _warn_if_sweeps_are_old(found.table_index, sweeps)
    return found


def _warn_if_sweeps_are_old(index: Index, sweeps: int) -> None:
    """Warn if the tables lack sweeps between key frames: others that are older take their place."""
    readings, sweep = index.readings, index.key
    ages = [0.0]  # seconds: median over the key frames, of each earlier sweep
    for _ in range(sweeps - 1):
        sweep = np.where(readings.previous[sweep] < 0, sweep, readings.previous[sweep])
        age = readings.time[index.key] - readings.time[sweep]
        ages.append(1e-6 * float(np.median(age)) if len(age) else 0.0)
    usual = [_LONGEST_STEP * number for number in range(sweeps)]
    if ages[-1] > usual[-1]:
        near = sum(age <= limit for age, limit in zip(ages, usual))
        warn(
            f"{sweeps} sweeps go back {ages[-1]:.2g} s, because the tables lack the sweeps "
            f"between the key frames: networks are trained on {0.05 * (sweeps - 1):.2g} s. Unpack "
            f"all sweeps, or give sweeps={near} (--sweeps {near})",
            BoxcovWarning,
            stacklevel=3,
        )


def sequences(
    root: str | Path, version: str = "v1.0-trainval", split: str = "train", sweeps: int = 10
) -> list[NuScenes]:
    """Return the key frames of each scene of a split, in the order of their time; see ``frames``.

    ``scene.pose(item)`` leads from the LiDAR of a frame to the global frame,
    ``scene.timestamp(item)`` is in microseconds, and a target's ``ids`` are the identities.
    """
    whole = frames(root, version, split, sweeps)
    scene = whole.table_index.scene
    starts = [i for i in range(len(scene)) if i == 0 or scene[i] != scene[i - 1]]
    return [whole[start:stop] for start, stop in zip(starts, [*starts[1:], len(scene)])]
