"""Axis-aligned boxes: centre and size, corners x1 y1 x2 y2, and their overlap."""

from __future__ import annotations

import torch
from torch import Tensor


def corners(boxes: Tensor) -> Tensor:
    """Convert centre and size (..., 4) to x1 y1 x2 y2."""
    centre, half = boxes[..., :2], boxes[..., 2:] / 2
    return torch.cat([centre - half, centre + half], -1)


def centres(boxes: Tensor) -> Tensor:
    """Convert x1 y1 x2 y2 (..., 4) to centre and size."""
    low, high = boxes[..., :2], boxes[..., 2:]
    return torch.cat([(low + high) / 2, high - low], -1)


def iou(a: Tensor, b: Tensor) -> Tensor:
    """Return the IoU (...) of boxes x1 y1 x2 y2 (..., 4) and (..., 4); 0 without area.

    >>> boxes = torch.tensor([[0.0, 0.0, 2.0, 1.0], [1.0, 0.0, 2.0, 1.0]])
    >>> iou(boxes[:, None], boxes)
    tensor([[1.0000, 0.5000],
            [0.5000, 1.0000]])
    """
    low, high = torch.maximum(a[..., :2], b[..., :2]), torch.minimum(a[..., 2:], b[..., 2:])
    both = (high - low).clamp(min=0).prod(-1)
    of_a, of_b = ((x[..., 2:] - x[..., :2]).clamp(min=0).prod(-1) for x in (a, b))
    union = of_a + of_b - both
    return torch.where(union > 0, both / union.clamp(min=torch.finfo(a.dtype).tiny), 0)
