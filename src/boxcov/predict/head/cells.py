"""Cells of the feature map: which of them each stage of a head reads for the boxes of a frame.

A stage is evaluated at L cells of the feature map, its rows 0 to L - 1. Row L is zero and stands
for the zero padding outside the map. On a CPU boxes share cells: a cell in several windows is
listed once. On a GPU every box has its own cells, so that all sizes depend on the number of boxes
only; the cells outside the map are then rows like any other, and are set to zero.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from boxcov.head_stages import HeadStages
from boxcov.posterior.kronecker_block import MEMORY
from boxcov.predict.head.weights import HeadWeights, StageWeights

_CACHE_SIZE = 2**20  # bytes of intermediates on a CPU: they should fit its second-level cache


@dataclass(frozen=True)
class Cells:
    """The cells at which one stage is evaluated."""

    input_rows: Tensor  # (L + 1, k k) rows of the stage's input that each cell reads
    box_rows: Tensor  # (m, T) rows that each box depends on; L is outside the map
    rows_per_box: int = 0  # of a box's own cells: T and padding; 0 where boxes share cells
    inside: Tensor | None = None  # (L + 1, 1) of own cells: 1 inside the map, 0 outside

    def gather(self, rows: Tensor, has_bias: bool, n_extra: int) -> Tensor:
        """Inputs A (L + 1, n_in) of the stage, from the rows (L' + 1, C) of the previous one.

        n_extra: columns behind the gathered ones, the 1 of a bias and then zeros. The last row of A
        is zero, as that of ``rows`` is.
        """
        A = rows.index_select(0, self.input_rows.flatten()).view(len(self.input_rows), -1)
        if n_extra:
            A = pad(A, (0, n_extra))
        if has_bias:
            A[:-1, -n_extra] = 1
        return A

    def rows_of(self, boxes: Tensor) -> Tensor:
        """``box_rows`` of some boxes (..., T); box m is padding, all of it outside the map."""
        return pad(self.box_rows, (0, 0, 0, 1), value=len(self.input_rows) - 1)[boxes]

    def per_box(self, rows: Tensor) -> Tensor:
        """Values (..., m, T, C) at the cells of each box, of rows (..., L + 1, C)."""
        if not self.rows_per_box:
            return rows[..., self.box_rows, :]
        own: Tensor = rows[..., :-1, :].unflatten(-2, (-1, self.rows_per_box))  # a view
        return own[..., : self.box_rows.shape[1], :]


@dataclass(frozen=True)
class Group:
    """Boxes that pass through the branches together: G rows of n boxes, each row of one kind."""

    stages: tuple[StageWeights, ...]  # of the branches, of the kinds of the G rows
    members: Tensor  # (G, n) boxes; m is padding
    slot: Tensor | None = None  # (g,) positions of the boxes among the members; None: no padding


@dataclass(frozen=True)
class Plan:
    """How the boxes of a frame pass through the head."""

    stages: tuple[Cells, ...]  # of the stem, and of the first stage of the branches
    centres: Tensor | None  # (u,) one box per different centre cell; None: every box counts
    centre_of: Tensor  # (m,) which of the u centres a box has
    groups: tuple[Group, ...]
    map_cells: Tensor  # (P,) cells of the map, over all frames, whose features the stem reads
    max_bytes: int  # of intermediates at a time
    inside: Tensor | None = None  # (P + 1, 1) of own cells: whether a cell is inside the map

    def chunks(self, count: int, size: int, like: Tensor) -> range:
        """Starts of chunks of ``count`` items with ``size`` numbers each, within ``max_bytes``."""
        step = int(self.max_bytes // (size * like.element_size()))
        return range(0, count, max(1, min(count, step)))


def plan_shared_cells(staged: HeadStages, head: HeadWeights) -> tuple[Tensor, Plan]:
    """Features (P + 1, C) of the cells that boxes depend on, each once, and the plan for a CPU.

    The last row of the features is zero. The boxes must be sorted by kind.
    """
    batch, _, height, width = staged.features.shape
    size, radius = height * width, head.radius
    cell, inside = _window_cells(staged, radius)
    map_cells, index = unique_below(torch.where(inside, cell, batch * size), batch * size)
    rows = staged.features.flatten(2)[map_cells // size, :, map_cells % size]
    n_rows, side = len(map_cells), 2 * radius + 1
    unique_centres, centre_of = unique_below(index[:, radius, radius], n_rows)
    boxes = torch.arange(len(centre_of), device=centre_of.device)
    centres = torch.zeros_like(unique_centres).scatter(0, centre_of, boxes)
    stages = []
    for stage in (*head.stem, head.branches[0]):
        reach, k = stage.reach, 2 * stage.reach + 1
        around = index.unfold(1, k, 1).unfold(2, k, 1).flatten(3)  # (m, s, s, k k)
        index = index[:, reach : side - reach, reach : side - reach]
        cells, box_rows = unique_below(index, n_rows)
        table = torch.zeros(n_rows + 1, k * k, dtype=index.dtype, device=index.device)
        table[index.flatten()] = around.flatten(0, 2)  # boxes that share a cell write the same
        table[n_rows] = n_rows
        read = table[pad(cells, (0, 1), value=n_rows)]
        stages.append(Cells(read, box_rows.flatten(1)))
        index, n_rows, side = box_rows, len(cells), side - 2 * reach
    # one group per kind, without padding: the intermediates stay in a CPU's cache
    kinds, counts = staged.kind.unique_consecutive(return_counts=True)
    groups = tuple(
        Group(head.branches_of(slice(kind, kind + 1)), own.unsqueeze(0))
        for kind, own in zip(kinds.tolist(), boxes.split(counts.tolist()))
    )
    plan = Plan(tuple(stages), centres, centre_of, groups, map_cells, _CACHE_SIZE)
    return pad(rows, (0, 0, 0, 1)), plan


def window_tables(m: int, head: HeadWeights, fill: int = 1) -> tuple[Cells, ...]:
    """The cells of m boxes that have their own, without ``inside``: they depend on m only.

    fill: the rows of a box are padded to a multiple of it.
    """
    side, device = 2 * head.radius + 1, head.branches[0].W.device
    n_rows = m * side * side
    index = torch.arange(n_rows, device=device).view(m, side, side)
    stages = []
    for reach in head.reaches:
        k, side = 2 * reach + 1, side - 2 * reach
        T = side * side
        per_box = T + -T % fill
        table = torch.full((m, per_box, k * k), n_rows, device=device)
        table[:, :T] = index.unfold(1, k, 1).unfold(2, k, 1).reshape(m, T, k * k)
        table = pad(table.flatten(0, 1), (0, 0, 0, 1), value=n_rows)
        n_rows = m * per_box
        box_rows = torch.arange(n_rows, device=device).view(m, per_box)[:, :T]
        stages.append(Cells(table, box_rows.contiguous(), per_box))
        index = box_rows.reshape(m, side, side)
    return tuple(stages)


def plan_own_cells(
    staged: HeadStages, head: HeadWeights, group: Group, tables: tuple[Cells, ...] | None = None
) -> tuple[Tensor, Plan]:
    """Features (P + 1, C) of each box's own cells, and the plan for a GPU or a static graph.

    All sizes follow from m and ``group``. tables: those of ``window_tables`` for m boxes.
    """
    features, m = staged.features, len(staged.frame)
    tables = window_tables(m, head) if tables is None else tables
    cell, inside = (pad(t.flatten(), (0, 1)) for t in _window_cells(staged, head.radius))
    inside = inside.unsqueeze(1)  # (P + 1, 1)
    channels_last = features.permute(0, 2, 3, 1).flatten(0, 2)  # no copy on a GPU
    rows = torch.where(inside, channels_last.index_select(0, cell), 0)
    stages, own = [], inside.to(features.dtype)
    for cells in tables:  # a cell is where the middle tap is that it reads
        own = own.index_select(0, cells.input_rows[:, cells.input_rows.shape[1] // 2])
        stages.append(replace(cells, inside=own))
    boxes = torch.arange(m, device=cell.device)
    return rows, Plan(tuple(stages), None, boxes, (group,), cell[:-1], 4 * MEMORY, inside)


def unique_below(numbers: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The unique numbers below ``size`` (n,), ascending, and the index of each number among them.

    ``size`` itself marks padding; its index is n.

    >>> unique_below(torch.tensor([5, 2, 9, 5]), 9)
    (tensor([2, 5]), tensor([1, 0, 2, 1]))
    """
    occurs = torch.zeros(size + 1, dtype=torch.bool, device=numbers.device)
    occurs[numbers.flatten()] = True
    occurs[size] = False
    index = occurs.cumsum(0) - 1
    unique = occurs.nonzero()[:, 0]
    index[size] = len(unique)
    return unique, index[numbers]


def _window_cells(staged: HeadStages, radius: int) -> tuple[Tensor, Tensor]:
    """Cells (m, s, s) of each box's window, and whether they are inside the map.

    A cell outside gets the number of the nearest cell inside.
    """
    height, width = staged.features.shape[2:]
    around = torch.arange(-radius, radius + 1, device=staged.row.device)
    rows, columns = staged.row[:, None] + around, staged.column[:, None] + around  # (m, s)
    near_rows, near_columns = rows.clamp(0, height - 1), columns.clamp(0, width - 1)
    inside = (rows == near_rows)[:, :, None] & (columns == near_columns)[:, None, :]
    lines = staged.frame[:, None] * height + near_rows
    return lines[:, :, None] * width + near_columns[:, None, :], inside


def group_by_kind(kind: Tensor, head: HeadWeights, most: int) -> Group:
    """One group with one row per kind, padded to ``most`` boxes: few launches on a GPU.

    A box of the kind ``head.n_kinds`` is padding.
    """
    m, kinds = len(kind), head.n_kinds
    boxes = torch.arange(m, device=kind.device)
    slot = torch.where(kind < kinds, kind * most + _rank_in_kind(kind), kinds * most)
    members = torch.full((kinds * most + 1,), m, device=kind.device).scatter(0, slot, boxes)[:-1]
    slot = slot.clamp(max=kinds * most - 1)
    return Group(head.branches, members.view(kinds, most), slot)


def group_in_blocks(kind: Tensor, head: HeadWeights, size: int = 16) -> Group:
    """One group of rows of ``size`` boxes of one kind, with little padding.

    Its shape does not depend on the kinds of the m boxes, as a static graph requires.
    """
    m, kinds = len(kind), head.n_kinds
    boxes = torch.arange(m, device=kind.device)
    counts = (kind.unsqueeze(1) == torch.arange(kinds, device=kind.device)).long().sum(0)
    ends = ((counts + size - 1) // size).cumsum(0)  # (kinds,) the row behind the last of each kind
    n_rows = m // size + kinds
    slot = torch.cat([ends.new_zeros(1), ends])[kind] * size + _rank_in_kind(kind)
    members = torch.full((n_rows * size,), m, device=kind.device).scatter(0, slot, boxes)
    kind_of_row = (torch.arange(n_rows, device=kind.device).unsqueeze(1) >= ends).long().sum(1)
    stages = head.branches_of(kind_of_row.clamp(max=kinds - 1))
    return Group(stages, members.view(n_rows, size), slot)


def _rank_in_kind(kind: Tensor) -> Tensor:
    """The number of earlier boxes of the same kind (m,)."""
    earlier = torch.ones(len(kind), len(kind), dtype=torch.bool, device=kind.device).tril(-1)
    return ((kind.unsqueeze(1) == kind) & earlier).long().sum(1)


def backpropagate(d: Tensor, W: Tensor, stage: StageWeights) -> Tensor:
    """Gradients (..., T', n_in / taps) at a stage's input, from those (..., T, n_out) at ``A W``.

    W is (*lead, n_in, n_out), where ``lead`` are the first dimensions of d. T' cells are the larger
    window that the T cells read.
    """
    k = 2 * stage.reach + 1
    W = W[..., : W.shape[-2] - stage.n_extra, :].transpose(-1, -2)
    side = round(d.shape[-2] ** 0.5)
    taps = (d.flatten(W.dim() - 2, -2) @ W).view(*d.shape[:-2], side, side, k * k, -1)
    return fold_gradients(taps)


def fold_gradients(taps: Tensor) -> Tensor:
    """Sum the gradients of the taps of all cells (..., side, side, k k, C) over the larger window.

    Returns (..., s s, C), s = side + k - 1: ``torch.nn.functional.fold`` with the channels last.
    """
    *lead, side, _, n_taps, C = taps.shape
    k = round(n_taps**0.5)
    if side == 1:
        return taps.view(*lead, n_taps, C)
    out = taps.new_zeros(*lead, side + k - 1, side + k - 1, C)
    for tap in range(n_taps):
        y, x = divmod(tap, k)
        out[..., y : y + side, x : x + side, :] += taps[..., tap, :]
    return out.flatten(-3, -2)
