"""Boxes and their overlap: axis-aligned as x1 y1 x2 y2, rotated as ``x y w l yaw``.

Rotated boxes are seen from above: l along the yaw, w across it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from boxcov.data.poses import into_axes


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
    return _over_union(both, of_a + of_b)


def _over_union(both: Tensor, areas: Tensor) -> Tensor:
    """Return an intersection over the union, given the sum of both areas; 0 without area."""
    union = areas - both
    return torch.where(union > 0, both / union.clamp(min=torch.finfo(both.dtype).tiny), 0)


# rotated boxes


def rotated_iou(a: Tensor, b: Tensor) -> Tensor:
    """Return the IoU (n,) of each pair of boxes (n, 5) and (n, 5); 0 for boxes without area."""
    return _over_union(rotated_intersection(a, b), a[:, 2] * a[:, 3] + b[:, 2] * b[:, 3])


def rotated_intersection(a: Tensor, b: Tensor) -> Tensor:
    """Return the intersection area (n,) of each pair of boxes (n, 5).

    In the axes of a, a is the window [-l/2, l/2] x [-w/2, w/2]. The area of b inside it is the
    integral of y dx around b, with x and y clipped to the window. No corner is compared with an
    edge, so touching and coinciding edges are not special cases. Centres are subtracted first, so
    that large coordinates lose no precision.
    """
    dx, dy = (b[:, :2] - a[:, :2]).unbind(1)
    centre = torch.stack(into_axes(dx, dy, a[:, 4]), 1)
    # x and y side by side (2, n, 4): tensors are small, so their number decides the time
    start = box_corners(centre, b[:, 2], b[:, 3], b[:, 4] - a[:, 4]).movedim(2, 0).contiguous()
    step = start.roll(-1, 2) - start
    half = a[:, 2:4].clamp(min=0).flip(1).T.unsqueeze(2) / 2  # (2, n, 1)
    enter, leave = _crossing(start, step, torch.stack([-half, half]))
    (first, low), (last, high) = torch.minimum(enter, leave), torch.maximum(enter, leave)
    # (4, n, 4): between these times the clipped y is linear or constant
    times = torch.stack([first, *_between(torch.stack([low, high]), first, last), last])
    x, y = _between(start.unsqueeze(1) + times * step.unsqueeze(1), -half[:, None], half[:, None])
    area = ((y[1:] + y[:-1]) * (x[:-1] - x[1:])).sum((0, 2)) / 2
    return area.clamp(min=0)


def box_corners(centre: Tensor, w: Tensor, l: Tensor, yaw: Tensor) -> Tensor:
    """Return the corners (n, 4, 2), counter-clockwise."""
    cos, sin = yaw.cos(), yaw.sin()
    along = torch.stack([cos * l, sin * l], 1) / 2
    across = torch.stack([-sin * w, cos * w], 1) / 2
    offsets = [along + across, across - along, -along - across, along - across]
    return centre.unsqueeze(1) + torch.stack(offsets, 1)


def _crossing(start: Tensor, step: Tensor, bound: Tensor) -> Tensor:
    """Return the time in [0, 1] at which ``start + time * step`` is nearest to ``bound``."""
    moves = step != 0
    time = (bound - start) / torch.where(moves, step, 1)
    return torch.where(moves, time.clamp(0, 1), 0)


def _between(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return torch.minimum(torch.maximum(x, low), high)
