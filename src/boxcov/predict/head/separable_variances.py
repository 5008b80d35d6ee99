"""Posterior variances as short sums of products, which makes the exact covariance cheap.

The variance of a layer's weight in the eigenbasis is ``v[p, q] = 1 / (tau + n m_p l_q)``. As a
function of p it is ``1 / (n m_p)`` times ``1 / (a + l_q)`` at ``a = tau / (n m_p)``. A function
``1 / (a + l)`` equals, to rounding, a combination of a few functions ``1 / (a + beta_s)``. So

    v[p, q] = sum over s of F[p, s] h[s, q],    F[p, s] = 1 / (tau + n m_p beta_s),

and layers that share the input factor share h. The q are cut into bands, because a narrow range of
l needs few terms: most eigenvalues of a factor are so small that two or three terms are enough.
Where the smallest eigenvalues are negligible against the prior, or equal, as those of a compressed
posterior are, one variance serves all of them. Their eigenvectors are then not needed: they enter
only through the remainder of an input after its projection on the other eigenvectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log, log10, pi

import torch
from torch import Tensor

from boxcov.posterior.posterior import Posterior

_GRID_SIZE = 60  # values of a at which the error is measured
_MAX_TERMS = 30  # per band
_EDGES = tuple(10 ** (i / 2) for i in range(-6, 13))  # of bands, in multiples of the smallest a
# cost of a term besides its columns, in columns: summing terms, and inefficient narrow products
_TERM_COST = 80


@dataclass(frozen=True)
class Separable:
    """Variances ``v[p, q] = sum over s of F[p, s] h[s, q]``, with a separate set of s per band."""

    F: tuple[Tensor, ...]  # (n_out, S) per layer, band after band; with merged q, theirs is last
    bands: tuple[tuple[slice, Tensor], ...]  # q, and h (S of the band, number of q)
    n_merged: int = 0  # the first q that share one variance per p


def fit_separable(
    posterior: Posterior, names: list[str], tolerance: float, merge: bool = False
) -> Separable | None:
    """Represent the variances of layers that share one input factor in as few terms as possible.

    Return None if the posterior has no such form or needs too many terms.

    tolerance: largest relative error of a variance.
    merge: let the smallest eigenvalues share one variance, if they are more than half.
    """
    blocks = [posterior.blocks[name] for name in names]
    if any(not block.is_kronecker for block in blocks):  # EKFAC variances have no separable form
        return None
    if posterior.form == "paper":
        return _kronecker(posterior, names)
    l = blocks[0].Q.values[0].double()
    curvatures = [
        (posterior.n_data * block.H.values[0].double(), posterior.tau(name))
        for name, block in zip(names, blocks)
    ]  # n m, and tau
    a = torch.cat([tau / nm.clamp(min=1e-300) for nm, tau in curvatures])
    low, top = float(a.min()), float(l.max())
    if not 0 < low < 1e100 or not top > 0:  # no prior, or no curvature at all
        return None
    high = min(float(a.max()), 1e4 * max(top, low))  # 1 / (a + l) is flat beyond
    grid = _geometric(low, max(high, 1.01 * low), _GRID_SIZE, l)
    n_merged = _count_mergeable(l, low, tolerance) if merge else 0
    dtype, bands, nodes = blocks[0].H.values.dtype, [], []
    for part in _cut_bands(l[n_merged:], grid, tolerance):
        band = slice(part.start + n_merged, part.stop + n_merged)
        bottom = float(l[band.start]) if band.start else 0.0
        terms = _fewest_terms((bottom, float(l[band.stop - 1])), l[band], grid, tolerance)
        if terms is None:
            return None
        h, beta = terms
        bands.append((band, h.T.to(dtype).contiguous()))
        nodes.append(beta)
    if n_merged:  # their middle represents them all
        nodes.append((l[:1].clamp(min=0) + l[n_merged - 1 : n_merged]) / 2)
    beta = torch.cat(nodes)
    F = tuple((1 / (tau + nm.unsqueeze(1) * beta)).to(dtype) for nm, tau in curvatures)
    return Separable(F, tuple(bands), n_merged)


def _kronecker(posterior: Posterior, names: list[str]) -> Separable:
    """The paper's form, the inverse of a Kronecker product: one term."""
    blocks = [posterior.blocks[name] for name in names]
    dtype, jitter = blocks[0].H.values.dtype, posterior.jitter
    h = 1 / blocks[0].Q.jittered(jitter)[0].double()
    F = [1 / block.H.jittered(jitter)[0].double() for block in blocks]
    band = slice(0, len(h)), h.unsqueeze(0).to(dtype)
    return Separable(tuple(own.unsqueeze(1).to(dtype) for own in F), (band,))


def _count_mergeable(l: Tensor, low: float, tolerance: float) -> int:
    """How many of the ascending eigenvalues may share one variance; 0 if that saves nothing.

    The number of the others is a multiple of four, and at least four.
    """
    least = float(l[0].clamp(min=0))
    kept = max(len(l) - int((l <= least + 2 * tolerance * (low + least)).sum()), 1)
    kept += -kept % 4
    return len(l) - kept if 2 * kept < 0.9 * len(l) else 0


def _cut_bands(l: Tensor, grid: Tensor, tolerance: float) -> list[slice]:
    """Cut the ascending eigenvalues into bands of least cost: a shortest path over the edges."""
    low = float(grid[0])
    # multiples of four: a GPU's fast products need such sizes
    edges = sorted({0, len(l), *(int((l < low * edge).sum()) // 4 * 4 for edge in _EDGES)})
    best: dict[int, tuple[float, list[slice]]] = {0: (0.0, [])}
    for j, stop in enumerate(edges[1:], 1):
        paths = []
        for start in edges[:j]:
            bottom, top = (float(l[start]) if start else 0.0), float(l[stop - 1])
            ends = bottom + low, max(top + low, (bottom + low) * (1 + 1e-9))
            sample = _geometric(*ends, 12, l) - low
            terms = _fewest_terms((bottom, top), sample, grid, tolerance)
            if terms is not None and start in best:
                cost, bands = best[start]
                cost += (stop - start + _TERM_COST) * (len(terms[1]) + 0.5)
                paths.append((cost, [*bands, slice(start, stop)]))
        if paths:
            best[stop] = min(paths, key=lambda path: path[0])
    return best[len(l)][1] if len(l) in best else [slice(0, len(l))]


def _fewest_terms(
    ends: tuple[float, float], l: Tensor, grid: Tensor, tolerance: float
) -> tuple[Tensor, Tensor] | None:
    """h (n, S) and beta (S,) for n eigenvalues l, at the fewest Chebyshev nodes that suffice.

    ``1 / (a + l) = sum over s of h_s / (a + beta_s)``; l lie between two ends.
    """
    low = float(grid[0])
    bottom, top = (log(end + low) for end in ends)
    for count in range(1, _MAX_TERMS + 1):
        k = torch.arange(count, dtype=l.dtype, device=l.device)
        chebyshev = torch.cos((2 * k + 1) * pi / (2 * count))
        nodes = ((top + bottom) / 2 + (top - bottom) / 2 * chebyshev).exp() - low
        nodes = nodes.clamp(min=0)
        h, error = _fit_terms(grid, l, nodes, ridge=1e-2 * tolerance)
        if error <= tolerance:
            return h, nodes
    return None


def _fit_terms(a: Tensor, l: Tensor, nodes: Tensor, ridge: float) -> tuple[Tensor, float]:
    """h by least squares of the relative error over a, and the largest error.

    The ridge avoids large terms that cancel.
    """
    system = (a + l.unsqueeze(1)).unsqueeze(2) / (a.unsqueeze(1) + nodes)  # (n, A, S)
    small = ridge * torch.eye(len(nodes), dtype=l.dtype, device=l.device)
    Q, R = torch.linalg.qr(torch.cat([system, small.expand(len(l), -1, -1)], 1))
    h = torch.linalg.solve_triangular(R, Q[:, : len(a)].sum(1).unsqueeze(2), upper=True)
    error = float(((system @ h).squeeze(2) - 1).abs().max())
    return h.squeeze(2), error


def _geometric(low: float, high: float, count: int, like: Tensor) -> Tensor:
    """``count`` numbers from low to high at equal ratios."""
    return torch.logspace(log10(low), log10(high), count, dtype=like.dtype, device=like.device)
