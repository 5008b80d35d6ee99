"""The training loss of each image, as in the last epochs of training, and SimOTA.

It is the sum of IoU, objectness, class and L1 losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from boxcov.box_layout import IMAGE
from boxcov.detectors.boxes import centres, corners, iou
from boxcov.detectors.objects import objects_of
from boxcov.detectors.yolox.selection import Grid, centred_boxes

_BOX_WEIGHT = 5.0
# SimOTA
_RADIUS = 1.5  # in cells: candidates are closer than this to an object's centre
_CANDIDATES = 10  # the sum of their IoUs is the number of cells that an object gets
_OVERLAP_WEIGHT = 3.0
_FAR_COST = 1e6  # added if the object's centre is too far away


@dataclass(frozen=True)
class CellTargets:
    """The targets of one image at p positive cells; all other cells are background."""

    cell: Tensor  # (p,)
    boxes: Tensor  # (p, 4) centre and size, in pixels
    classes: Tensor  # (p, classes) between 0 and 1


def frame_losses(values: Tensor, targets: Sequence[CellTargets], grid: Grid) -> Tensor:
    """Return the loss (B,) of each image, divided by its number of positive cells."""
    return torch.stack([_loss(image, target, grid) for image, target in zip(values, targets)])


def _loss(values: Tensor, target: CellTargets, grid: Grid) -> Tensor:
    positive = torch.zeros_like(values[:, 4]).index_fill(0, target.cell, 1)
    objectness = F.binary_cross_entropy_with_logits(values[:, 4], positive, reduction="sum")
    at, cells = values[target.cell], grid[target.cell]
    named = F.binary_cross_entropy_with_logits(at[:, 5:], target.classes, reduction="sum")
    found = iou(corners(centred_boxes(at, cells)), corners(target.boxes))
    overlap = (1 - found.square()).sum()
    stride = cells.stride.unsqueeze(1)
    offset, size = (target.boxes[:, :2] - cells.corner) / stride, target.boxes[:, 2:] / stride
    l1 = (at[:, :4] - torch.cat([offset, (size + 1e-8).log()], 1)).abs().sum()
    return (_BOX_WEIGHT * overlap + objectness + named + l1) / max(len(target.cell), 1)


# from boxes to targets


def encode(targets: Sequence[dict[str, Tensor]], values: Tensor, grid: Grid) -> list[CellTargets]:
    """Assign the objects of each image to cells, given the head's values (B, N, 5 + classes)."""
    objects = objects_of(targets, IMAGE, values.shape[2] - 5, values)
    with torch.no_grad():
        predicted = centred_boxes(values, grid)
        return [
            assign(values[b], predicted[b], centres(boxes), labels, grid)
            for b, (boxes, labels) in enumerate(objects)
        ]


def assign(
    values: Tensor, predicted: Tensor, boxes: Tensor, labels: Tensor, grid: Grid
) -> CellTargets:
    """Assign the n objects of one image to cells by SimOTA.

    values: (N, 5 + classes) of the head. predicted: (N, 4) their boxes, centre and size.
    boxes: (n, 4) of the objects, centre and size. labels: (n,).
    A cell is a candidate if the centres are less than 1.5 cells apart in x and y. An object
    gets the k cheapest candidates, where k is the sum of its ten largest IoUs, at least 1. A cell
    that several objects get goes to the one with the lowest cost. The class target is the IoU of
    the predicted box.
    """
    stride = grid.stride.unsqueeze(1)
    away = (boxes[:, None, :2] - (grid.corner + stride / 2)).abs()  # (n, N, 2)
    near = (away < _RADIUS * stride).all(2)
    cells = near.any(0).nonzero()[:, 0]
    classes = values.shape[1] - 5
    if not len(cells):
        return CellTargets(cells, boxes.new_zeros(0, 4), boxes.new_zeros(0, classes))
    overlap = iou(corners(boxes)[:, None], corners(predicted[cells]))  # (n, A)
    cost = _class_cost(values[cells], labels) - _OVERLAP_WEIGHT * (overlap + 1e-8).log()
    cost = cost + _FAR_COST * ~near[:, cells]
    k = overlap.topk(min(_CANDIDATES, len(cells)), 1).values.sum(1).int().clamp(min=1)  # (n,)
    rank = cost.argsort(dim=1, stable=True).argsort(dim=1)
    assigned = rank < k.unsqueeze(1)  # (n, A)
    positive = assigned.any(0).nonzero()[:, 0]
    owners, costs = assigned[:, positive], cost[:, positive]
    owner = torch.where(owners.sum(0) > 1, costs.argmin(0), owners.int().argmax(0))
    soft = F.one_hot(labels[owner], classes) * overlap[owner, positive].unsqueeze(1)
    return CellTargets(cells[positive], boxes[owner], soft)


def _class_cost(values: Tensor, labels: Tensor) -> Tensor:
    """Return the cross entropy (n, A), summed over classes, of n objects and A cells."""
    p = (values[:, 5:].sigmoid() * values[:, 4:5].sigmoid()).sqrt()
    yes, no = (-x.log().clamp(min=-100) for x in (p, 1 - p))
    return no.sum(1) + (yes - no)[:, labels].T
