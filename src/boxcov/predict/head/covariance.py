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
3. the boxes' covariance ``J C J^T`` with the Jacobian J of the decoding.

For directions eta_i instead of a posterior, ``alpha = A eta_i``, and the layer adds the directional
derivatives ``sum over cells and outputs of D_j * alpha``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from boxcov.head_stages import HeadStages
from boxcov.predict.cuda.head_kernels import has_kernels
from boxcov.predict.cuda.head_kernels import quadratic_forms as form_kernel
from boxcov.predict.cuda.side_stream import AT_ONCE, SideStream
from boxcov.predict.cuda.static_graph import Many
from boxcov.predict.head.branches import differentiate_branches, plus, run_branches
from boxcov.predict.head.cells import Cells, Plan, backpropagate
from boxcov.predict.head.gram import arrange_gradients, gram_matrices, project, quadratic_forms
from boxcov.predict.head.weights import HeadWeights, StagePosterior, StageWeights
from boxcov.predict.head.windows import convolve_windows
from boxcov.predict.linearize import field_gradients


def head_covariance(
    head: HeadWeights,
    plan: Plan,
    rows: Tensor,
    staged: HeadStages,
    tangents: Tensor | None = None,
    side: SideStream = AT_ONCE,
) -> Many:
    """Covariance (m, D, D) of the boxes by the head; with directions, derivatives (m, D, k).

    rows: features (P + 1, C) of the cells that the boxes depend on, from the function that made
        ``plan``.
    tangents: (k, batch, C, height, width) of the feature map, if it depends on posterior weights; a
        second result is then the derivatives (m, D, k) along them.
    side: where ``plan.groups`` are made. What the longest chain does not wait for runs there, too:
        the Gram matrices of the stem with the largest product, and the Jacobian.
    """
    stem = []
    for stage, cells in zip(head.stem, plan.stages):
        stem.append(_run_stem_stage(stage, cells, rows))
        rows = stem[-1].outputs
    side.join()
    with side.beside():
        known = [_without_gradients(done, plan) for done in stem]
    branches = run_branches(head, plan, rows)
    with side.beside():
        J = _decoding_jacobian(staged, branches.outputs)
    total, d = differentiate_branches(head, plan, branches)
    side.join()
    for done, of_stage in zip(reversed(stem), reversed(known)):
        d = d * done.cells.per_box(done.slope)  # (R, m, T, n_out)
        if of_stage is not None:
            total = plus(total, _stem_adds(done, of_stage, d, plan))
        if done is not stem[0]:
            d = backpropagate(d, done.stage.W[0, 0], done.stage)
    assert total is not None
    below = None if tangents is None else _derivatives_below(head.stem[0], plan, d, tangents)
    J = J.to(total.dtype)
    of_boxes = J @ total if head.has_directions else J @ total @ J.transpose(1, 2)
    return (of_boxes,) if below is None else (of_boxes, J @ below)


def _decoding_jacobian(staged: HeadStages, outputs: Tensor) -> Tensor:
    """Step 3: the Jacobian (m, D, R) of the boxes in the raw outputs (m, R)."""
    with torch.enable_grad():
        outputs = outputs.detach().requires_grad_()
        boxes = staged.decode(outputs, staged.row, staged.column)
    (J,) = field_gradients(boxes, [outputs])  # (D, m, R)
    assert J is not None
    return J.transpose(0, 1)


@dataclass(frozen=True)
class StemPass:
    """Step 1 of a stage of the stem, and what step 2 needs of it."""

    stage: StageWeights
    cells: Cells
    rows: Tensor  # (L' + 1, C) that the cells read
    A: Tensor  # (L + 1, n_in) inputs
    outputs: Tensor  # (L + 1, n_out)
    slope: Tensor  # (L + 1, n_out) of norm and activation


def _run_stem_stage(stage: StageWeights, cells: Cells, rows: Tensor) -> StemPass:
    """Step 1 for the stem."""
    A = cells.gather(rows, stage.has_bias, stage.n_extra)
    y = stage.product(A, stage.W[0, 0])
    h, slope = (t[0, 0] for t in stage.activate(y[None, None]))
    if cells.inside is not None:
        h, slope = h * cells.inside, slope * cells.inside
    else:
        h[-1], slope[-1] = 0, 0
    return StemPass(stage, cells, rows, A, h, slope)


def _without_gradients(done: StemPass, plan: Plan) -> Tensor | None:
    """What step 2 needs beside gradients: Gram matrices (u, S, T T), or ``A eta``; None: nothing.

    A layer without posterior and directions adds nothing.
    """
    stage = done.stage
    if stage.posterior is not None:
        alpha = project(stage.posterior, done.A, done.rows, done.cells)
        return gram_matrices(stage.posterior, alpha, done.rows, done.cells, plan)
    return None if stage.directions is None else done.A @ stage.directions[0, 0].flatten(1)


def _stem_adds(done: StemPass, known: Tensor, d: Tensor, plan: Plan) -> Tensor:
    """Step 2: what a stage adds (m, R, R or k), for gradients d (R, m, T, n_out)."""
    if done.stage.posterior is not None:
        return _stem_covariance(done.stage.posterior, known, d, plan)
    return _stem_derivatives(known, d, done.cells)


def _stem_covariance(posterior: StagePosterior, grams: Tensor, d: Tensor, plan: Plan) -> Tensor:
    """Step 2: what a stage of the stem adds (m, R, R), for gradients d (R, m, T, n_out).

    grams (u, S, T T): the stage's Gram matrices.
    """
    R, m, _, n_out = d.shape
    T = round(grams.shape[-1] ** 0.5)
    delta = (d.flatten(0, 2) @ posterior.V[0, 0]).view(d.shape)
    if posterior.F is not None and has_kernels(delta):
        boxes = plan.centre_of.unsqueeze(0)
        return form_kernel(grams, posterior.F, delta[None, None], boxes)[0, 0]
    delta = arrange_gradients(delta.permute(1, 3, 2, 0), T)  # (m, p, T, R)
    C = delta.new_empty(m, R, R)
    starts = plan.chunks(m, n_out * T * T, delta)
    for i in starts:
        part = slice(i, i + starts.step)
        K = grams[part] if plan.centres is None else grams.index_select(0, plan.centre_of[part])
        K = K if posterior.F is None else posterior.F[0, 0] @ K
        K = K.view(-1, n_out, T, T)
        C[part] = quadratic_forms(K, delta[part])[..., :R, :R]
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
    if plan.inside is not None:
        found = convolve_windows(stage, plan, tangents).to(d.dtype)
        return d.transpose(0, 1).flatten(2) @ found.flatten(2).permute(1, 2, 0)
    tangents = tangents.to(d.dtype)
    rows = tangents.permute(0, 1, 3, 4, 2).reshape(k, -1, C)  # no copy if channels are last
    outside = cells.input_rows == len(plan.map_cells)
    read = pad(plan.map_cells, (0, 1))[cells.input_rows]  # (L + 1, taps)
    W = stage.W[0, 0][: C * read.shape[1]]
    moved = d.new_empty(k, len(read), W.shape[1])
    for i in range(k):
        inputs = rows[i].index_select(0, read.flatten()).view(*read.shape, C)
        moved[i] = inputs.masked_fill_(outside.unsqueeze(2), 0).flatten(1) @ W
    moved = cells.per_box(moved).flatten(2).permute(1, 2, 0)  # (m, T n_out, k)
    return d.transpose(0, 1).flatten(2) @ moved
