"""Point files of float32 numbers, and which points lie in which boxes."""

from __future__ import annotations

from pathlib import Path
from warnings import warn

import numpy as np
import torch
from torch import Tensor

from boxcov._files.input_file import read_bytes, reading
from boxcov.data.poses import into_axes
from boxcov.errors import BoxcovError, BoxcovWarning

MAX_BYTES = 1 << 28  # of a point file
MAX_OBJECTS = 10_000  # in one frame
LAYOUTS = "give the layout of a point: --points nuscenes, kitti or plain"
_PAIRS = 1 << 18  # of points and boxes that are compared at once


def read_points(path: Path, columns: int, advice: str = "unpack it again") -> Tensor:
    """Return the points (N, columns) of a file; ``advice`` says what to do about another format.

    Points with a NaN or infinity in their first four columns are dropped with a warning.
    """
    with reading(path, "a point file", "is this part of the data set unpacked?"):
        data = read_bytes(path, MAX_BYTES)
    if not data:
        raise BoxcovError(f"{path}: an empty point file: unpack it again")
    if len(data) % (4 * columns):
        raise BoxcovError(
            f"{path}: {len(data)} bytes are not a whole number of points of {4 * columns} bytes "
            f"({columns} float32 numbers): the file is truncated or of another format; {advice}"
        )
    points = torch.from_numpy(np.frombuffer(data, dtype="<f4").reshape(-1, columns).copy())
    usable = points[:, :4].isfinite().all(1)
    if bool(usable.all()):
        return points
    said = f"{int((~usable).sum())} of {len(points)} points are NaN or infinite and were dropped"
    warn(f"{path}: {said}", BoxcovWarning, stacklevel=2)
    return points[usable]


def check_layout(points: Tensor, layout: str, path: Path) -> None:
    """Raise if points read by one layout look like those of another: four numbers, or five.

    layout: "nuscenes", whose fifth number is a ring; "kitti", with an intensity up to 1; "plain",
    whose fifth number is an age in seconds.
    """
    if not len(points):
        return
    last = points[:, -1]
    is_whole = bool((last == last.round()).all())
    low, high = float(last.min()), float(last.max())
    ages = "x y z intensity age: the ages are whole numbers, like rings"
    wrong = {
        "nuscenes": ("nuScenes: the ring is not a whole number", not is_whole),
        "kitti": ("KITTI: the intensity is not between 0 and 1", not 0 <= low <= high <= 1),
        "plain": (ages, is_whole and high > 1),
    }
    what, is_wrong = wrong[layout]
    if is_wrong:
        raise BoxcovError(f"{path}: not points of {what} everywhere. For other files, {LAYOUTS}")


def points_in_boxes(points: Tensor, boxes: Tensor) -> Tensor:
    """Return a mask (n, N): which points lie in or on which upright boxes.

    Points are (N, 3 or more), boxes (n, 7 or more) ``x y z w l h yaw``.
    """
    offset = points[None, :, :3].to(boxes.dtype) - boxes[:, None, :3]  # (n, N, 3)
    along, across = into_axes(offset[..., 0], offset[..., 1], boxes[:, 6:7])
    w, l, h = boxes[:, 3:6].T[..., None] / 2
    return (along.abs() <= l) & (across.abs() <= w) & (offset[..., 2].abs() <= h)


def count_points(points: Tensor, boxes: Tensor) -> Tensor:
    """Return how many points lie in each box (n,), as ``points_in_boxes``, in bounded memory."""
    at_once = max(_PAIRS // max(len(points), 1), 1)
    counts = torch.zeros(len(boxes), dtype=torch.long, device=boxes.device)
    for start in range(0, len(boxes), at_once):  # small results between large ones hold memory
        rows = slice(start, start + at_once)
        counts[rows] = points_in_boxes(points, boxes[rows]).sum(1)
    return counts


def check_objects(count: int, where: str | Path) -> None:
    """Raise if a frame has more objects than boxcov reads."""
    if count > MAX_OBJECTS:
        raise BoxcovError(f"{where}: {count} objects in one frame, at most {MAX_OBJECTS} are read")
