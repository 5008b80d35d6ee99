"""KITTI object frames as detectors take them: points and boxes in the LiDAR's frame."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from boxcov.data.kitti.camera import CameraCalibration, from_camera, read_calibration
from boxcov.data.points import points_in_boxes, read_points
from boxcov.errors import BoxcovError

CLASSES = ("Car", "Pedestrian", "Cyclist")  # those of the official evaluation
TYPES = (
    "Car",
    "Van",
    "Truck",
    "Pedestrian",
    "Person_sitting",
    "Cyclist",
    "Tram",
    "Misc",
)  # all but DontCare

Frame = tuple[list[Tensor], list[dict[str, Any]]]


class Kitti(Sequence[Frame]):
    """Frames of one split; ``frames[:50]`` is a part of them. Made by ``frames``, read when asked for, and may go to other processes."""

    def __init__(
        self, folder: Path, tokens: list[str], classes: tuple[str, ...], labelled: bool
    ) -> None:
        self.folder, self.tokens, self.classes, self.labelled = folder, tokens, classes, labelled

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, item: Any) -> Any:
        if isinstance(item, slice):
            return Kitti(self.folder, self.tokens[item], self.classes, self.labelled)
        token = self.tokens[item]
        points = read_points(self.folder / "velodyne" / f"{token}.bin", columns=4)  # (N, 4)
        boxes, labels = self._boxes(token)
        target = {
            "boxes": boxes,
            "labels": labels,
            "points": points_in_boxes(points, boxes).sum(1),
            "token": token,
        }
        points[:, 3] *= 255
        return [torch.cat([points, torch.zeros(len(points), 1)], 1)], [target]

    def calibration(self, item: int) -> CameraCalibration:
        return read_calibration(self.folder / "calib" / f"{self.tokens[item]}.txt")

    def _boxes(self, token: str) -> tuple[Tensor, Tensor]:
        """Boxes (n, 9) in the LiDAR's frame, and labels (n,)."""
        found: list[tuple[str, list[float]]] = []
        if self.labelled:
            found = [
                entry
                for entry in read_labels(self.folder / "label_2" / f"{token}.txt")
                if entry[0] in self.classes
            ]
        rows = torch.tensor([values[7:14] for _, values in found], dtype=torch.float64).reshape(
            -1, 7
        )  # h w l x y z rotation_y
        boxes, _ = from_camera(rows, read_calibration(self.folder / "calib" / f"{token}.txt").pose)
        unknown = torch.full((len(boxes), 2), torch.nan)  # vx vy
        labels = torch.tensor([self.classes.index(kind) for kind, _ in found], dtype=torch.long)
        return torch.cat([boxes.float(), unknown], 1), labels


def frames(root: str | Path, split: str = "training", classes: Sequence[str] = CLASSES) -> Kitti:
    """The frames of ``root/split`` (``velodyne``, ``label_2``, ``calib``), by number.

    A frame is ``(inputs, targets)``, each a list of one. The input: points (N, 5) as x y z intensity dt, in the LiDAR's frame (x forward,
    y left), intensity from 0 to 255 and dt 0. The target: ``boxes`` (n, 9) as x y z w l h yaw vx vy in the same frame, z at half height, yaw
    from x to y, velocities NaN; ``labels`` (n,) into ``classes``, objects of other types left out; ``points`` (n,), how many lie in each box;
    ``token``, the frame's number as the files have it. An empty label file is a frame without objects; the split ``testing`` has none.

    >>> frames("nowhere")
    Traceback (most recent call last):
    ...
    boxcov.errors.BoxcovError: nowhere/training/velodyne: no such folder: give the root that holds training and testing
    """
    folder = Path(root) / split
    if not (folder / "velodyne").is_dir():
        raise BoxcovError(
            f"{folder / 'velodyne'}: no such folder: give the root that holds training and testing"
        )
    labelled = (folder / "label_2").is_dir()
    if not labelled and split != "testing":
        raise BoxcovError(f"{folder / 'label_2'}: no such folder: unpack the label archive there")
    tokens = sorted(path.stem for path in (folder / "velodyne").glob("*.bin"))
    if not tokens:
        raise BoxcovError(f"{folder / 'velodyne'}: no .bin file: unpack the point clouds there")
    return Kitti(folder, tokens, tuple(classes), labelled)


def read_labels(path: Path) -> list[tuple[str, list[float]]]:
    """Types and numbers (14, or 15 with a score) of a label or result file, without its DontCare regions.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = (Path(folder) / "0.txt").write_text("Car 0 0 0 1 2 3 4 1.5 1.8 4.2 0 1.6 20 0.1")
    ...     [(kind, numbers[7:10]) for kind, numbers in read_labels(Path(folder) / "0.txt")]
    [('Car', [1.5, 1.8, 4.2])]
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
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
                f"{path}, line {number}: {line!r} is no label: a type, 14 numbers (sizes above 0) and perhaps a score"
            )
        found.append((kind, values))
    return found
