"""The exact covariance of all boxes of a frame through a staged head, in a few products.

Let A (T, n_in) be the inputs of a layer at the T cells that a box depends on, and D_j (T, n_out)
the gradient of the box's raw output j at the layer's outputs. In the eigenbasis of the posterior,
with variances v (n_out, n_in), ``G_j = V^T D_j^T A U``, and the layer adds

    C[j, j'] = sum over p, q of v[p, q] G_j[p, q] G_j'[p, q].

With ``alpha = A U`` and ``delta_j = D_j V`` the sum over q can be taken first:

    C[j, j'] = sum over p of delta_j[:, p]^T K_p delta_j'[:, p],
    K_p = alpha diag(v[p]) alpha^T                                  (T, T).

K_p does not depend on j. For separable variances ``v[p, q] = sum over s of F[p, s] h[s, q]``
(``separable_variances.py``) it is a combination of a few Gram matrices,

    K_p = sum over s of F[p, s] alpha diag(h[s]) alpha^T,

which all branches and all boxes at the same cell share. The steps are:

1. forward, stage by stage: A, alpha, the outputs, and the slope of norm and activation;
2. backward, from the raw outputs: D_j, delta_j, and what each layer adds;
3. the boxes' covariance ``J C J^T`` with the Jacobian J of the decoding (``decode_result``).

For directions eta_i instead of a posterior, ``alpha = A eta_i``, and the layer adds the directional
derivatives ``sum over cells and outputs of D_j * alpha``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from boxcov.predict.head.cells import Cells, Group, Plan, backpropagate, project, window_products
from boxcov.predict.head.weights import (
    HeadWeights,
    StagePosterior,
    StageWeights,
    padding_to_four,
)

# alpha, and the slope of norm and activation, which step 2 needs of a stage: (L + 1, columns) and
# (L + 1, n_out), in the branches (G, B, n, T, columns or n_out)
StageCache = tuple[Tensor | None, Tensor]


def head_covariance(
    head: HeadWeights, plan: Plan, rows: Tensor, tangents: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Steps 1 and 2: covariance (m, R, R) of the raw outputs of all boxes, and the outputs (m, R).

    With directions in ``head`` it returns the directional derivatives (m, R, k) in place of the
    covariance.

    rows: features (P + 1, C) of the cells that the boxes depend on, from the function that made
        ``plan``.
    tangents: (k, batch, C, height, width) of the feature map, if it depends on posterior weights;
        the third result is then the derivatives (m, R, k) along them, else None.
    """
    caches = []
    for stage, cells in zip(head.stem, plan.stages):
        y, cache = _run_stem_stage(stage, cells, rows)
        caches.append((rows, *cache))
        rows = y
    outputs, total, d = _run_branches(head, plan, rows)
    above = zip(head.stem[::-1], plan.stages[-2::-1], caches[::-1])
    for stage, cells, (inputs, alpha, slope) in above:
        d = d * cells.per_box(slope)  # (R, m, T, n_out)
        if stage.posterior is not None and alpha is not None:
            grams = _gram_matrices(stage.posterior, alpha, inputs, cells, plan)
            total = _plus(total, _stem_covariance(stage.posterior, grams, d, plan))
        elif stage.directions is not None and alpha is not None:
            total = _plus(total, _stem_derivatives(alpha, d, cells))
        if stage is not head.stem[0]:
            d = backpropagate(d, stage.W[0, 0], stage)
    assert total is not None
    below = None if tangents is None else _derivatives_below(head.stem[0], plan, d, tangents)
    return total, outputs, below


def _run_stem_stage(stage: StageWeights, cells: Cells, rows: Tensor) -> tuple[Tensor, StageCache]:
    """Step 1 for the stem: the outputs (L + 1, n_out) of a stage and what step 2 needs of it."""
    A = cells.gather(rows, stage.has_bias, stage.n_extra)
    alpha = None
    if stage.posterior is not None:
        alpha = project(stage.posterior, A, rows, cells)
    elif stage.directions is not None:
        alpha = A @ stage.directions[0, 0].flatten(1)
    y = stage.product(A, stage.W[0, 0])
    h, slope = (t[0, 0] for t in stage.activate(y[None, None]))
    if cells.inside is not None:
        return h * cells.inside, (alpha, slope * cells.inside)
    h[-1], slope[-1] = 0, 0
    return h, (alpha, slope)


def _stem_covariance(posterior: StagePosterior, grams: Tensor, d: Tensor, plan: Plan) -> Tensor:
    """Step 2: what a stage of the stem adds (m, R, R), for gradients d (R, m, T, n_out).

    grams (u, S, T T): the stage's Gram matrices.
    """
    R, m, _, n_out = d.shape
    T = round(grams.shape[-1] ** 0.5)
    delta = (d.flatten(0, 2) @ posterior.V[0, 0]).view(d.shape)
    delta = _arrange_gradients(delta.permute(1, 3, 2, 0), T)  # (m, p, T, R)
    C = delta.new_empty(m, R, R)
    starts = plan.chunks(m, n_out * T * T, delta)
    for i in starts:
        part = slice(i, i + starts.step)
        K = grams[part] if plan.centres is None else grams.index_select(0, plan.centre_of[part])
        K = K if posterior.F is None else posterior.F[0, 0] @ K
        K = K.view(-1, n_out, T, T)
        C[part] = _quadratic_forms(K, delta[part])[..., :R, :R]
    return C


def _stem_derivatives(alpha: Tensor, d: Tensor, cells: Cells) -> Tensor:
    """Step 2: what a stage of the stem adds (m, R, k), for d (R, m, T, n_out)."""
    moved: Tensor = cells.per_box(alpha).unflatten(2, (-1, d.shape[3]))  # (m, T, k, n_out)
    return d.transpose(0, 1).flatten(2) @ moved.transpose(2, 3).flatten(1, 2)


def _derivatives_below(stage: StageWeights, plan: Plan, d: Tensor, tangents: Tensor) -> Tensor:
    """Derivatives (m, R, k) along tangents (k, batch, C, height, width) of the feature map.

    stage: the first one; d (R, m, T, n_out): the gradients at its layer's outputs.
    """
    cells, (k, _, C) = plan.stages[0], tangents.shape[:3]
    rows = tangents.permute(0, 1, 3, 4, 2).reshape(k, -1, C)  # no copy if channels are last
    outside = cells.input_rows == len(plan.map_cells)
    if plan.outside is not None:
        outside = plan.outside[cells.input_rows]
    read = torch.cat([plan.map_cells, plan.map_cells.new_zeros(1)])[cells.input_rows]  # (L, taps)
    W = stage.W[0, 0][: C * read.shape[1]].to(tangents.dtype)
    moved = d.new_zeros(k, len(read) + 1, W.shape[1])
    starts = plan.chunks(k, read.numel() * C, tangents) if d.is_cuda else range(k)
    for i in starts:
        part = slice(i, i + starts.step)
        inputs = rows[part].index_select(1, read.flatten()).view(-1, *read.shape, C)
        inputs = inputs.masked_fill_(outside.unsqueeze(2), 0).flatten(2)
        moved[part, :-1] = (inputs @ W).to(d.dtype)
    moved = cells.per_box(moved).flatten(2).permute(1, 2, 0)  # (m, T n_out, k)
    return d.transpose(0, 1).flatten(2) @ moved


# branches: boxes are arranged by kind, (G rows of one kind each, B branches, n boxes, ...)


def _run_branches(
    head: HeadWeights, plan: Plan, rows: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Raw outputs (m, R), what the branches add, and the gradients at the stem's output.

    rows: (L + 1, C) the stem's output. The branches add a covariance (m, R, R), or derivatives
    (m, R, k), or None if the posterior does not contain them. The gradients are (R, m, T, C).
    """
    first, index = head.branches[0], head.output_index
    A = plan.stages[-1].gather(rows, first.has_bias, first.n_extra)
    grams = None
    if first.posterior is not None and first.posterior.F is not None:
        cells = plan.stages[-1]
        alpha = project(first.posterior, A, rows, cells)
        grams = _gram_matrices(first.posterior, alpha, rows, cells, plan)
    groups = [_run_group(head, plan, group, A, grams) for group in plan.groups]
    outputs = _join([out for out, _, _ in groups]).flatten(1)[:, index]
    d = _join([d for _, _, d in groups], 1)
    parts = [added for _, added, _ in groups if added is not None]
    if not parts:
        return outputs, None, d
    added = _join(parts)  # (m, B, c, c or k)
    if not head.has_directions:  # outputs of two branches have no layer of the branches in common
        added = torch.diag_embed(added.permute(0, 2, 3, 1))  # (m, c, c, B, B)
        added = added.permute(0, 3, 1, 4, 2).flatten(3)[..., index]
    return outputs, added.flatten(1, 2)[:, index], d


def _join(parts: list[Tensor], dim: int = 0) -> Tensor:
    """The results of the groups, one after the other; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _run_group(
    head: HeadWeights, plan: Plan, group: Group, A: Tensor, grams: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Raw outputs (g, B, c), what the layers add (g, B, c, c or k), and gradients (R, g, T, C).

    A (L + 1, n_in): the inputs of the first stage. grams (u, S, T T): its Gram matrices.
    """
    stages = [stage.select(group.kinds) for stage in head.branches]
    x, caches = _run_forward(stages, plan.stages[-1], group, A)
    shared = None if grams is None else partial(_shared_kernels, grams, plan, group)
    total, d = _run_backward(stages, caches, x, shared)
    d = d.flatten(1, 2)[:, head.output_index]  # padded outputs are dropped: (G, R, n, T, n_out)
    d = backpropagate(d, stages[0].W[:, head.branch_index], stages[0])
    d = d.transpose(0, 1).flatten(1, 2)
    d = d if group.slot is None else d.index_select(1, group.slot)

    def by_box(values: Tensor) -> Tensor:  # (G, B, n, ...) to (g, B, ...)
        own = values.transpose(1, 2).flatten(0, 1)
        return own if group.slot is None else own[group.slot]

    return by_box(x.squeeze(3)), None if total is None else by_box(total), d


def _run_forward(
    stages: list[StageWeights], cells: Cells, group: Group, A: Tensor
) -> tuple[Tensor, list[StageCache]]:
    """Step 1 for the branches: raw outputs (G, B, n, 1, c), and what step 2 needs of each stage."""
    x, cache = _run_first_stage(stages[0], cells.rows_of(group.members), A, cells.inside)
    caches = [cache]
    for stage in stages[1:]:
        x, cache = _run_later_stage(stage, x)
        caches.append(cache)
    return x, caches


def _run_backward(
    stages: list[StageWeights],
    caches: list[StageCache],
    x: Tensor,
    shared: Callable[[StagePosterior], Tensor] | None,
) -> tuple[Tensor | None, Tensor]:
    """Step 2 for the branches: what the layers add (G, B, n, c, c or k), and the gradients.

    These are (G, B, c, n, T, n_out) at the first layer's outputs. x (G, B, n, 1, c): the raw
    outputs. shared: K_p of the first stage, where boxes share Gram matrices.
    """
    c = x.shape[-1]
    d = torch.eye(c, dtype=x.dtype, device=x.device).view(c, 1, 1, c)
    d = d.expand(*x.shape[:2], c, *x.shape[2:])
    total: Tensor | None = None
    for number in reversed(range(len(stages))):
        stage, (alpha, slope) = stages[number], caches[number]
        d = d * slope.unsqueeze(2)
        if stage.directions is not None:
            total = _plus(total, _branch_derivatives(alpha, d))
        elif stage.posterior is not None:
            if number or shared is None:
                K = _own_kernels(stage.posterior, alpha)
            else:
                K = shared(stage.posterior)
            total = _plus(total, _branch_covariance(stage.posterior, K, d))
        if number:
            d = backpropagate(d, stage.W, stage)
    return total, d


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
        alpha = by_branch(own @ stage.directions.transpose(1, 2).flatten(2))
    elif stage.posterior is not None and stage.posterior.F is None:
        U = stage.posterior.U
        alpha = own @ U if U.dim() == 2 else own.unsqueeze(1) @ U
        alpha = alpha.view(G, -1, n, T, U.shape[-1])
    h, slope = stage.activate(by_branch(stage.product(own, stage.W.transpose(1, 2).flatten(2))))
    on_map = (rows < len(A) - 1) if inside is None else inside[:, 0][rows]
    on_map = on_map.view(G, 1, n, T, 1)
    return h * on_map, (alpha, slope * on_map)


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
    basis = stage.posterior.U if stage.posterior is not None else None
    basis = stage.directions.flatten(3) if stage.directions is not None else basis
    alpha = None if basis is None else (flat @ basis).view(*A.shape[:4], -1)
    h, slope = stage.activate(stage.product(flat, stage.W).view(*A.shape[:4], -1))
    return h, (alpha, slope)


def _shared_kernels(grams: Tensor, plan: Plan, group: Group, posterior: StagePosterior) -> Tensor:
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
    delta = _arrange_gradients(delta, K.shape[-1])  # (G, B, n, p, T, c)
    return _quadratic_forms(K, delta)[..., :c, :c]


def _branch_derivatives(alpha: Tensor | None, d: Tensor) -> Tensor:
    """What a stage adds (G, B, n, c, k), for d (G, B, c, n, T, n_out)."""
    assert alpha is not None  # (G, B, n, T, k n_out)
    moved: Tensor = alpha.unflatten(4, (-1, d.shape[5])).transpose(4, 5).flatten(3, 4)
    return d.transpose(2, 3).flatten(4) @ moved  # times (G, B, n, T n_out, k)


def _gram_matrices(
    posterior: StagePosterior, alpha: Tensor, inputs: Tensor, cells: Cells, plan: Plan
) -> Tensor:
    """``alpha diag(h[s]) alpha^T`` (u, S, T T) per centre cell; without h, K_p with p for s.

    Where every box has its own cells, T counts the padding rows, too.

    inputs (L' + 1, C): the rows that ``cells`` read.
    """
    bands = posterior.bands or ((slice(0, alpha.shape[1]), posterior.variances[0, 0]),)
    has_all = not posterior.has_remainder or alpha.shape[1] > posterior.U.shape[1]
    bands = bands if has_all else bands[:-1]
    rows = None if plan.centres is None else cells.box_rows[plan.centres]
    u, T = (len(cells.box_rows), cells.rows_per_box) if rows is None else rows.shape
    grams = []
    for q, h in bands:
        S, n = (1, q.stop - q.start) if h is None else h.shape
        starts = plan.chunks(u, S * T * n, alpha)
        gram = alpha.new_empty(u, T, S * T)
        buffer = alpha.new_empty(0 if h is None else starts.step, S, T, n)
        for i in starts:
            if rows is None:
                left = alpha[i * T : min(i + starts.step, u) * T, q].unflatten(0, (-1, T))
            else:
                own = rows[i : i + starts.step].flatten()
                left = alpha[:, q].index_select(0, own).view(-1, T, n)
            right = left
            if h is not None:
                right = torch.mul(left.unsqueeze(1), h.unsqueeze(1), out=buffer[: len(left)])
                right = right.flatten(1, 2)
            # the longer side last: a CPU is half as fast the other way round
            torch.bmm(left, right.transpose(1, 2), out=gram[i : i + starts.step])
        grams.append(gram.view(u, T, S, T).transpose(1, 2))
    if rows is not None and cells.windows is not None and not has_all:
        own = alpha.index_select(0, rows.flatten()).view(u, T, -1)
        gram = torch.baddbmm(window_products(inputs, cells.windows, T), own, own.mT, alpha=-1)
        grams.append(gram.unsqueeze(1))
    return torch.cat(grams, 1).view(u, -1, T * T)


def _plus(total: Tensor | None, added: Tensor) -> Tensor:
    """The sum of what layers add; None before the first of them."""
    return added if total is None else total + added


def _quadratic_forms(K: Tensor, delta: Tensor) -> Tensor:
    """``sum over p of delta^T K_p delta`` (..., R, R), K (..., p, T, T), delta (..., p, T, R)."""
    if delta.is_cuda:
        C = delta.flatten(-3, -2).transpose(-1, -2) @ (K @ delta).flatten(-3, -2)
    else:  # as in ``_gram_matrices``, the longer side last
        rows = delta.movedim(-1, -3)  # (..., R, p, T)
        C = rows.flatten(-2) @ (rows.transpose(-2, -3) @ K).transpose(-2, -3).flatten(-2).mT
    return (C + C.transpose(-1, -2)) / 2


def _arrange_gradients(delta: Tensor, T: int) -> Tensor:
    """Gradients (..., p, t, R) in the order of memory that ``_quadratic_forms`` needs.

    They are zero-padded to T rows, as windows are, and on a GPU R to fours.
    """
    sizes = (0, padding_to_four(delta.shape[-1], delta), 0, T - delta.shape[-2])
    if delta.is_cuda:
        return pad(delta, sizes).contiguous()
    delta = pad(delta, sizes) if any(sizes) else delta
    return delta.movedim(-1, -3).contiguous().movedim(-3, -1)
