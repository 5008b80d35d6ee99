"""The branches of a staged head: boxes by kind, (G kinds, B branches, n boxes, ...); see ``stacked.py``."""

from __future__ import annotations

import torch
from torch import Tensor

from boxcov.predict.head.cells import Group, Plan
from boxcov.predict.head.products import (
    Passed,
    back,
    contracted,
    filled,
    gathered,
    gram_matrices,
    outputs,
    pointwise,
    with_rest,
)
from boxcov.predict.head.weights import Drawn, HeadWeights, Layers, Turned


def branches(head: HeadWeights, plan: Plan, rows: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """The numbers (m, R), what the branches' layers add (m, R, R or k), and the gradients at the stem's output (R, m, T, C)."""
    first, last = head.branches[0], head.branches[-1]
    a = gathered(rows, plan.stages[-1].table, first)
    grams = None
    if isinstance(first.turned, Turned) and first.turned.rows is not None:
        grams = gram_matrices(
            first.turned, with_rest(a, a @ first.turned.U, first.turned), plan.stages[-1], plan
        )
    found = [_of_kinds(head, plan, group, a, grams) for group in plan.groups]
    numbers = _in_order([parts[0] for parts in found], plan).flatten(1)[:, last.picked]
    d = _in_order([parts[2] for parts in found], plan, 1)
    added = [parts[1] for parts in found if parts[1] is not None]
    if not added:
        return numbers, None, d
    part = _in_order(added, plan)  # (m, B, c, c or k)
    if any(
        isinstance(layers.turned, Turned) for layers in head.branches
    ):  # numbers of two branches share no layer of theirs
        part = (
            torch.diag_embed(part.permute(0, 2, 3, 1))
            .permute(0, 3, 1, 4, 2)
            .flatten(3)[..., last.picked]
        )
    return numbers, part.flatten(1, 2)[:, last.picked], d


def _in_order(parts: list[Tensor], plan: Plan, dim: int = 0) -> Tensor:
    """What the groups gave, box by box; a single group has them in order."""
    if len(plan.groups) == 1:
        return parts[0]
    return torch.cat(parts, dim).index_select(
        dim, torch.cat([group.boxes for group in plan.groups]).argsort()
    )


def _of_kinds(
    head: HeadWeights, plan: Plan, group: Group, a: Tensor, grams: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Numbers (g, B, c), what the layers add (g, B, c, c or k) and gradients (R, g, T, C) of the boxes of some kinds."""
    at = plan.stages[-1].at_or_beyond(group.members)  # (G, n, T)
    stages = [layers.of(group.kinds) for layers in head.branches]
    x, passed = _first_branches(stages[0], at, a, plan.stages[-1].inside)
    passes = [passed]
    for layers in stages[1:]:
        x, passed = _later_branches(layers, x)
        passes.append(passed)
    numbers, c = x, x.shape[-1]
    d = (
        torch.eye(c, dtype=x.dtype, device=x.device)
        .view(c, 1, 1, c)
        .expand(*x.shape[:2], c, *x.shape[2:])
    )  # (G, B, c, n, T, C)
    added: Tensor | None = None
    for number, layers, passed in zip(
        reversed(range(len(stages))), reversed(stages), reversed(passes)
    ):
        d = d * passed.slope.unsqueeze(2)
        part: Tensor | None = None
        if isinstance(layers.turned, Drawn):
            part = _branch_directions(layers.turned, passed.alpha, d)
        elif layers.turned is not None:
            own = None if grams is None or number else (grams, plan.cell_or_none(group.members))
            part = _branch_covariance(layers.turned, passed.alpha, d, own)
        added = part if added is None else added if part is None else added + part
        if number:
            d = back(d, layers.W, layers)
    # from here on a row a number: what was filled up falls away
    d = back(
        d.flatten(1, 2)[:, stages[-1].picked], stages[0].W[:, stages[-1].branch_of], stages[0]
    )  # (G, R, n, T, C)
    d = d.transpose(0, 1).flatten(1, 2).index_select(1, group.slot)
    by_box = [
        None if t is None else t.transpose(1, 2).flatten(0, 1)[group.slot]
        for t in (numbers.squeeze(3), added)
    ]
    assert by_box[0] is not None
    return by_box[0], by_box[1], d


def _first_branches(
    layers: Layers, at: Tensor, a: Tensor, on: Tensor | None
) -> tuple[Tensor, Passed]:
    """The first stage, which reads the stem's cells ``a`` (L + 1, n_in): (G, B, n, T, C)."""
    G, n, T = at.shape
    own = a.index_select(0, at.flatten()).view(G, n * T, -1)
    alpha = None
    if isinstance(layers.turned, Drawn):
        alpha = (
            (own @ layers.turned.U.transpose(1, 2).flatten(2))
            .view(G, n, T, layers.W.shape[1], -1)
            .permute(0, 3, 1, 2, 4)
        )
    elif layers.turned is not None and layers.turned.rows is None:
        U = layers.turned.U  # one for all, or (G, B, n_in, n_in)
        alpha = (
            (own @ U).view(G, 1, n, T, -1)
            if U.dim() == 2
            else (own.unsqueeze(1) @ U).view(*U.shape[:2], n, T, -1)
        )
    W = layers.W.transpose(1, 2).flatten(2)  # (G, n_in, B C)
    y = outputs(own, W, layers).view(G, n, T, layers.W.shape[1], -1).permute(0, 3, 1, 2, 4)
    h, slope = pointwise(y, layers.scale[:, :, None, None], layers.shift[:, :, None, None], layers)
    inside = ((at < len(a) - 1) if on is None else on[:, 0][at]).view(G, 1, n, T, 1)
    return h * inside, Passed(alpha, slope * inside)


def _later_branches(layers: Layers, x: Tensor) -> tuple[Tensor, Passed]:
    """A stage behind, on x (G, B, n, T, C)."""
    G, B, n, T, C = x.shape
    side, size = round(T**0.5), 2 * layers.reach + 1
    a = (
        x.reshape(G, B, n, side, side, C).unfold(3, size, 1).unfold(4, size, 1)
    )  # (G, B, n, s, s, C, k, k)
    a = a.movedim(5, 7).flatten(5).flatten(3, 4)  # (G, B, n, T', k k C)
    if layers.behind:
        a = torch.cat([a, _behind(a, layers)], -1)
    flat = a.flatten(2, 3)
    alpha = None if layers.turned is None else (flat @ layers.turned.U).view(*a.shape[:4], -1)
    y = outputs(flat, layers.W, layers).view(*a.shape[:4], -1)
    h, slope = pointwise(y, layers.scale[:, :, None, None], layers.shift[:, :, None, None], layers)
    return h, Passed(alpha, slope)


def _behind(a: Tensor, layers: Layers) -> Tensor:
    """What comes behind the inputs (..., behind): the 1 of a bias, then zeros."""
    behind = a.new_zeros(layers.behind)
    behind[: layers.has_bias] = 1
    return behind.expand(*a.shape[:-1], layers.behind)


def _branch_covariance(
    turned: Turned, alpha: Tensor | None, d: Tensor, grams: tuple[Tensor, Tensor] | None
) -> Tensor:
    """(G, B, n, c, c) of gradients d (G, B, c, n, T, C); from Gram matrices of cells, and the cell of each box (G, n), where they are known."""
    G, B, c, n, T, p = d.shape
    delta = (d.flatten(2, 4) @ turned.V).view(d.shape)
    delta = delta.permute(0, 1, 3, 5, 4, 2)  # (G, B, n, p, T, c)
    if grams is not None:
        assert turned.rows is not None
        T = round(grams[0].shape[-1] ** 0.5)
        delta = filled(delta, T)
        own = (
            grams[0].index_select(0, grams[1].flatten().clamp(min=0)).view(G, n, -1, T * T)
        )  # of no box: any, its gradients are zero
        K = turned.rows.flatten(1, 2).unsqueeze(1) @ own  # (G, n, B p, T T)
        K = K.view(G, n, B, p, T, T).transpose(1, 2)
    else:
        assert alpha is not None
        pairs = (alpha.unsqueeze(-2) * alpha.unsqueeze(-3)).flatten(2, 4)  # (G, B, n T T, n_in)
        K = (
            (pairs @ turned.variances.transpose(2, 3))
            .view(G, B, n, T * T, p)
            .transpose(3, 4)
            .unflatten(4, (T, T))
        )
    return contracted(K, delta)[..., :c, :c]


def _branch_directions(drawn: Drawn, alpha: Tensor | None, d: Tensor) -> Tensor:
    """(G, B, n, c, k) of gradients d (G, B, c, n, T, C) and what the directions make of the inputs, alpha (G, B, n, T, k C)."""
    assert alpha is not None
    G, B, n, T, _ = alpha.shape
    moved = (
        alpha.reshape(G, B, n, T, drawn.count, -1).transpose(4, 5).flatten(3, 4)
    )  # (G, B, n, T C, k)
    return d.transpose(2, 3).flatten(4) @ moved
