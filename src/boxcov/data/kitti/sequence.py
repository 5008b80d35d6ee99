"""KITTI object frames as inputs of a detector: points and boxes in the LiDAR's coordinates."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from os.path import isdir  # False, not an error, for a path that is too long or has a NUL
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from boxcov.data.kitti.camera import CameraCalibration, from_camera, read_calibration
from boxcov.data.points import check_layout, check_objects, count_points, read_points
from boxcov.data.sequence import FrameSequence
from boxcov.errors import BoxcovError
from boxcov.input_file import read_text, shorten

CLASSES = ("Car", "Pedestrian", "Cyclist")  # those of the official evaluation
# fmt: off
TYPES = ("Car", "Van", "Truck", "Pedestrian", "Person_sitting", "Cyclist", "Tram", "Misc")
# fmt: on

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
    def has_labels(self) -> bool:
        return isdir(self.folder / "label_2")

    def calibration(self, item: int) -> CameraCalibration:
        """Return the camera calibration of a frame."""
        return self._calibration(self.all_tokens[self.indices[item]])

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

    def _calibration(self, token: str) -> CameraCalibration:
        return read_calibration(self.folder / "calib" / f"{token}.txt")

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
        boxes, _ = from_camera(rows.reshape(-1, 7), self._calibration(token).pose)
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
    return Kitti(folder, tokens, tuple(classes))


def read_labels(path: Path) -> list[tuple[str, list[float]]]:
    """Return types and numbers (14, or 15 with a score) of a label or result file.

    DontCare regions are left out.
    """
    try:
        lines = read_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BoxcovError(
            f"{path}: cannot be read ({error}): unpack the label archive there"
        ) from None
    found = []
    for number, line in enumerate(lines, 1):
        kind, *words = line.split() or ["DontCare"]
        if kind == "DontCare":
            continue
        try:
            values = [float(word) for word in words]
        except ValueError:
            values = []
        if len(values) not in (14, 15) or not all(map(isfinite, values)) or min(values[7:10]) <= 0:
            raise BoxcovError(
                f"{path}, line {number}: {shorten(line)!r} is not a label: expected a type, "
                "14 numbers (sizes above 0) and optionally a score"
            )
        found.append((kind, values))
    check_objects(len(found), path)
    return found
