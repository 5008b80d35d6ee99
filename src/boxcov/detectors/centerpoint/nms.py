"""Rotated IoU and non-maximum suppression in plain torch.

Boxes are seen from above, ``x y w l yaw``: l along the yaw, w across it. A group is a set of boxes
that compete with each other, sorted by descending score.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Pairs of boxes of one group, as indices into all G K boxes, the box with the higher score first.
Pairs = tuple[Tensor, Tensor]
_DISTANCES = 1 << 22  # that are computed at once
_PAIRS = 1 << 18  # of near boxes that are compared at once


def rotated_iou(a: Tensor, b: Tensor) -> Tensor:
    """Return the IoU (n,) of each pair of boxes (n, 5) and (n, 5); 0 for boxes without area.

    >>> a = torch.tensor([[0.0, 0.0, 2.0, 4.0, 0.0]])
    >>> b = torch.tensor([[1.0, 0.0, 2.0, 4.0, 0.0]])
    >>> rotated_iou(a, b)
    tensor([0.6000])
    """
    both = intersection(a, b)
    union = a[:, 2] * a[:, 3] + b[:, 2] * b[:, 3] - both
    return torch.where(union > 0, both / union.clamp(min=torch.finfo(a.dtype).tiny), 0)


def intersection(a: Tensor, b: Tensor) -> Tensor:
    """Return the intersection area (n,) of each pair: b is clipped at the four sides of a."""
    cos, sin = a[:, 4].cos(), a[:, 4].sin()
    dx, dy = (b[:, :2] - a[:, :2]).unbind(1)
    centre = torch.stack([cos * dx + sin * dy, cos * dy - sin * dx], 1)
    polygon = box_corners(centre, b[:, 2], b[:, 3], b[:, 4] - a[:, 4])  # (n, 4, 2)
    for axis, side in ((0, a[:, 3]), (1, a[:, 2])):
        for sign in (1, -1):
            polygon = _clip(polygon, side.unsqueeze(1) / 2 - sign * polygon[:, :, axis])
    x, y = polygon.unbind(2)
    return (x * y.roll(-1, 1) - x.roll(-1, 1) * y).sum(1).div(2).clamp(min=0)


def box_corners(centre: Tensor, w: Tensor, l: Tensor, yaw: Tensor) -> Tensor:
    """Return the corners (n, 4, 2), counter-clockwise."""
    cos, sin = yaw.cos(), yaw.sin()
    along = torch.stack([cos * l, sin * l], 1) / 2
    across = torch.stack([-sin * w, cos * w], 1) / 2
    return centre.unsqueeze(1) + torch.stack(
        [along + across, across - along, -along - across, along - across], 1
    )


def _clip(polygon: Tensor, distance: Tensor) -> Tensor:
    """Clip convex polygons (n, k, 2) to the half plane ``distance`` >= 0: (n, k + 1, 2).

    distance: (n, k) of each corner to the border of the half plane.
    A polygon with fewer corners repeats its first one, which does not change its area; an empty one
    is all zeros.
    """
    n, k, _ = polygon.shape
    inside = distance >= 0
    following = distance.roll(-1, 1)
    crosses = inside != (following >= 0)
    share = torch.where(crosses, distance / torch.where(crosses, distance - following, 1), 0)
    crossing = polygon + share.unsqueeze(2) * (polygon.roll(-1, 1) - polygon)
    points = torch.stack([polygon, crossing], 2).flatten(1, 2)  # (n, 2 k, 2)
    valid = torch.stack([inside, crosses], 2).flatten(1)
    # valid points move to the front, the others to a slot that is discarded
    # a running sum over few columns is faster as a product on a GPU
    ones = polygon.new_ones(2 * k, 2 * k).triu()
    rank = (valid.to(polygon.dtype) @ ones).long()  # from 1 on, exact also in TF32
    slot = torch.where(valid, rank - 1, k + 1).clamp(max=k + 1)
    packed = polygon.new_zeros(n, k + 2, 2).scatter(1, slot.unsqueeze(2).expand_as(points), points)[
        :, : k + 1
    ]
    filled = torch.arange(k + 1, device=polygon.device) < valid.sum(1, keepdim=True)
    first = torch.where(filled[:, :1, None], packed[:, :1], 0)
    return torch.where(filled.unsqueeze(2), packed, first)


def rotated_pairs(boxes: Tensor, valid: Tensor, overlap: float, most: int | None = None) -> Pairs:
    """Return the pairs of valid boxes (G, K, 5) whose IoU is above ``overlap``, for ``greedy_nms``.

    most: as in ``suppressing_pairs``.
    """
    flat = boxes.flatten(0, 1)

    def is_over(first: Tensor, second: Tensor) -> Tensor:
        chunks = zip(first.split(_PAIRS), second.split(_PAIRS))
        return torch.cat([rotated_iou(flat[a], flat[b]) > overlap for a, b in chunks])

    return suppressing_pairs(valid, lambda rows: near_boxes(boxes, boxes[:, rows]), is_over, most)


def circle_pairs(centres: Tensor, valid: Tensor, bound: Tensor, most: int | None = None) -> Pairs:
    """Return the pairs of valid centres (G, K, 2) whose squared distance is within ``bound`` (G,).

    The original frameworks call this bound a radius. most: as in ``suppressing_pairs``.
    """
    return suppressing_pairs(
        valid, lambda rows: near_centres(centres, bound, centres[:, rows]), most=most
    )


def suppressing_pairs(
    valid: Tensor,
    near: Callable[[slice], Tensor],
    is_over: Callable[[Tensor, Tensor], Tensor] | None = None,
    most: int | None = None,
) -> Pairs:
    """Return the pairs of valid boxes (G, K) that decide greedy NMS.

    near: which boxes may suppress which, (G, R, K) for a slice of R boxes. is_over: whether they
    do, for pairs of near boxes. most: the pairs of at most so many kept boxes per group are needed.
    A usual frame takes one step. Where more than ``_PAIRS`` boxes are near each other, the boxes
    are taken a few at a time, and those already suppressed are compared with no other: memory is
    bounded, and K boxes at one place take K comparisons instead of K^2.
    """
    G, K = valid.shape
    limit = max(_DISTANCES // max(G * K, 1), 1)
    start, count, alive = 0, limit, valid
    found: list[Pairs] = []
    while start < K or not found:
        rows = slice(start, min(start + count, K))
        first, second = _pairs(near(rows), alive, start)
        if len(first) > _PAIRS and rows.stop - start > 1:
            count = (rows.stop - start) // 2
            continue
        if is_over is not None and len(first):
            over = is_over(first, second)
            first, second = first[over], second[over]
        if rows.stop - start < K:  # some boxes are not compared yet: do without the suppressed ones
            kept = greedy_nms(first, second, alive)
            decides = kept.flatten()[first]
            first, second = first[decides], second[decides]
            alive = alive.flatten().index_fill(0, second, False).view(G, K)
            if most is not None:
                alive = alive & (kept[:, : rows.stop].sum(1, keepdim=True) < most)
        found.append((first, second))
        start, count = rows.stop, min(2 * count, limit)
    firsts, seconds = zip(*found)
    return found[0] if len(found) == 1 else (torch.cat(firsts), torch.cat(seconds))


def near_boxes(boxes: Tensor, rows: Tensor | None = None) -> Tensor:
    """Return which boxes (G, K, 5) can overlap (G, K, K): their circumscribed circles meet.

    rows: (G, R, 5), a part of the boxes; the result is (G, R, K).
    """
    rows = boxes if rows is None else rows
    reach: Tensor = boxes[:, :, 2:4].norm(dim=2) / 2
    own = reach if rows is boxes else rows[:, :, 2:4].norm(dim=2) / 2
    return _squared_distances(rows, boxes) <= (own.unsqueeze(2) + reach.unsqueeze(1)).square()


def near_centres(centres: Tensor, bound: Tensor, rows: Tensor | None = None) -> Tensor:
    """Return which centres (G, K, 2) have a squared distance within ``bound`` (G,): (G, K, K).

    rows: (G, R, 2), a part of the centres; the result is (G, R, K).
    """
    return _squared_distances(centres if rows is None else rows, centres) <= bound.reshape(-1, 1, 1)


def _squared_distances(rows: Tensor, boxes: Tensor) -> Tensor:
    dx, dy = (rows[:, :, i].unsqueeze(2) - boxes[:, :, i].unsqueeze(1) for i in (0, 1))
    return dx.square() + dy.square()


def _pairs(near: Tensor, valid: Tensor, start: int) -> Pairs:
    """Return the pairs in ``near`` (G, R, K), whose first row is the box ``start``."""
    rows = valid[:, start : start + near.shape[1]]
    both = (near & rows.unsqueeze(2) & valid.unsqueeze(1)).triu(1 + start)
    group, first, second = both.nonzero(as_tuple=True)
    before = group * valid.shape[1]
    return before + start + first, before + second


def greedy_nms(first: Tensor, second: Tensor, valid: Tensor) -> Tensor:
    """Return which valid boxes (G, K) greedy NMS keeps; a kept ``first`` suppresses its ``second``.

    A box is kept if no kept box suppresses it. If the iteration starts with all boxes kept, the
    first t boxes of a group are final after t rounds. The number of rounds is the length of the
    longest chain of suppressions, in practice a handful.

    >>> valid = torch.ones(1, 3, dtype=torch.bool)
    >>> greedy_nms(torch.tensor([0, 1]), torch.tensor([1, 2]), valid)  # a removed box removes none
    tensor([[ True, False,  True]])
    """
    kept = torch.ones(valid.numel(), dtype=torch.bool, device=valid.device)
    while True:
        hits = torch.zeros(valid.numel(), dtype=torch.int32, device=valid.device)
        before, kept = kept, hits.index_add(0, second, kept[first].int()) == 0
        if torch.equal(before, kept):
            return kept.reshape(valid.shape) & valid


def removed_by(pairs: Pairs, reported: Tensor, n: int) -> Tensor:
    """Return the row in ``reported`` of the best box that suppresses each of n boxes; -1: none.

    reported: indices of the reported boxes.

    >>> removed_by((torch.tensor([0, 1]), torch.tensor([2, 2])), torch.tensor([1, 0]), 3)
    tensor([-1, -1,  1])
    """
    first, second = pairs
    row = torch.full((n + 1,), -1, device=reported.device)  # n stands for "no box"
    row[reported] = torch.arange(len(reported), device=reported.device)
    is_reported = row[first] >= 0
    # boxes of a group are sorted, so the lowest index has the highest score
    best = torch.full_like(row[:-1], n).scatter_reduce(
        0, second[is_reported], first[is_reported], "amin"
    )
    return row[best]
