"""Steps 1 and 2 of ``covariance.py`` for the branches of a staged head.

Boxes are arranged by kind here: (G rows of one kind each, B branches, n boxes, ...).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from boxcov.predict.head.cells import Group, Plan
from boxcov.predict.head.products import (
    StageCache,
    append_remainder,
    apply_norm_and_activation,
    backpropagate,
    gather_inputs,
    gram_matrices,
    linear_outputs,
    pad_gradients,
    quadratic_forms,
)
from boxcov.predict.head.weights import (
    HeadWeights,
    StageDirections,
    StagePosterior,
    StageWeights,
)


def run_branches(
    head: HeadWeights, plan: Plan, rows: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Raw outputs (m, R), what the branches add, and the gradients at the stem's output.

    rows: (L + 1, C) the stem's output. The branches add a covariance (m, R, R), or derivatives
    (m, R, k), or None if the posterior does not contain them. The gradients are (R, m, T, C).
    """
    first, index = head.branches[0], head.branches[-1].output_index
    A = gather_inputs(rows, plan.stages[-1].input_rows, first)
    grams = None
    if first.posterior is not None and first.posterior.F is not None:
        alpha = append_remainder(A, A @ first.posterior.U, first.posterior)
        grams = gram_matrices(first.posterior, alpha, plan.stages[-1], plan)
    groups = [_run_group(head, plan, group, A, grams) for group in plan.groups]
    outputs = _restore_order([out for out, _, _ in groups], plan).flatten(1)[:, index]
    d = _restore_order([d for _, _, d in groups], plan, 1)
    parts = [added for _, added, _ in groups if added is not None]
    if not parts:
        return outputs, None, d
    added = _restore_order(parts, plan)  # (m, B, c, c or k)
    if not head.has_directions:  # outputs of two branches have no layer of the branches in common
        added = torch.diag_embed(added.permute(0, 2, 3, 1))  # (m, c, c, B, B)
        added = added.permute(0, 3, 1, 4, 2).flatten(3)[..., index]
    return outputs, added.flatten(1, 2)[:, index], d


def _restore_order(parts: list[Tensor], plan: Plan, dim: int = 0) -> Tensor:
    """Join the results of the groups in the order of the boxes, which a single group keeps."""
    if len(parts) == 1:
        return parts[0]
    order = torch.cat([group.boxes for group in plan.groups]).argsort()
    return torch.cat(parts, dim).index_select(dim, order)


def _run_group(
    head: HeadWeights, plan: Plan, group: Group, A: Tensor, grams: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Raw outputs (g, B, c), what the layers add (g, B, c, c or k), and gradients (R, g, T, C).

    A (L + 1, n_in): the inputs of the first stage. grams (u, S, T T): its Gram matrices.
    """
    cells = plan.stages[-1]
    stages = [stage.select(group.kinds) for stage in head.branches]
    x, cache = _run_first_stage(stages[0], cells.rows_of(group.members), A, cells.inside)
    caches = [cache]
    for stage in stages[1:]:
        x, cache = _run_later_stage(stage, x)
        caches.append(cache)
    outputs, c = x.squeeze(3), x.shape[-1]  # (G, B, n, c)
    d = torch.eye(c, dtype=x.dtype, device=x.device).view(c, 1, 1, c)
    d = d.expand(*x.shape[:2], c, *x.shape[2:])  # (G, B, c, n, T, n_out)
    total: Tensor | None = None
    for number in reversed(range(len(stages))):
        stage, cache = stages[number], caches[number]
        d = d * cache.slope.unsqueeze(2)
        added: Tensor | None = None
        if stage.directions is not None:
            added = _branch_derivatives(stage.directions, cache.alpha, d)
        elif stage.posterior is not None:
            K = (
                _own_kernels(stage.posterior, cache.alpha)
                if grams is None or number
                else _shared_kernels(stage.posterior, grams, plan, group)
            )
            added = _branch_covariance(stage.posterior, K, d)
        total = added if total is None else total if added is None else total + added
        if number:
            d = backpropagate(d, stage.W, stage)
    last = stages[-1]
    d = d.flatten(1, 2)[:, last.output_index]  # padded outputs are dropped: (G, R, n, T, n_out)
    d = backpropagate(d, stages[0].W[:, last.branch_index], stages[0])
    d = d.transpose(0, 1).flatten(1, 2).index_select(1, group.slot)
    by_box = outputs.transpose(1, 2).flatten(0, 1)[group.slot]
    total = None if total is None else total.transpose(1, 2).flatten(0, 1)[group.slot]
    return by_box, total, d


def _run_first_stage(
    stage: StageWeights, rows: Tensor, A: Tensor, inside: Tensor | None
) -> tuple[Tensor, StageCache]:
    """Outputs (G, B, n, T, n_out) of the first stage, from inputs A (L + 1, n_in).

    rows (G, n, T): those of A that belong to each box. inside: see ``Cells``.
    """
    (G, n, T), B = rows.shape, stage.W.shape[1]
    own = A.index_select(0, rows.flatten()).view(G, n * T, -1)

    def by_branch(product: Tensor) -> Tensor:  # (G, n T, B columns) to (G, B, n, T, columns)
        return product.view(G, n, T, B, -1).permute(0, 3, 1, 2, 4)

    alpha = None
    if stage.directions is not None:
        alpha = by_branch(own @ stage.directions.eta.transpose(1, 2).flatten(2))
    elif stage.posterior is not None and stage.posterior.F is None:
        U = stage.posterior.U
        alpha = own @ U if U.dim() == 2 else own.unsqueeze(1) @ U
        alpha = alpha.view(G, -1, n, T, U.shape[-1])
    y = by_branch(linear_outputs(own, stage.W.transpose(1, 2).flatten(2), stage))
    scale, shift = stage.scale[:, :, None, None], stage.shift[:, :, None, None]
    h, slope = apply_norm_and_activation(y, scale, shift, stage)
    on_map = (rows < len(A) - 1) if inside is None else inside[:, 0][rows]
    on_map = on_map.view(G, 1, n, T, 1)
    return h * on_map, StageCache(alpha, slope * on_map)


def _run_later_stage(stage: StageWeights, x: Tensor) -> tuple[Tensor, StageCache]:
    """Outputs (G, B, n, T', n_out) of a later stage, from x (G, B, n, T, C)."""
    side, k = round(x.shape[3] ** 0.5), 2 * stage.reach + 1
    windows = x.unflatten(3, (side, side)).unfold(3, k, 1).unfold(4, k, 1)
    A = windows.movedim(5, 7).flatten(5).flatten(3, 4)  # (G, B, n, T', k k C)
    if stage.n_extra:
        extra = A.new_zeros(stage.n_extra)
        extra[: stage.has_bias] = 1
        A = torch.cat([A, extra.expand(*A.shape[:-1], -1)], -1)
    flat = A.flatten(2, 3)
    alpha = None if stage.basis is None else (flat @ stage.basis).view(*A.shape[:4], -1)
    y = linear_outputs(flat, stage.W, stage).view(*A.shape[:4], -1)
    scale, shift = stage.scale[:, :, None, None], stage.shift[:, :, None, None]
    h, slope = apply_norm_and_activation(y, scale, shift, stage)
    return h, StageCache(alpha, slope)


def _shared_kernels(posterior: StagePosterior, grams: Tensor, plan: Plan, group: Group) -> Tensor:
    """K_p (G, B, n, p, T, T) of the first stage, from the Gram matrices (u, S, T T) per cell."""
    assert posterior.F is not None
    (G, n), (_, B, p, _) = group.members.shape, posterior.F.shape
    T = round(grams.shape[-1] ** 0.5)
    centre = pad(plan.centre_of, (0, 1))[group.members]  # any for padding: its gradients are zero
    own = grams.index_select(0, centre.flatten()).view(G, n, -1, T * T)
    K = posterior.F.flatten(1, 2).unsqueeze(1) @ own  # (G, n, B p, T T)
    return K.view(G, n, B, p, T, T).transpose(1, 2)


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
    delta = pad_gradients(delta, K.shape[-1])  # (G, B, n, p, T, c)
    return quadratic_forms(K, delta)[..., :c, :c]


def _branch_derivatives(directions: StageDirections, alpha: Tensor | None, d: Tensor) -> Tensor:
    """What a stage adds (G, B, n, c, k), for d (G, B, c, n, T, n_out)."""
    assert alpha is not None  # (G, B, n, T, k n_out)
    moved: Tensor = alpha.unflatten(4, (directions.count, -1)).transpose(4, 5).flatten(3, 4)
    return d.transpose(2, 3).flatten(4) @ moved  # times (G, B, n, T n_out, k)
