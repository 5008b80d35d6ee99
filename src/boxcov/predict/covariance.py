"""Covariances of boxes: the exact one that a layer contributes, and that of samples.

In the eigenbasis, with a layer's inputs ``alpha = U^T a`` and gradients ``delta_j = V^T d_j`` of an
instance at T locations, the layer contributes

    C[j, j'] = sum over p, q of v[p, q] G_j[p, q] G_j'[p, q]
    G_j[p, q] = sum over t of delta_j[p, t] alpha[q, t]

Either G is formed, or, for few locations, ``K[p, t, t'] = sum over q of v[p, q] alpha[q, t]
alpha[q, t']``, which does not depend on j.
"""

from __future__ import annotations

import torch
from torch import Tensor

from boxcov._torch.layers import full_precision
from boxcov.posterior.kronecker_block import KroneckerBlock

MEMORY = 256 * 2**20  # bytes of intermediates at once
CACHE = 4 * 2**20  # on a CPU, so that they stay in its cache: 1.6 times faster at 100 boxes


@full_precision
def sample_covariance(A: Tensor) -> Tensor:
    """The centred sample covariance (m, D, D) of k columns (m, D, k): equations (16) and (17).

    >>> sample_covariance(torch.tensor([[[1.0, 2.0, 3.0]]]))
    tensor([[[1.]]])
    """
    A = A.contiguous()  # the result must not depend on strides
    A = A - A.mean(2, keepdim=True)
    return A @ A.transpose(1, 2) / (A.shape[2] - 1)


@full_precision
def layer_covariance(a: Tensor, d: Tensor, block: KroneckerBlock, variances: Tensor) -> Tensor:
    """Covariance (g, D, D) that one layer contributes.

    a: inputs (g, G, n_in, T), without the 1 of a bias. d: gradients (D, g, G, n_out, T).
    variances: (G, n_out, n_in).
    """
    D, g, _, n_out, T = d.shape
    if block.layer.bias is not None:
        a = torch.cat([a, a.new_ones(*a.shape[:2], 1, T)], 2)
    a, d = a.to(variances.dtype), d.to(variances.dtype)
    n_in = a.shape[2]
    by_pairs = T * T < D * T + D * D / 2
    numbers = a.shape[1] * (n_in * T * T if by_pairs else D * n_out * n_in)
    room = CACHE if a.device.type == "cpu" else MEMORY
    step = max(1, int(room // (numbers * variances.element_size())))
    a, d = rotate(a, block.Q.vectors), rotate(d, block.H.vectors)
    contract = _by_pairs if by_pairs else _by_gradients
    parts = [contract(a[i : i + step], d[:, i : i + step], variances) for i in range(0, g, step)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def rotate(x: Tensor, vectors: Tensor) -> Tensor:
    """``vectors^T x`` of x (..., G, n, T) and vectors (G, n, n), one product per group."""
    flat = x.movedim((-3, -2), (0, 1)).flatten(2)  # (G, n, ... T)
    out = vectors.transpose(1, 2) @ flat
    return out.reshape(*x.shape[-3:-1], *x.shape[:-3], x.shape[-1]).movedim((0, 1), (-3, -2))


def _by_gradients(alpha: Tensor, delta: Tensor, variances: Tensor) -> Tensor:
    G = delta @ alpha.transpose(-1, -2)  # (D, g, G, n_out, n_in)
    G = (G * variances.sqrt()).flatten(2).transpose(0, 1)  # (g, D, w)
    return G @ G.transpose(1, 2)


def _by_pairs(alpha: Tensor, delta: Tensor, variances: Tensor) -> Tensor:
    pairs = (alpha.unsqueeze(-1) * alpha.unsqueeze(-2)).flatten(3)  # (g, G, n_in, T T)
    K = (variances @ pairs).unflatten(3, (alpha.shape[3], -1))  # (g, G, n_out, T, T)
    weighted = (K @ delta.unsqueeze(-1)).squeeze(-1)  # (D, g, G, n_out, T)
    left, right = (x.flatten(2).transpose(0, 1) for x in (delta, weighted))  # (g, D, G n_out T)
    C = left @ right.transpose(1, 2)
    return (C + C.transpose(1, 2)) / 2
