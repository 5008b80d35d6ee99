"""Non-maximum suppression in plain torch.

Boxes are seen from above, ``x y w l yaw``. A group is a set of boxes that compete with each other,
sorted by descending score.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from boxcov.detectors.boxes import rotated_iou

# Pairs of boxes of one group, as indices into all G K boxes, the box with the higher score first.
Pairs = tuple[Tensor, Tensor]
_DISTANCES = 1 << 22  # that are computed at once
_PAIRS = 1 << 18  # of near boxes that are compared at once


def rotated_pairs(boxes: Tensor, valid: Tensor, overlap: float, most: int | None = None) -> Pairs:
    """Return the pairs of valid boxes (G, K, 5) whose IoU is above ``overlap``, for ``greedy_nms``.

    most: as in ``suppressing_pairs``.
    """
    flat = boxes.flatten(0, 1)

    def is_over(first: Tensor, second: Tensor) -> Tensor:
        chunks = zip(first.split(_PAIRS), second.split(_PAIRS))
        return torch.cat([rotated_iou(flat[a], flat[b]) > overlap for a, b in chunks])

    return suppressing_pairs(valid, lambda rows: near_boxes(boxes[:, rows], boxes), is_over, most)


def circle_pairs(centres: Tensor, valid: Tensor, bound: Tensor, most: int | None = None) -> Pairs:
    """Return the pairs of valid centres (G, K, 2) whose squared distance is within ``bound`` (G,).

    The original frameworks call this bound a radius. most: as in ``suppressing_pairs``.
    """
    return suppressing_pairs(
        valid, lambda rows: near_centres(centres[:, rows], centres, bound), most=most
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


def near_boxes(rows: Tensor, boxes: Tensor) -> Tensor:
    """Return which boxes (G, R, 5) and (G, K, 5) can overlap: their circumscribed circles meet."""
    own, reach = (each[:, :, 2:4].norm(dim=2) / 2 for each in (rows, boxes))
    return _squared_distances(rows, boxes) <= (own.unsqueeze(2) + reach.unsqueeze(1)).square()


def near_centres(rows: Tensor, centres: Tensor, bound: Tensor) -> Tensor:
    """Return which centres (G, R, 2) and (G, K, 2) are near: squared distance <= bound (G,)."""
    return _squared_distances(rows, centres) <= bound.reshape(-1, 1, 1)


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
    first, second = first[is_reported], second[is_reported]
    return row[torch.full_like(row[:-1], n).scatter_reduce(0, second, first, "amin")]
