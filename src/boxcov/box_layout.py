"""Names of the box fields that boxcov knows, where they are in a box, and sides that are clipped.

A detector clips sides of image boxes at the border of the image. A clipped side does not move with
the weights: its variance is 0, which says nothing about its error. The label is clipped, too, so
the error is censored: known if the object ends inside the image, else unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from boxcov.errors import BoxcovError

SPACE = ("x", "y", "z", "w", "l", "h", "yaw")  # metres and radians
PLANE = ("x", "y", "w", "l", "yaw")
IMAGE = ("x1", "y1", "x2", "y2")  # pixels
MIN_VARIANCE = 1e-30
T = TypeVar("T", Tensor, np.ndarray[Any, Any])


def columns(fields: Sequence[str], names: Sequence[str]) -> list[int]:
    """Return the columns of ``names`` in boxes with these fields."""
    return [list(fields).index(name) for name in names]


def sides(columns: Mapping[str, T]) -> dict[str, T]:
    """Return the sides of boxes by name, given the columns of their fields by name."""
    if "x1" in columns:
        width, height = columns["x2"] - columns["x1"], columns["y2"] - columns["y1"]
        return {"width": width, "height": height}
    return {name: columns[name] for name in ("w", "l", "h") if name in columns}


def has_layout(fields: Sequence[str], names: Sequence[str]) -> bool:
    """Return whether boxes with these fields have all of ``names``."""
    return set(names) <= set(fields)


def find_layout(
    fields: Sequence[str], layouts: Sequence[tuple[str, ...]], reader: str, exact: bool = False
) -> tuple[str, ...]:
    """Return the first of ``layouts`` that boxes with these fields have; raise if they have none.

    reader: what takes the boxes, for the message. exact: in this order, and no other fields.
    """
    for names in layouts:
        if tuple(fields) == names or (has_layout(fields, names) and not exact):
            return names
    known = " or ".join(" ".join(names) for names in layouts)
    raise BoxcovError(f"{reader} takes boxes of {known}; these are {' '.join(fields)}")


def clipped_sides(fields: Sequence[str], boxes: Tensor, variances: Tensor) -> Tensor:
    """Return which numbers (m, D) of boxes are sides clipped at the image border.

    These are the sides x1, y1, x2, y2 with a variance of exactly 0. A box without any variance
    counts only if it begins in the corner of the image: some methods know no spread of a box.
    """
    if not has_layout(fields, IMAGE):
        return torch.zeros_like(variances, dtype=torch.bool)
    index = columns(fields, IMAGE)
    fixed = variances[:, index] == 0  # (m, 4)
    fills_image = (boxes[:, index[:2]] == 0).all(1)
    fixed = fixed & (~fixed.all(1) | fills_image).unsqueeze(1)
    by_name = dict(zip(IMAGE, fixed.unbind(1)))
    other = torch.zeros_like(fills_image)
    return torch.stack([by_name.get(name, other) for name in fields], 1)


def log_variances(fields: Sequence[str], variances: Tensor, clipped: Tensor | None) -> Tensor:
    """Return the logs (m, D) of variances; clipped sides have the mean log of the box's other ones.

    So a clipped side does not stand out; 0 for a box whose sides are all clipped.

    >>> clipped = torch.tensor([[True, False, False, False]])
    >>> log_variances(("x1", "y1", "x2", "y2"), torch.tensor([[0.0, 1.0, 1.0, 1.0]]), clipped)
    tensor([[0., 0., 0., 0.]])
    """
    logs = variances.clamp(min=MIN_VARIANCE).log()
    if clipped is None or not has_layout(fields, IMAGE):
        return logs
    index = columns(fields, IMAGE)
    free = ~clipped[:, index]
    mean = (logs[:, index] * free).sum(1) / free.sum(1).clamp(min=1)
    return torch.where(clipped, mean.unsqueeze(1), logs)
