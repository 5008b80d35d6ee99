"""Gram matrices of the inputs of a stage, and the quadratic forms with them.

They are most of the work of an exact covariance (``covariance.py``). On a GPU Triton kernels take
the place of the products here.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from boxcov.predict.cuda.head_kernels import gram_matrices as gram_kernel
from boxcov.predict.cuda.head_kernels import has_kernels
from boxcov.predict.head.cells import Cells, Plan
from boxcov.predict.head.weights import StagePosterior, padding_to_four

# of a remainder in the squared norm of the inputs of a cell, if it may be a difference
_LEAST_SHARE = 0.03


def project(posterior: StagePosterior, A: Tensor, rows: Tensor, cells: Cells) -> Tensor:
    """alpha of inputs A (L + 1, n_in), which were read from rows (L' + 1, C).

    Without the remainder where its products are to be a difference, and are exact enough as one.
    """
    if cells.windows is not None:
        alpha = A @ posterior.U
        norms = rows.square().sum(1)[cells.input_rows].sum(1)  # (L + 1,), squared
        if bool((alpha.square().sum(1) <= (1 - _LEAST_SHARE) * norms).all()):
            return alpha
    return posterior.project(A)


def gram_matrices(
    posterior: StagePosterior, alpha: Tensor, inputs: Tensor, cells: Cells, plan: Plan
) -> Tensor:
    """``alpha diag(h[s]) alpha^T`` (u, S, T T) per centre cell; without h, K_p with p for s.

    Where every box has its own cells, T counts the padding rows, too.

    inputs (L' + 1, C): the rows that ``cells`` read.
    """
    if posterior.F is not None and has_kernels(alpha):
        return gram_kernel(alpha, *posterior.terms, cells.rows_per_box)
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


def window_products(rows: Tensor, windows: Tensor, T: int) -> Tensor:
    """Products (u, T, T) of the inputs of a stage at the T cells of u windows, without bias.

    A product of two inputs is a sum over taps of products of two rows. rows (L' + 1, C), windows
    (u, s s): as in ``Cells``.
    """
    (u, n), side = windows.shape, round(T**0.5)
    s = round(n**0.5)
    own = rows.index_select(0, windows.flatten()).view(u, n, -1)
    pairs = (own @ own.mT).permute(1, 2, 0).contiguous().view(s, s, s, s, u)  # fast sums over u
    total = pairs.new_zeros(side, side, side, side, u)
    for y in range(s - side + 1):
        for x in range(s - side + 1):
            total += pairs[y : y + side, x : x + side, y : y + side, x : x + side]
    return total.view(T, T, u).permute(2, 0, 1)


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
