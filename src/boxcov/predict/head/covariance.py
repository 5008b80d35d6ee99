"""The exact covariance of all boxes of a frame through a staged head, as a handful of products.

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
3. the boxes' covariance ``J C J^T`` with the Jacobian J of the decoding (``decode_jacobian``).

For directions eta_i instead of a posterior, ``alpha = A eta_i``, and the layer adds the directional
derivatives ``sum over cells and outputs of D_j * alpha``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from boxcov.predict.head.branches import run_branches
from boxcov.predict.head.cells import Cells, Plan
from boxcov.predict.head.products import (
    StageCache,
    append_remainder,
    apply_norm_and_activation,
    backpropagate,
    chunk_starts,
    gather_inputs,
    gram_matrices,
    linear_outputs,
    pad_gradients,
    quadratic_forms,
)
from boxcov.predict.head.weights import HeadWeights, StageDirections, StagePosterior, StageWeights


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
        rows, cache = _run_stem_stage(stage, cells, rows)
        caches.append(cache)
    outputs, total, d = run_branches(head, plan, rows)
    for stage, cells, cache in zip(head.stem[::-1], plan.stages[-2::-1], caches[::-1]):
        d = d * cells.per_box(cache.slope)  # (R, m, T, n_out)
        added = None
        if stage.posterior is not None and cache.alpha is not None:
            added = _stem_covariance(stage.posterior, cache.alpha, d, cells, plan)
        elif stage.directions is not None and cache.alpha is not None:
            added = _stem_derivatives(stage.directions, cache.alpha, d, cells)
        total = added if total is None else total if added is None else total + added
        if stage is not head.stem[0]:
            d = backpropagate(d, stage.W[0, 0], stage)
    assert total is not None
    below = None if tangents is None else _derivatives_below(head.stem[0], plan, d, tangents)
    return total, outputs, below


def decode_jacobian(outputs: Tensor, decode: Callable[[Tensor], Tensor]) -> Tensor:
    """Step 3: derivatives (m, D, R) of boxes in their raw outputs (m, R).

    >>> decode_jacobian(torch.zeros(3, 2), lambda x: 2 * x.exp())[0]
    tensor([[2., 0.],
            [0., 2.]])
    """
    with torch.enable_grad():
        outputs = outputs.detach().requires_grad_()
        boxes = decode(outputs)
        m, D = boxes.shape
        ones = torch.eye(D, dtype=boxes.dtype, device=boxes.device).unsqueeze(1).expand(D, m, D)
        (J,) = torch.autograd.grad(boxes, outputs, ones, is_grads_batched=True)  # (D, m, R)
    return J.transpose(0, 1)


def _run_stem_stage(stage: StageWeights, cells: Cells, rows: Tensor) -> tuple[Tensor, StageCache]:
    """Step 1 for the stem: the outputs (L + 1, n_out) of a stage and what step 2 needs of it."""
    A = gather_inputs(rows, cells.input_rows, stage)
    alpha, W = None, stage.W[0, 0]
    if stage.UW is not None:
        alpha, y = (A @ stage.UW).tensor_split([stage.UW.shape[1] - W.shape[1]], 1)
    else:
        alpha = None if stage.basis is None else A @ stage.basis
        y = linear_outputs(A, W, stage)
    if alpha is not None and stage.posterior is not None:
        alpha = append_remainder(A, alpha, stage.posterior)
    h, slope = apply_norm_and_activation(y, stage.scale[0, 0], stage.shift[0, 0], stage)
    if cells.inside is not None:
        return h * cells.inside, StageCache(alpha, slope * cells.inside)
    h[-1], slope[-1] = 0, 0
    return h, StageCache(alpha, slope)


def _stem_covariance(
    posterior: StagePosterior, alpha: Tensor, d: Tensor, cells: Cells, plan: Plan
) -> Tensor:
    """Step 2: what a stage of the stem adds (m, R, R), for gradients d (R, m, T, n_out)."""
    R, m, _, n_out = d.shape
    grams = gram_matrices(posterior, alpha, cells, plan)  # (u, S, T T)
    T = round(grams.shape[-1] ** 0.5)
    delta = (d.flatten(0, 2) @ posterior.V[0, 0]).view(d.shape)
    delta = pad_gradients(delta.permute(1, 3, 2, 0), T)  # (m, p, T, R)
    C = delta.new_empty(m, R, R)
    starts = chunk_starts(m, n_out * T * T, delta, plan.max_bytes)
    for i in starts:
        part = slice(i, i + starts.step)
        K = grams[part] if plan.centres is None else grams.index_select(0, plan.centre_of[part])
        K = K if posterior.F is None else posterior.F[0, 0] @ K
        K = K.view(-1, n_out, T, T)
        C[part] = quadratic_forms(K, delta[part].contiguous())[..., :R, :R]
    return C


def _stem_derivatives(
    directions: StageDirections, alpha: Tensor, d: Tensor, cells: Cells
) -> Tensor:
    """Step 2: what a stage of the stem adds (m, R, k), for d (R, m, T, n_out)."""
    _, m, T, n_out = d.shape
    moved: Tensor = cells.per_box(alpha).unflatten(2, (directions.count, n_out))
    moved = moved.transpose(2, 3).reshape(m, T * n_out, directions.count)
    return d.transpose(0, 1).flatten(2) @ moved


def _derivatives_below(stage: StageWeights, plan: Plan, d: Tensor, tangents: Tensor) -> Tensor:
    """Derivatives (m, R, k) along tangents (k, batch, C, height, width) of the feature map.

    stage: the first one; d (R, m, T, n_out): the gradients at its layer's outputs.
    """
    cells, (k, _, C) = plan.stages[0], tangents.shape[:3]
    rows = tangents.permute(0, 1, 3, 4, 2).reshape(k, -1, C)  # no copy if channels are last
    outside = (
        cells.input_rows == len(plan.map_cells)
        if plan.outside is None
        else plan.outside[cells.input_rows]
    )
    read = torch.cat([plan.map_cells, plan.map_cells.new_zeros(1)])[cells.input_rows]  # (L, taps)
    W = stage.W[0, 0][: C * read.shape[1]].to(tangents.dtype)
    moved = d.new_zeros(k, len(read) + 1, W.shape[1])
    starts = chunk_starts(k, read.numel() * C, tangents, plan.max_bytes) if d.is_cuda else range(k)
    for i in starts:
        part = slice(i, i + starts.step)
        inputs = rows[part].index_select(1, read.flatten()).view(-1, *read.shape, C)
        inputs = inputs.masked_fill_(outside.unsqueeze(2), 0).flatten(2)
        moved[part, :-1] = (inputs @ W).to(d.dtype)
    moved = cells.per_box(moved).flatten(2).permute(1, 2, 0)  # (m, T n_out, k)
    return d.transpose(0, 1).flatten(2) @ moved
