"""Steps that the stem and the branches of a staged head share; notation as in ``covariance.py``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from boxcov._torch.precision import matrix_precision
from boxcov.predict.head.cells import Cells, Plan
from boxcov.predict.head.weights import StagePosterior, StageWeights, padding_to_four


@dataclass(frozen=True)
class StageCache:
    """What the backward pass needs of a stage's forward pass."""

    # inputs times U or the directions: (L + 1, columns), in the branches (G, B, n, T, columns)
    alpha: Tensor | None
    slope: Tensor  # derivative of norm and activation: (L + 1, n_out) or (G, B, n, T, n_out)


def gather_inputs(rows: Tensor, input_rows: Tensor, stage: StageWeights) -> Tensor:
    """Inputs A (L + 1, n_in) of a stage, from the rows (L' + 1, C) of the previous one.

    input_rows (L, k k): the rows that each cell reads. The last row of A is zero.
    """
    L, n = len(input_rows), input_rows.shape[1] * rows.shape[1]
    A = rows.new_empty(L + 1, n + stage.n_extra)
    if stage.n_extra:
        A[:-1, :n] = rows.index_select(0, input_rows.flatten()).view(L, n)
        A[:-1, n:] = 0
        if stage.has_bias:
            A[:-1, n] = 1
    else:  # without a copy
        torch.index_select(rows, 0, input_rows.flatten(), out=A[:-1].view(-1, rows.shape[1]))
    A[-1] = 0
    return A


def linear_outputs(A: Tensor, W: Tensor, stage: StageWeights) -> Tensor:
    """The layer's outputs ``A W``, as the network computes them.

    With directions always in float32, also where TF32 is allowed: the input of a ReLU near zero
    must keep its sign, since the error of a few directions does not average out.
    """
    if stage.directions is None or not A.is_cuda:
        return A @ W
    with matrix_precision("float32"):
        return A @ W


def apply_norm_and_activation(
    y: Tensor, scale: Tensor, shift: Tensor, stage: StageWeights
) -> tuple[Tensor, Tensor]:
    """The stage's outputs from its layers' outputs y, and their derivative in y."""
    z = torch.addcmul(shift, y, scale)
    if stage.activation is None:
        return z, scale.expand_as(z)
    if stage.activation in (torch.relu, F.relu):
        positive = z > 0
        return z * positive, positive * scale
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        h = stage.activation(z)
        (slope,) = torch.autograd.grad(h, z, torch.ones_like(h))
    return h.detach(), slope * scale


def append_remainder(A: Tensor, alpha: Tensor, posterior: StagePosterior) -> Tensor:
    """``[A U, A - A U U^T]`` (L + 1, kept + n_in) with a remainder, else ``A U``."""
    if not posterior.has_remainder:
        return alpha
    return torch.cat([alpha, A - alpha @ posterior.U.T], 1)


def gram_matrices(posterior: StagePosterior, alpha: Tensor, cells: Cells, plan: Plan) -> Tensor:
    """``alpha diag(h[s]) alpha^T`` (u, S, T T) per centre cell; without h, K_p with p for s.

    Where every box has its own cells, T counts the padding rows, too.
    """
    bands = posterior.bands or ((slice(0, alpha.shape[1]), posterior.variances[0, 0]),)
    rows = None if plan.centres is None else cells.box_rows[plan.centres]
    u, T = (len(cells.box_rows), cells.rows_per_box) if rows is None else rows.shape
    grams = []
    for q, h in bands:
        S, n = (1, q.stop - q.start) if h is None else h.shape
        starts = chunk_starts(u, S * T * n, alpha, plan.max_bytes)
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
    C = delta.flatten(-3, -2).transpose(-1, -2) @ (K @ delta).flatten(-3, -2)
    return (C + C.transpose(-1, -2)) / 2


def chunk_starts(count: int, size: int, like: Tensor, max_bytes: int) -> range:
    """Starts of chunks of ``count`` items with ``size`` numbers each, within ``max_bytes``."""
    return range(0, count, max(1, min(count, int(max_bytes // (size * like.element_size())))))


def pad_gradients(delta: Tensor, T: int) -> Tensor:
    """Zero-pad gradients (..., t, R) to T rows, as windows are; on a GPU also R, to fours."""
    return F.pad(delta, (0, padding_to_four(delta.shape[-1], delta), 0, T - delta.shape[-2]))


def backpropagate(d: Tensor, W: Tensor, stage: StageWeights) -> Tensor:
    """Gradients (..., T', n_in / taps) at a stage's input, from those (..., T, n_out) at ``A W``.

    W is (*lead, n_in, n_out), where ``lead`` are the first dimensions of d. T' cells are the larger
    window that the T cells read.
    """
    k = 2 * stage.reach + 1
    W = W[..., : W.shape[-2] - stage.n_extra, :].transpose(-1, -2)
    side = round(d.shape[-2] ** 0.5)
    taps = (d.flatten(W.dim() - 2, -2) @ W).view(*d.shape[:-2], side, side, k * k, -1)
    return fold_gradients(taps, as_product=d.is_cuda)


def fold_gradients(taps: Tensor, as_product: bool) -> Tensor:
    """Sum the gradients of the taps of all cells (..., side, side, k k, C) over the larger window.

    Returns (..., s s, C), s = side + k - 1. It is ``torch.nn.functional.fold`` with the channels
    last. as_product: as one product with ones and zeros, a single launch on a GPU.
    """
    *lead, side, _, n_taps, C = taps.shape
    k = round(n_taps**0.5)
    if side == 1:
        return taps.view(*lead, n_taps, C)
    if as_product:
        flat = taps.view(-1, side * side * n_taps, C)
        fold = _fold_matrix(side, k, taps.dtype, taps.device)
        return torch.bmm(fold.expand(len(flat), -1, -1), flat).view(*lead, -1, C)
    out = taps.new_zeros(*lead, side + k - 1, side + k - 1, C)
    for tap in range(n_taps):
        y, x = divmod(tap, k)
        out[..., y : y + side, x : x + side, :] += taps[..., tap, :]
    return out.flatten(-3, -2)


@lru_cache(maxsize=32)
def _fold_matrix(side: int, k: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(s s, side side k k) of ones and zeros: the cell of the larger window that a tap belongs to.

    >>> _fold_matrix(2, 3, torch.float32, torch.device("cpu")).sum(1).view(4, 4)
    tensor([[1., 2., 2., 1.],
            [2., 4., 4., 2.],
            [2., 4., 4., 2.],
            [1., 2., 2., 1.]])
    """
    s = side + k - 1
    row = torch.arange(side).view(-1, 1, 1, 1) + torch.arange(k).view(1, 1, -1, 1)
    column = torch.arange(side).view(1, -1, 1, 1) + torch.arange(k).view(1, 1, 1, -1)
    cell = (row * s + column).flatten()
    return (cell == torch.arange(s * s).unsqueeze(1)).to(device, dtype)
