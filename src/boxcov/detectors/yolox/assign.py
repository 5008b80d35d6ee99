"""SimOTA: which cells are to find which object, by the cost that the present predictions would have."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from boxcov.detectors.yolox.decode import Grid, corners, pairwise_iou

_RADIUS = 1.5  # cells around the centre of an object that may find it
_CANDIDATES = 10  # whose overlaps add up to the number of cells that an object gets
_OVERLAP_WEIGHT = 3.0
_OUT_OF_REACH = 1e6  # the cost of an object whose centre is too far


@dataclass(frozen=True)
class Assigned:
    """What the loss of one image asks for, at p of its cells; all other cells are to find nothing."""

    cell: Tensor  # (p,)
    boxes: Tensor  # (p, 4) centre and size, in pixels
    classes: Tensor  # (p, classes) from 0 to 1


def assign(
    values: Tensor, predicted: Tensor, boxes: Tensor, labels: Tensor, grid: Grid
) -> Assigned:
    """The cells of one image that are to find its n objects: ``boxes`` (n, 4), centre and size, and ``labels`` (n,).

    ``values`` (N, 5 + classes) are the head's, ``predicted`` (N, 4) the boxes that they mean, centre and size. A cell may find an object
    if its centre lies within 1.5 cells of the object's. Of those, an object gets the cheapest k, where k is the sum of its ten largest
    overlaps, at least 1; a cell that several objects want goes to the one that it costs least. The class of an object counts as much
    as its box is already overlapped.

    >>> from boxcov.detectors.yolox.decode import centred_boxes, grid_of
    >>> grid, values = grid_of([torch.zeros(1, 1, 4, 4)]), torch.zeros(16, 7)
    >>> found = assign(values, centred_boxes(values, grid), torch.tensor([[16.0, 16.0, 8.0, 8.0]]), torch.tensor([1]), grid)
    >>> found.cell, found.classes
    (tensor([10]), tensor([[0., 1.]]))
    """
    reach = _within_reach(boxes, grid)  # (n, N)
    cells = reach.any(0).nonzero()[:, 0]
    classes = values.shape[1] - 5
    if not len(cells):
        return Assigned(cells, boxes.new_zeros(0, 4), boxes.new_zeros(0, classes))
    iou = pairwise_iou(corners(boxes), corners(predicted[cells]))  # (n, A)
    cost = (
        _class_cost(values[cells], labels)
        - _OVERLAP_WEIGHT * (iou + 1e-8).log()
        + _OUT_OF_REACH * ~reach[:, cells]
    )
    taken = _cheapest(cost, iou)
    mine = taken.any(0).nonzero()[:, 0]
    whose = torch.where(
        taken[:, mine].sum(0) > 1, cost[:, mine].argmin(0), taken[:, mine].int().argmax(0)
    )
    soft = F.one_hot(labels[whose], classes) * iou[whose, mine].unsqueeze(1)
    return Assigned(cells[mine], boxes[whose], soft)


def _within_reach(boxes: Tensor, grid: Grid) -> Tensor:
    """Which objects (n, N) have their centre within reach of which cells."""
    stride = grid.stride.unsqueeze(1)
    away = (boxes[:, None, :2] - (grid.corner + stride / 2)).abs()  # (n, N, 2)
    return (away < _RADIUS * stride).all(2)


def _class_cost(values: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy (n, A) between the classes that A cells predict and those of n objects, summed over all classes."""
    p = (values[:, 5:].sigmoid() * values[:, 4:5].sigmoid()).sqrt()
    yes, no = (-x.log().clamp(min=-100) for x in (p, 1 - p))
    return no.sum(1) + (yes - no)[:, labels].T


def _cheapest(cost: Tensor, iou: Tensor) -> Tensor:
    """Which cells (n, A) each object takes."""
    k = iou.topk(min(_CANDIDATES, iou.shape[1]), 1).values.sum(1).int().clamp(min=1)  # (n,)
    rank = cost.argsort(dim=1, stable=True).argsort(dim=1)
    return rank.lt(k.unsqueeze(1))
