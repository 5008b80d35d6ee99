"""Which rows each stage of a head reads, for the boxes of a frame: index tensors, made once a frame.

A stage's output lives at cells of the map: rows 0 to L - 1, and row L, which is zero, for all cells beyond the border. On a CPU every cell that some
box sees is listed once, as windows overlap. On a GPU every box has cells of its own, so that all sizes and all tables follow from the number
of boxes; those beyond the border are then rows of their own, set to zero.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from boxcov.predict.layer_covariance import MEMORY

NEAR = 2**20  # bytes of intermediates at once on a CPU: what its second cache holds


@dataclass(frozen=True)
class Cells:
    """Where one stage is evaluated."""

    table: Tensor  # (L, k k) rows of its input that each cell reads
    at: Tensor  # (m, T) its rows that each box sees; L is beyond the border
    each: int = 0  # of cells that are a box's own: rows a box, T and some that fill up; 0 where boxes share cells
    inside: Tensor | None = (
        None  # (L + 1, 1) of a box's own: 1 for a cell of the map, 0 for one beyond
    )

    def at_or_beyond(self, boxes: Tensor) -> Tensor:
        """The same for some boxes (..., T); the box m sees nothing."""
        return torch.cat([self.at, torch.full_like(self.at[:1], len(self.table))])[boxes]

    def seen(self, rows: Tensor) -> Tensor:
        """What each box sees (..., m, T, C) of rows (..., L + 1, C); a view, if its cells are its own."""
        if not self.each:
            return rows[..., self.at, :]
        own: Tensor = rows[..., :-1, :].unflatten(-2, (-1, self.each))
        return own[..., : self.at.shape[1], :]


@dataclass(frozen=True)
class Group:
    """The boxes of some kinds, one row a kind, or several."""

    kinds: slice | Tensor  # of the G rows
    members: Tensor  # (G, n) boxes of each row, filled up with m
    boxes: Tensor  # (g,) all of them
    slot: Tensor  # (g,) where each of them is among the members


@dataclass(frozen=True)
class Plan:
    stages: tuple[Cells, ...]  # those of the stem, and the first of the branches
    first: (
        Tensor | None
    )  # (u,) one box for each different cell that a box stands on; None: every box counts
    cell: Tensor  # (m,) which of them
    groups: tuple[Group, ...]
    pixels: (
        Tensor  # (P,) the cells of the map, frame after frame, whose features the first stage reads
    )
    room: int  # bytes of intermediates at once
    beyond: Tensor | None = (
        None  # (P + 1, 1) whether a pixel is none of the map, where that is not told by the tables
    )

    def cell_or_none(self, boxes: Tensor) -> Tensor:
        """The cells of some boxes; -1 for the box m, which is none."""
        return torch.cat([self.cell, self.cell.new_full((1,), -1)])[boxes]


@dataclass(frozen=True)
class BoxPositions:
    """The cells that m boxes stand on, and what kind they are."""

    frame: Tensor
    row: Tensor
    column: Tensor
    kind: Tensor


def plan_shared_cells(
    features: Tensor, where: BoxPositions, radius: int, reaches: list[int]
) -> tuple[Tensor, Plan]:
    """The features (P + 1, C) of the cells that boxes see, each once and a row of zeros, and the plan for stages of those ``reaches``.

    >>> where = BoxPositions(*torch.tensor([[0, 0], [0, 3], [7, 4], [0, 1]]))
    >>> pixels, made = plan_shared_cells(torch.randn(1, 4, 8, 8), where, radius=1, reaches=[1])
    >>> pixels.shape, [group.kinds for group in made.groups]  # four cells of the first, in the corner, and nine of the second
    (torch.Size([14, 4]), [slice(0, 1, None), slice(1, 2, None)])
    """
    batch, _, height, width = features.shape
    cell, inside = _cells(features, where, radius)
    cells, index = once(torch.where(inside, cell, batch * height * width), batch * height * width)
    pixels = features.flatten(2)[cells // (height * width), :, cells % (height * width)]
    seen, rows, side = cells, len(cells), 2 * radius + 1
    centres, own = once(index[:, radius, radius], rows)
    first = torch.zeros_like(centres).scatter(0, own, torch.arange(len(own), device=own.device))
    stages = []
    for reach in reaches:
        size = 2 * reach + 1
        around = index.unfold(1, size, 1).unfold(2, size, 1).flatten(3)  # (m, s, s, k k)
        index = index[:, reach : side - reach, reach : side - reach]
        cells, at = once(index, rows)
        table = torch.zeros(rows + 1, size * size, dtype=index.dtype, device=index.device)
        table[index.flatten()] = around.flatten(
            0, 2
        )  # boxes that share a cell agree on what is around it
        stages.append(Cells(table[cells], at.flatten(1)))
        index, rows, side = at, len(cells), side - 2 * reach
    return torch.cat([pixels, pixels.new_zeros(1, pixels.shape[1])]), Plan(
        tuple(stages), first, own, _one_by_one(where.kind), seen, NEAR
    )


def window_tables(
    m: int, radius: int, reaches: list[int], like: Tensor, fill: int = 1
) -> tuple[Cells, ...]:
    """The stages of m boxes with cells of their own, wherever they stand: made once for a number of boxes. ``inside`` is still missing.

    fill: rows of a box are filled up to a multiple of it.

    >>> first, second = window_tables(3, radius=2, reaches=[1, 1], like=torch.zeros(1), fill=4)
    >>> first.table.shape, first.at.shape, second.table.shape
    (torch.Size([36, 9]), torch.Size([3, 9]), torch.Size([12, 9]))
    """
    side = each = 2 * radius + 1
    index = torch.arange(m * side * side, device=like.device).view(m, side, side)
    rows, stages = m * side * side, []
    for reach in reaches:
        size, side = 2 * reach + 1, side - 2 * reach
        around = index.unfold(1, size, 1).unfold(2, size, 1).reshape(m, side * side, size * size)
        each = side * side + -(side * side) % fill
        table = torch.full((m, each, size * size), rows, device=like.device)
        table[:, : side * side] = around
        rows = m * each
        at = torch.arange(rows, device=like.device).view(m, each)[:, : side * side]
        stages.append(Cells(table.flatten(0, 1), at.contiguous(), each))
        index = at.reshape(m, side, side)
    return tuple(stages)


def plan_own_cells(
    features: Tensor,
    where: BoxPositions,
    radius: int,
    reaches: list[int],
    group: Group,
    stages: tuple[Cells, ...] | None = None,
) -> tuple[Tensor, Plan]:
    """The same with cells of its own for every box: sizes follow from m and from ``group``, nothing is looked at.

    stages: what ``windows`` gave for as many boxes.

    >>> where = BoxPositions(*torch.tensor([[0, 0], [0, 3], [7, 4], [0, 1]]))
    >>> pixels, made = plan_own_cells(torch.randn(1, 4, 8, 8), where, radius=1, reaches=[1], group=group_by_kind(where.kind, kinds=2, most=1))
    >>> pixels.shape, made.groups[0].members
    (torch.Size([19, 4]), tensor([[0],
            [1]]))
    """
    m = len(where.frame)
    stages = window_tables(m, radius, reaches, features) if stages is None else stages
    cell, inside = _cells(features, where, radius)
    on = inside.to(features.dtype)
    # channels last, as a network leaves them on a GPU: no copy
    pixels = features.permute(0, 2, 3, 1).reshape(-1, features.shape[1]).index_select(
        0, cell.flatten()
    ) * on.view(-1, 1)
    made, crop = [], 0
    for cells, reach in zip(stages, reaches):
        crop += reach
        own = on[:, crop : on.shape[1] - crop, crop : on.shape[2] - crop].flatten(1)
        own = pad(pad(own, (0, cells.each - own.shape[1])).flatten(), (0, 1))
        made.append(replace(cells, inside=own.unsqueeze(1)))
    each = torch.arange(m, device=cell.device)
    beyond = pad(~inside.flatten(), (0, 1), value=True).unsqueeze(1)
    return pad(pixels, (0, 0, 0, 1)), Plan(
        tuple(made), None, each, (group,), cell.flatten(), 4 * MEMORY, beyond
    )


def once(numbers: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The different ones among ``numbers`` below ``size``, ascending (n,), and where each stands among them; ``size`` itself stands at n.

    >>> once(torch.tensor([5, 2, 9, 5]), 9)
    (tensor([2, 5]), tensor([1, 0, 2, 1]))
    """
    there = torch.zeros(size + 1, dtype=torch.bool, device=numbers.device)
    there[numbers.flatten()] = True
    there[size] = False
    place = there.cumsum(0) - 1
    found = there.nonzero()[:, 0]
    place[size] = len(found)
    return found, place[numbers]


def _cells(features: Tensor, where: BoxPositions, radius: int) -> tuple[Tensor, Tensor]:
    """Numbers (m, s, s) of the cells of each window, and whether they are on the map; one beyond has the number of the nearest that is."""
    height, width = features.shape[2:]
    around = torch.arange(-radius, radius + 1, device=where.row.device)
    rows = (where.row[:, None] + around)[:, :, None]  # (m, s, 1)
    columns = (where.column[:, None] + around)[:, None, :]  # (m, 1, s)
    inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    return (
        where.frame[:, None, None] * height + rows.clamp(0, height - 1)
    ) * width + columns.clamp(0, width - 1), inside


def group_by_kind(kind: Tensor, kinds: int, most: int) -> Group:
    """All kinds at once, each filled up to the ``most`` boxes of a kind: few launches on a GPU. A box of the kind ``kinds`` is none.

    >>> group_by_kind(torch.tensor([1, 0, 1]), kinds=2, most=2).members
    tensor([[1, 3],
            [0, 2]])
    """
    m = len(kind)
    each = torch.arange(m, device=kind.device)
    number = _numbers(kind)
    slot = torch.where(kind < kinds, kind * most + number, kinds * most)
    members = torch.full((kinds * most + 1,), m, device=kind.device).scatter(0, slot, each)[:-1]
    return Group(slice(0, kinds), members.view(kinds, most), each, slot.clamp(max=kinds * most - 1))


def group_in_blocks(kind: Tensor, kinds: int, size: int = 16) -> Group:
    """Rows of ``size`` boxes of one kind, as many as any boxes could need: of fixed shape whatever the kinds of m boxes, and little filled up.

    >>> found = group_in_blocks(torch.tensor([1, 0, 1, 1]), kinds=2, size=2)
    >>> found.kinds, found.members
    (tensor([0, 1, 1, 1]), tensor([[1, 4],
            [0, 2],
            [3, 4],
            [4, 4]]))
    """
    m = len(kind)
    each = torch.arange(m, device=kind.device)
    counts = (kind.unsqueeze(1) == torch.arange(kinds, device=kind.device)).long().sum(0)
    ends = ((counts + size - 1) // size).cumsum(0)  # (kinds,) rows up to the last of each kind
    rows = m // size + kinds
    slot = torch.cat([ends.new_zeros(1), ends])[kind] * size + _numbers(kind)
    members = torch.full((rows * size,), m, device=kind.device).scatter(0, slot, each)
    of = (
        (torch.arange(rows, device=kind.device).unsqueeze(1) >= ends)
        .long()
        .sum(1)
        .clamp(max=kinds - 1)
    )
    return Group(of, members.view(rows, size), each, slot)


def _numbers(kind: Tensor) -> Tensor:
    """The number of each box among those of its kind (m,)."""
    before = torch.ones(len(kind), len(kind), dtype=torch.bool, device=kind.device).tril(-1)
    return ((kind.unsqueeze(1) == kind) & before).long().sum(1)


def _one_by_one(kind: Tensor) -> tuple[Group, ...]:
    """One kind after the other: nothing is filled up, and what is worked on stays in a CPU's cache."""
    groups = []
    for k in kind.unique().tolist():
        boxes = (kind == k).nonzero()[:, 0]
        groups.append(
            Group(
                slice(k, k + 1),
                boxes.unsqueeze(0),
                boxes,
                torch.arange(len(boxes), device=kind.device),
            )
        )
    return tuple(groups)
