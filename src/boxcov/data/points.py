"""Point files as the data sets have them: float32 numbers, a fixed count a point, nothing else."""

from __future__ import annotations

from pathlib import Path
from warnings import warn

import numpy as np
import torch
from torch import Tensor

from boxcov.errors import BoxcovError, BoxcovWarning


def read_points(path: Path, columns: int) -> Tensor:
    """The points (N, columns) of one file; points with a NaN or infinite number among their first four are dropped, with a warning.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.arange(8, dtype=np.float32).tofile(f"{folder}/x.bin")
    ...     read_points(Path(folder) / "x.bin", 4)
    tensor([[0., 1., 2., 3.],
            [4., 5., 6., 7.]])
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BoxcovError(
            f"{path}: cannot be read ({error.strerror}): is this part of the data set unpacked?"
        ) from None
    if not data:
        raise BoxcovError(f"{path}: an empty point file: unpack it again")
    if len(data) % (4 * columns):
        raise BoxcovError(
            f"{path}: {len(data)} bytes are no whole number of points of {4 * columns} bytes ({columns} float32 numbers): "
            "the file is cut off or of another format; unpack it again"
        )
    points = torch.from_numpy(np.frombuffer(data, dtype="<f4").reshape(-1, columns).copy())
    usable = points[:, :4].isfinite().all(1)
    if not bool(usable.all()):
        warn(
            f"{path}: {int((~usable).sum())} of {len(points)} points are NaN or infinite and were dropped",
            BoxcovWarning,
            stacklevel=2,
        )
        points = points[usable]
    return points


def points_in_boxes(points: Tensor, boxes: Tensor) -> Tensor:
    """Which points (N, 3 or more) lie in which upright boxes (n, 7 or more) ``x y z w l h yaw``: a mask (n, N), surfaces included.

    >>> points_in_boxes(torch.tensor([[0.0, 1.9, 0.0], [1.9, 0.0, 0.0]]), torch.tensor([[0.0, 0.0, 0.0, 2.0, 4.0, 2.0, torch.pi / 2]]))
    tensor([[ True, False]])
    """
    offset = points[None, :, :3].to(boxes.dtype) - boxes[:, None, :3]  # (n, N, 3)
    cos, sin = boxes[:, 6:7].cos(), boxes[:, 6:7].sin()
    along = offset[..., 0] * cos + offset[..., 1] * sin
    across = offset[..., 1] * cos - offset[..., 0] * sin
    w, l, h = boxes[:, 3:6].T[..., None] / 2
    within: Tensor = (along.abs() <= l) & (across.abs() <= w) & (offset[..., 2].abs() <= h)
    return within
