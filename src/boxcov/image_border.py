"""Sides of image boxes that a detector has clipped at the border of the image.

A clipped side does not move with the weights: its variance is 0, which says nothing about its
error. The label is clipped, too, so the error is censored: known if the object ends inside the
image, else unknown.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LOW_SIDES, HIGH_SIDES = ("x1", "y1"), ("x2", "y2")  # at the border of 0, and of width and height
SIDES = LOW_SIDES + HIGH_SIDES
MIN_VARIANCE = 1e-30


def clipped_sides(fields: Sequence[str], boxes: Tensor, variances: Tensor) -> Tensor:
    """Return which numbers (m, D) of boxes are sides clipped at the image border.

    These are the sides x1, y1, x2, y2 with a variance of exactly 0. A box without any variance
    counts only if it begins in the corner of the image: some methods know no spread of a box.

    >>> boxes = torch.tensor([[0.0, 5.0, 9.0, 8.0], [2.0, 5.0, 9.0, 8.0]])
    >>> variances = torch.tensor([[0.0, 1.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    >>> clipped_sides(("x1", "y1", "x2", "y2"), boxes, variances).nonzero().tolist()
    [[0, 0]]
    """
    if not set(SIDES) <= set(fields):
        return torch.zeros_like(variances, dtype=torch.bool)
    index = [fields.index(name) for name in SIDES]
    fixed = variances[:, index] == 0  # (m, 4)
    fills_image = (boxes[:, index[:2]] == 0).all(1)
    fixed = fixed & (~fixed.all(1) | fills_image).unsqueeze(1)
    columns = dict(zip(SIDES, fixed.unbind(1)))
    other = torch.zeros_like(fills_image)
    return torch.stack([columns.get(name, other) for name in fields], 1)


def log_variances(fields: Sequence[str], variances: Tensor, clipped: Tensor) -> Tensor:
    """Return the logs (m, D) of variances; clipped sides have the mean log of the box's other ones.

    So a clipped side does not stand out; 0 for a box whose sides are all clipped.

    >>> clipped = torch.tensor([[True, False, False, False]])
    >>> log_variances(("x1", "y1", "x2", "y2"), torch.tensor([[0.0, 1.0, 1.0, 1.0]]), clipped)
    tensor([[0., 0., 0., 0.]])
    """
    logs = variances.clamp(min=MIN_VARIANCE).log()
    if not set(SIDES) <= set(fields):
        return logs
    index = [fields.index(name) for name in SIDES]
    free = ~clipped[:, index]
    mean = (logs[:, index] * free).sum(1) / free.sum(1).clamp(min=1)
    return torch.where(clipped, mean.unsqueeze(1), logs)
