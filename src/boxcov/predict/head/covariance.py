"""What a layer of a staged head adds to the covariance of the boxes, in a few products.

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

which all branches and all boxes at the same cell share. These products are most of the work; on a
GPU Triton kernels take their place. The steps of a frame (``stages.py``) are:

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
from torch.nn.functional import conv2d, pad

from boxcov.predict.cuda.head_kernels import gram_matrices as gram_kernel
from boxcov.predict.cuda.head_kernels import quadratic_forms as form_kernel
from boxcov.predict.head.cells import Cells, Plan
from boxcov.predict.head.weights import StagePosterior, StageWeights, padding_to_four


def gram_matrices(posterior: StagePosterior, alpha: Tensor, cells: Cells, plan: Plan) -> Tensor:
    """``alpha diag(h[s]) alpha^T`` (u, S, T T) per centre cell; without h, K_p with p for s.

    Where every box has its own cells, T counts the padding rows, too.
    """
    if posterior.F is not None and posterior.uses_kernels:
        return gram_kernel(alpha, *posterior.terms, cells.rows_per_box)
    bands = posterior.bands or ((slice(0, alpha.shape[1]), posterior.variances[0, 0]),)
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
    return torch.cat(grams, 1).view(u, -1, T * T)


def quadratic_forms(K: Tensor, delta: Tensor) -> Tensor:
    """``sum over p of delta^T K_p delta`` (..., R, R), K (..., p, T, T), delta (..., p, T, R)."""
    if delta.is_cuda:
        C = delta.flatten(-3, -2).transpose(-1, -2) @ (K @ delta).flatten(-3, -2)
    else:  # as in ``gram_matrices``, the longer side last
        rows = delta.movedim(-1, -3)  # (..., R, p, T)
        C = rows.flatten(-2) @ (rows.transpose(-2, -3) @ K).transpose(-2, -3).flatten(-2).mT
    return (C + C.transpose(-1, -2)) / 2


def arrange_gradients(delta: Tensor, T: int) -> Tensor:
    """Gradients (..., p, t, R) in the order of memory that ``quadratic_forms`` needs.

    They are zero-padded to T rows, as windows are, and on a GPU R to fours.
    """
    sizes = (0, padding_to_four(delta.shape[-1], delta), 0, T - delta.shape[-2])
    if delta.is_cuda:
        return pad(delta, sizes).contiguous()
    delta = pad(delta, sizes) if any(sizes) else delta
    return delta.movedim(-1, -3).contiguous().movedim(-3, -1)


@dataclass(frozen=True)
class StemPass:
    """Step 1 of a stage of the stem, and what step 2 needs of it."""

    stage: StageWeights
    cells: Cells
    A: Tensor  # (L + 1, n_in) inputs
    outputs: Tensor  # (L + 1, n_out)
    slope: Tensor  # (L + 1, n_out) of norm and activation


def run_stem_stage(stage: StageWeights, cells: Cells, rows: Tensor) -> StemPass:
    """Step 1 for the stem."""
    A = cells.gather(rows, stage.has_bias, stage.n_extra)
    y = stage.product(A, stage.W[0, 0])
    h, slope = (t[0, 0] for t in stage.activate(y[None, None]))
    if cells.inside is not None:
        h, slope = h * cells.inside, slope * cells.inside
    else:
        h[-1], slope[-1] = 0, 0
    return StemPass(stage, cells, A, h, slope)


def products_of_inputs(done: StemPass, plan: Plan) -> Tensor | None:
    """What step 2 needs beside gradients: Gram matrices (u, S, T T), or ``A eta``; None: nothing.

    A layer without posterior and directions adds nothing.
    """
    stage = done.stage
    if stage.posterior is not None:
        return gram_matrices(stage.posterior, stage.posterior.project(done.A), done.cells, plan)
    return None if stage.directions is None else done.A @ stage.directions[0, 0].flatten(1)


def added_by_stem(done: StemPass, products: Tensor, d: Tensor, plan: Plan) -> Tensor:
    """Step 2: what a stage adds (m, R, R or k), for gradients d (R, m, T, n_out)."""
    posterior, (R, m, _, n_out) = done.stage.posterior, d.shape
    if posterior is None:  # sum the directional derivatives over cells and outputs
        moved: Tensor = done.cells.per_box(products).unflatten(2, (-1, n_out))  # (m, T, k, n_out)
        return d.transpose(0, 1).flatten(2) @ moved.transpose(2, 3).flatten(1, 2)
    T = round(products.shape[-1] ** 0.5)
    delta = (d.flatten(0, 2) @ posterior.V[0, 0]).view(d.shape)
    if posterior.F is not None and posterior.uses_kernels:
        boxes = plan.centre_of.unsqueeze(0)
        return form_kernel(products, posterior.F, delta[None, None], boxes)[0, 0]
    delta = arrange_gradients(delta.permute(1, 3, 2, 0), T)  # (m, p, T, R)
    C = delta.new_empty(m, R, R)
    starts = plan.chunks(m, n_out * T * T, delta)
    for i in starts:
        part = slice(i, i + starts.step)
        own = plan.centre_of[part]
        K = products[part] if plan.centres is None else products.index_select(0, own)
        K = K if posterior.F is None else posterior.F[0, 0] @ K
        C[part] = quadratic_forms(K.view(-1, n_out, T, T), delta[part])[..., :R, :R]
    return C


def derivatives_below(stage: StageWeights, plan: Plan, d: Tensor, tangents: Tensor) -> Tensor:
    """Derivatives (m, R, k) along tangents (k, batch, C, height, width) of the feature map.

    stage: the first one; d (R, m, T, n_out): the gradients at its layer's outputs.
    """
    cells, (k, _, C) = plan.stages[0], tangents.shape[:3]
    if plan.inside is not None:
        found = _convolve_windows(stage, plan, tangents).to(d.dtype)
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


def _convolve_windows(stage: StageWeights, plan: Plan, tangents: Tensor) -> Tensor:
    """Tangents (k, m, T, n_out) of the stage's outputs, of own cells, without a bias.

    tangents: (k, batch, C, height, width) of the feature map. Each cell of a window is read once,
    not once per tap of the kernel.
    """
    k, _, C = tangents.shape[:3]
    assert plan.inside is not None
    m = len(plan.stages[0].box_rows)
    side, taps = round((len(plan.map_cells) / m) ** 0.5), 2 * stage.reach + 1
    rows = tangents.permute(0, 1, 3, 4, 2).reshape(k, -1, C)  # no copy if channels are last
    W = stage.W[0, 0][: taps * taps * C].view(taps, taps, C, -1).permute(3, 2, 0, 1)
    W = W.to(tangents.dtype).contiguous(memory_format=torch.channels_last)
    outside, parts = ~plan.inside[:-1], []
    starts = plan.chunks(k, len(plan.map_cells) * C, tangents)
    for i in starts:
        inputs = rows[i : i + starts.step].index_select(1, plan.map_cells)
        inputs = inputs.masked_fill_(outside, 0).view(-1, side, side, C)
        out = conv2d(inputs.permute(0, 3, 1, 2), W)  # (k m, n_out, side', side')
        parts.append(out.permute(0, 2, 3, 1).flatten(1, 2).unflatten(0, (-1, m)))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
