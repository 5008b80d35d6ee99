"""The branches of a staged head: boxes are arranged by kind.

Tensors are (G rows of one kind each, B branches, n boxes, ...). See ``covariance.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from boxcov.predict.cuda.head_kernels import convolve_back
from boxcov.predict.cuda.head_kernels import quadratic_forms as form_kernel
from boxcov.predict.head.cells import Cells, Group, Plan, backpropagate
from boxcov.predict.head.covariance import (
    arrange_gradients,
    gram_matrices,
    quadratic_forms,
)
from boxcov.predict.head.weights import HeadWeights, StagePosterior, StageWeights

# alpha, and the slope of norm and activation, which step 2 needs of a stage: (L + 1, columns) and
# (L + 1, n_out), in the branches (G, B, n, T, columns or n_out)
StageCache = tuple[Tensor | None, Tensor]


@dataclass(frozen=True)
class BranchPass:
    """Step 1 of the branches, and what step 2 needs of it."""

    outputs: Tensor  # (m, R) raw outputs
    A: Tensor  # inputs of the first stage, see ``Cells.gather``
    groups: list[tuple[Tensor, list[StageCache]]]  # raw outputs (G, B, n, 1, c), and each stage's


def run_branches(head: HeadWeights, plan: Plan, rows: Tensor) -> BranchPass:
    """Step 1 for the stem's output rows (L + 1, C)."""
    first = head.branches[0]
    A = plan.stages[-1].gather(rows, first.has_bias, first.n_extra)
    groups = [_run_forward(plan.stages[-1], group, A) for group in plan.groups]
    outputs = [_by_box(group, x.squeeze(3)) for group, (x, _) in zip(plan.groups, groups)]
    return BranchPass(_join(outputs).flatten(1)[:, head.output_index], A, groups)


def differentiate_branches(
    head: HeadWeights, plan: Plan, done: BranchPass
) -> tuple[Tensor | None, Tensor]:
    """Step 2: what the branches add, and the gradients (R, m, T, C) at the stem's output.

    They add a covariance (m, R, R), or derivatives (m, R, k), or None if the posterior does not
    contain them.
    """
    posterior, index = head.branches[0].posterior, head.output_index
    grams = None
    if posterior is not None and posterior.F is not None:
        grams = gram_matrices(posterior, posterior.project(done.A), plan.stages[-1], plan)
    parts, gradients = [], []
    for group, (x, caches) in zip(plan.groups, done.groups):
        total, d = _run_backward(group, caches, x, plan, grams)
        gradients.append(_gradients_at_input(head, group, d))
        parts += [] if total is None else [_by_box(group, total)]
    d = _join(gradients, 1)
    if not parts:
        return None, d
    added = _join(parts)  # (m, B, c, c or k)
    if not head.has_directions:  # outputs of two branches have no layer of the branches in common
        added = torch.diag_embed(added.permute(0, 2, 3, 1))  # (m, c, c, B, B)
        added = added.permute(0, 3, 1, 4, 2).flatten(3)[..., index]
    return added.flatten(1, 2)[:, index], d


def _by_box(group: Group, values: Tensor) -> Tensor:
    """Values (g, B, ...) of the boxes of a group, from those (G, B, n, ...) of its rows."""
    own = values.transpose(1, 2).flatten(0, 1)
    return own if group.slot is None else own[group.slot]


def _join(parts: list[Tensor], dim: int = 0) -> Tensor:
    """The results of the groups, one after the other; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _gradients_at_input(head: HeadWeights, group: Group, d: Tensor) -> Tensor:
    """Gradients (R, g, T', C) of the raw outputs, from those (G, B, c, n, T, n_out) of a group.

    They are at the input of the branches, and d at the outputs of their first layer.
    """
    first = group.stages[0]
    if first.uses_kernels and group.slot is not None:
        W, k = first.W[:, :, : first.W.shape[2] - first.n_extra], 2 * first.reach + 1
        return convolve_back(d, W, k, head.output_index, group.members, len(group.slot))
    # padded outputs are dropped: (G, R, n, T, n_out)
    d = d.flatten(1, 2).index_select(1, head.output_index)
    d = backpropagate(d, first.W.index_select(1, head.branch_index), first)
    d = d.transpose(0, 1).flatten(1, 2)
    return d if group.slot is None else d.index_select(1, group.slot)


def _run_forward(cells: Cells, group: Group, A: Tensor) -> tuple[Tensor, list[StageCache]]:
    """Step 1 for a group: raw outputs (G, B, n, 1, c), and what step 2 needs of each stage.

    A (L + 1, n_in): the inputs of the first stage.
    """
    rows = cells.rows_of(group.members)
    on_map = rows < len(A) - 1 if cells.inside is None else cells.inside[:, 0][rows]
    first, *later = group.stages
    x, cache = _run_first_stage(first, rows, A, on_map)
    caches = [cache]
    for stage in later:
        on_map = _inner_cells(on_map, stage.reach)
        x, cache = _run_later_stage(stage, x, on_map)
        caches.append(cache)
    return x, caches


def _run_backward(
    group: Group, caches: list[StageCache], x: Tensor, plan: Plan, grams: Tensor | None
) -> tuple[Tensor | None, Tensor]:
    """Step 2 for a group: what the layers add (G, B, n, c, c or k), and the gradients.

    These are (G, B, c, n, T, n_out) at the first layer's outputs. x (G, B, n, 1, c): the raw
    outputs. grams: of the first stage, where the branches share them.
    """
    c = x.shape[-1]
    d = torch.eye(c, dtype=x.dtype, device=x.device).view(c, 1, 1, c)
    d = d.expand(*x.shape[:2], c, *x.shape[2:])
    total: Tensor | None = None
    for number in reversed(range(len(caches))):
        stage, (alpha, slope) = group.stages[number], caches[number]
        d = d * slope.unsqueeze(2)
        if stage.directions is not None:
            total = plus(total, _branch_derivatives(alpha, d))
        elif stage.posterior is not None:
            if number == 0 and grams is not None:
                added = _shared_covariance(grams, plan, group, stage.posterior, d)
            else:
                K = _own_kernels(stage.posterior, alpha)
                added = _branch_covariance(stage.posterior, K, d)
            total = plus(total, added)
        if number:
            d = backpropagate(d, stage.W, stage)
    return total, d


def _run_first_stage(
    stage: StageWeights, rows: Tensor, A: Tensor, on_map: Tensor
) -> tuple[Tensor, StageCache]:
    """Outputs (G, B, n, T, n_out) of the first stage, from inputs A (L + 1, n_in).

    rows (G, n, T): those of A that belong to each box. on_map (G, n, T): which are on the map.
    """
    (G, n, T), B = rows.shape, stage.W.shape[1]
    own = A.index_select(0, rows.flatten()).view(G, n * T, -1)

    def by_branch(product: Tensor) -> Tensor:  # (G, n T, B columns) to (G, B, n, T, columns)
        return product.view(G, n, T, B, -1).permute(0, 3, 1, 2, 4)

    alpha = None
    if stage.directions is not None:
        alpha = by_branch(own @ stage.directions.transpose(1, 2).flatten(2))
    elif stage.posterior is not None and stage.posterior.F is None:
        if stage.posterior.U.dim() == 2:
            alpha = stage.posterior.project(own)
        else:
            alpha = stage.posterior.project_each(own.unsqueeze(1).expand(-1, B, -1, -1))
        alpha = alpha.view(G, -1, n, T, alpha.shape[-1])
    h, slope = stage.activate(by_branch(stage.product(own, stage.W.transpose(1, 2).flatten(2))))
    on_map = on_map.view(G, 1, n, T, 1)
    return h * on_map, (alpha, slope * on_map)


def _inner_cells(on_map: Tensor, reach: int) -> Tensor:
    """The values (G, n, T') of the cells whose kernel lies within windows (G, n, T)."""
    side = round(on_map.shape[2] ** 0.5)
    inner = slice(reach, side - reach)
    return on_map.unflatten(2, (side, side))[..., inner, inner].flatten(2)


def _run_later_stage(stage: StageWeights, x: Tensor, on_map: Tensor) -> tuple[Tensor, StageCache]:
    """Outputs (G, B, n, T', n_out) of a later stage, from x (G, B, n, T, C).

    on_map (G, n, T'): which of the cells are on the map. The last stage has one, which is.
    """
    side, k = round(x.shape[3] ** 0.5), 2 * stage.reach + 1
    windows = x.unflatten(3, (side, side)).unfold(3, k, 1).unfold(4, k, 1)
    A = windows.movedim(5, 7).flatten(5).flatten(3, 4)  # (G, B, n, T', k k C)
    if stage.n_extra:
        extra = A.new_zeros(stage.n_extra)
        extra[: stage.has_bias] = 1
        A = torch.cat([A, extra.expand(*A.shape[:-1], -1)], -1)
    flat = A.flatten(2, 3)
    alpha = None
    if stage.directions is not None:
        alpha = (flat @ stage.directions.flatten(3)).view(*A.shape[:4], -1)
    elif stage.posterior is not None:
        alpha = stage.posterior.project_each(flat).view(*A.shape[:4], -1)
    h, slope = stage.activate(stage.product(flat, stage.W).view(*A.shape[:4], -1))
    if on_map.shape[2] > 1:  # beyond the border the next stage reads zeros
        on_map = on_map[:, None, :, :, None]
        h, slope = h * on_map, slope * on_map
    return h, (alpha, slope)


def _shared_covariance(
    grams: Tensor, plan: Plan, group: Group, posterior: StagePosterior, d: Tensor
) -> Tensor:
    """What the first stage adds (G, B, n, c, c), from the Gram matrices (u, S, T T) per cell."""
    assert posterior.F is not None
    if posterior.uses_kernels:
        delta = (d.flatten(2, 4) @ posterior.V).view(d.shape)
        return form_kernel(grams, posterior.F, delta, group.members)
    (G, n), (_, B, p, _) = group.members.shape, posterior.F.shape
    T = round(grams.shape[-1] ** 0.5)
    centre = pad(plan.centre_of, (0, 1))[group.members]  # any for padding: its gradients are zero
    own = grams.index_select(0, centre.flatten()).view(G, n, -1, T * T)
    K = posterior.F.flatten(1, 2).unsqueeze(1) @ own  # (G, n, B p, T T)
    return _branch_covariance(posterior, K.view(G, n, B, p, T, T).transpose(1, 2), d)


def _own_kernels(posterior: StagePosterior, alpha: Tensor | None) -> Tensor:
    """K_p (G, B, n, p, T, T), from alpha (G, B, n, T, n_in) and the variances as they are."""
    assert alpha is not None
    n, T = alpha.shape[2:4]
    pairs = (alpha.unsqueeze(-2) * alpha.unsqueeze(-3)).flatten(2, 4)  # (G, B, n T T, n_in)
    K: Tensor = pairs @ posterior.variances.transpose(2, 3)  # (G, B, n T T, p)
    return K.view(*K.shape[:2], n, T, T, -1).movedim(5, 3)


def _branch_covariance(posterior: StagePosterior, K: Tensor, d: Tensor) -> Tensor:
    """What a stage adds (G, B, n, c, c), for gradients d (G, B, c, n, T, n_out)."""
    c = d.shape[2]
    delta = (d.flatten(2, 4) @ posterior.V).view(d.shape).permute(0, 1, 3, 5, 4, 2)
    delta = arrange_gradients(delta, K.shape[-1])  # (G, B, n, p, T, c)
    return quadratic_forms(K, delta)[..., :c, :c]


def _branch_derivatives(alpha: Tensor | None, d: Tensor) -> Tensor:
    """What a stage adds (G, B, n, c, k), for d (G, B, c, n, T, n_out)."""
    assert alpha is not None  # (G, B, n, T, k n_out)
    moved: Tensor = alpha.unflatten(4, (-1, d.shape[5])).transpose(4, 5).flatten(3, 4)
    return d.transpose(2, 3).flatten(4) @ moved  # times (G, B, n, T n_out, k)


def plus(total: Tensor | None, added: Tensor) -> Tensor:
    """The sum of what layers add; None before the first of them."""
    return added if total is None else total + added
