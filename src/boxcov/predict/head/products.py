"""What the stages of a head are computed with, stem and branches alike; see ``stacked.py``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from boxcov.predict.cuda.graphs import matrix_precision
from boxcov.predict.head.cells import Cells, Plan
from boxcov.predict.head.weights import Drawn, Layers, Turned, missing


@dataclass(frozen=True)
class Passed:
    """What a stage leaves behind for the way back."""

    alpha: (
        Tensor | None
    )  # inputs in the eigenbasis, or times directions: (L + 1, n_in), or (G, B, n, T, n_in) in the branches
    slope: Tensor  # of norm and activation: (L + 1, C), or (G, B, n, T, C)


def pointwise(y: Tensor, scale: Tensor, shift: Tensor, layers: Layers) -> tuple[Tensor, Tensor]:
    """Norm and activation, and their derivative."""
    z = torch.addcmul(shift, y, scale)
    if layers.activation is None:
        return z, scale.expand_as(z)
    if layers.activation in (torch.relu, F.relu):
        on = z > 0
        return z * on, on * scale
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        h = layers.activation(z)
        (slope,) = torch.autograd.grad(h, z, torch.ones_like(h))
    return h.detach(), slope * scale


def contracted(K: Tensor, delta: Tensor) -> Tensor:
    """``sum over p of delta^T K_p delta`` (..., R, R), for K (..., p, T, T) and delta (..., p, T, R)."""
    right = K @ delta
    C = delta.flatten(-3, -2).transpose(-1, -2) @ right.flatten(-3, -2)
    return (C + C.transpose(-1, -2)) / 2


def chunks(count: int, size: int, like: Tensor, room: int) -> range:
    """Where to start anew so that ``size`` numbers for each of ``count`` items stay within ``room`` bytes."""
    return range(0, count, max(1, min(count, int(room // (size * like.element_size())))))


def gathered(rows: Tensor, table: Tensor, layers: Layers) -> Tensor:
    """Inputs (L + 1, n_in) of a layer: what each cell reads, tap by tap, and a row of zeros."""
    n = table.shape[1] * rows.shape[1]
    if not layers.behind:
        a = rows.new_empty(len(table) + 1, n)
        torch.index_select(rows, 0, table.flatten(), out=a[:-1].view(-1, rows.shape[1]))
        a[-1] = 0
        return a
    a = rows.new_zeros(len(table) + 1, n + layers.behind)
    a[:-1, :n] = rows.index_select(0, table.flatten()).view(len(table), -1)
    if layers.has_bias:
        a[:-1, n] = 1
    return a


def with_rest(a: Tensor, alpha: Tensor, turned: Turned) -> Tensor:
    """Inputs in the eigenbasis (L + 1, kept), and what the kept eigenvectors leave of them behind (L + 1, kept + n_in), if that counts."""
    return torch.cat([alpha, a - alpha @ turned.U.T], 1) if turned.rest else alpha


def outputs(a: Tensor, W: Tensor, layers: Layers) -> Tensor:
    """The layer's outputs ``a W``, as the network computes them.

    With directions always in float32, also where TF32 is allowed: an input of a ReLU near zero must
    keep its sign, since the error of a few directions does not average out.
    """
    if not isinstance(layers.turned, Drawn) or not a.is_cuda:
        return a @ W
    with matrix_precision("float32"):
        return a @ W


def filled(delta: Tensor, T: int) -> Tensor:
    """Gradients (..., T, R) filled up with zeros, as windows are; on a GPU R, too, to a multiple of four."""
    return F.pad(delta, (0, missing(delta.shape[-1], delta), 0, T - delta.shape[-2]))


def gram_matrices(turned: Turned, alpha: Tensor, cells: Cells, plan: Plan) -> Tensor:
    """``alpha diag(columns[s]) alpha^T`` (u, S, T T) over the cells that boxes see; every variance by itself if not separable.

    Where every box has cells of its own, with the rows that fill them up.
    """
    bands = turned.bands or ((slice(0, alpha.shape[1]), turned.variances[0, 0]),)
    at = None if plan.first is None else cells.at[plan.first]
    u, T = (len(cells.at), cells.each) if at is None else at.shape
    parts = []
    for q, columns in bands:
        S, n = (1, q.stop - q.start) if columns is None else columns.shape
        starts = chunks(u, S * T * n, alpha, plan.room)
        part = alpha.new_empty(u, T, S * T)
        weighed = alpha.new_empty(0 if columns is None else starts.step, S, T, n)
        for i in starts:
            if at is None:
                own = alpha[i * T : min(i + starts.step, u) * T, q].unflatten(0, (-1, T))
            else:
                own = alpha[:, q].index_select(0, at[i : i + starts.step].flatten()).view(-1, T, n)
            right = (
                own
                if columns is None
                else torch.mul(
                    own.unsqueeze(1), columns.unsqueeze(1), out=weighed[: len(own)]
                ).flatten(1, 2)
            )
            # the long side last: a CPU takes half as long again otherwise
            torch.bmm(own, right.transpose(1, 2), out=part[i : i + starts.step])
        parts.append(part.view(u, T, S, T).transpose(1, 2))
    return torch.cat(parts, 1).view(u, -1, T * T)


def back(d: Tensor, W: Tensor, layers: Layers) -> Tensor:
    """Gradients (..., T, n_out) at a stage's product, before its norm, as gradients at its input, over the larger window.

    W has the shape (*lead, n_in, n_out), with the first dimensions of d for ``lead``.
    """
    size = 2 * layers.reach + 1
    W = W[..., : W.shape[-2] - layers.behind, :].transpose(-1, -2)
    side = round(d.shape[-2] ** 0.5)
    spread = (d.flatten(W.dim() - 2, -2) @ W).view(*d.shape[:-2], side, side, size * size, -1)
    return folded(spread, by_product=d.is_cuda)


def folded(spread: Tensor, by_product: bool) -> Tensor:
    """What each tap of each cell adds (..., side, side, taps, C), summed up over the larger window (..., s s, C).

    by_product: as one product with ones and zeros, which is one launch on a GPU.
    """
    side, size, C = spread.shape[-3], round(spread.shape[-2] ** 0.5), spread.shape[-1]
    lead = spread.shape[:-4]
    if side == 1:
        return spread.view(*lead, size * size, C)
    if by_product:
        taps = spread.view(-1, side * side * size * size, C)
        ones = _where_taps_go(side, size, spread.dtype, spread.device)
        return torch.bmm(ones.expand(len(taps), -1, -1), taps).view(*lead, -1, C)
    out = spread.new_zeros(*lead, side + size - 1, side + size - 1, C)
    for tap in range(size * size):
        y, x = divmod(tap, size)
        out[..., y : y + side, x : x + side, :] += spread[..., tap, :]
    return out.flatten(-3, -2)


@lru_cache(maxsize=32)
def _where_taps_go(side: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(s s, cells taps) of ones and zeros: which of the larger window's cells each tap of each cell belongs to; one product instead of many sums.

    >>> _where_taps_go(2, 3, torch.float32, torch.device("cpu")).sum(1).view(4, 4)
    tensor([[1., 2., 2., 1.],
            [2., 4., 4., 2.],
            [2., 4., 4., 2.],
            [1., 2., 2., 1.]])
    """
    larger = side + size - 1
    row = torch.arange(side).view(-1, 1, 1, 1) + torch.arange(size).view(1, 1, -1, 1)
    column = torch.arange(side).view(1, -1, 1, 1) + torch.arange(size).view(1, 1, 1, -1)
    goes = (row * larger + column).flatten()
    return (goes == torch.arange(larger * larger).unsqueeze(1)).to(device, dtype)
