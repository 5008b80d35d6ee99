"""The training loss of each image: overlap, objectness and class, and the L1 loss that the last epochs of a training add."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from boxcov.detectors.objects import check_one_a_frame, objects_of
from boxcov.detectors.yolox.assign import Assigned, assign
from boxcov.detectors.yolox.decode import Grid, centred_boxes

_BOX_WEIGHT = 5.0


def encode(targets: Sequence[dict[str, Tensor]], values: Tensor, grid: Grid) -> list[Assigned]:
    """What the loss of each image asks for, given the head's values (B, N, 5 + classes).

    >>> from boxcov.detectors.yolox.decode import grid_of
    >>> target = {"boxes": torch.tensor([[12.0, 12, 20, 20]]), "labels": torch.tensor([1])}
    >>> encode([target], torch.zeros(1, 16, 7), grid_of([torch.zeros(1, 1, 4, 4)]))[0].boxes
    tensor([[16., 16.,  8.,  8.]])
    """
    check_one_a_frame(targets, len(values))
    with torch.no_grad():
        predicted = centred_boxes(values, grid)
        objects = [
            objects_of(target, b, values.shape[2] - 5, values) for b, target in enumerate(targets)
        ]
        return [
            assign(values[b], predicted[b], _centred(boxes), labels, grid)
            for b, (boxes, labels) in enumerate(objects)
        ]


def _centred(boxes: Tensor) -> Tensor:
    """Corners (n, 4) as centre and size."""
    size = boxes[:, 2:] - boxes[:, :2]
    return torch.cat([boxes[:, :2] + size / 2, size], 1)


def frame_losses(values: Tensor, targets: Sequence[Assigned], grid: Grid) -> Tensor:
    """The loss (B,) of each image, by the number of its cells that are to find something.

    >>> from boxcov.detectors.yolox.decode import grid_of
    >>> nothing = Assigned(torch.zeros(0, dtype=torch.long), torch.zeros(0, 4), torch.zeros(0, 2))
    >>> frame_losses(torch.zeros(1, 16, 7), [nothing], grid_of([torch.zeros(1, 1, 4, 4)])) / 16  # log 2
    tensor([0.6931])
    """
    return torch.stack([_loss(image, target, grid) for image, target in zip(values, targets)])


def _loss(values: Tensor, target: Assigned, grid: Grid) -> Tensor:
    found = torch.zeros_like(values[:, 4]).index_fill(0, target.cell, 1)
    objectness = F.binary_cross_entropy_with_logits(values[:, 4], found, reduction="sum")
    at, cells = values[target.cell], grid[target.cell]
    named = F.binary_cross_entropy_with_logits(at[:, 5:], target.classes, reduction="sum")
    overlap = (1 - _iou(centred_boxes(at, cells), target.boxes).square()).sum()
    l1 = (at[:, :4] - _encoded(target.boxes, cells)).abs().sum()
    return (_BOX_WEIGHT * overlap + objectness + named + l1) / max(len(target.cell), 1)


def _iou(a: Tensor, b: Tensor) -> Tensor:
    """IoU (p,) of boxes (p, 4) with boxes (p, 4), centre and size, pair by pair."""
    low = torch.maximum(a[:, :2] - a[:, 2:] / 2, b[:, :2] - b[:, 2:] / 2)
    high = torch.minimum(a[:, :2] + a[:, 2:] / 2, b[:, :2] + b[:, 2:] / 2)
    both = (high - low).clamp(min=0).prod(1)
    return both / (a[:, 2:].prod(1) + b[:, 2:].prod(1) - both + 1e-16)


def _encoded(boxes: Tensor, grid: Grid) -> Tensor:
    """The values (p, 4) that mean these boxes (p, 4) at these cells."""
    stride = grid.stride.unsqueeze(1)
    return torch.cat(
        [(boxes[:, :2] - grid.corner) / stride, (boxes[:, 2:] / stride + 1e-8).log()], 1
    )
