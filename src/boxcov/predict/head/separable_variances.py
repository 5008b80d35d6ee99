"""Posterior variances as short sums of products: what makes the exact covariance cheap.

The variance of a layer's weight in the eigenbasis is ``v[p, q] = 1 / (tau + n m_p l_q)``. As a function of p it is ``1 / (n m_p)`` times
``1 / (a + l_q)`` at ``a = tau / (n m_p)``, and a function ``1 / (a + l)`` is, to rounding, a combination of a few others, ``1 / (a + beta_s)``. So

    v[p, q] = sum over s of F[p, s] h[s, q],    F[p, s] = 1 / (tau + n m_p beta_s),

with h the same for every layer that shares the input factor. The q are cut into bands, as a narrow range of l takes few terms: most eigenvalues of a
factor are so small that two or three do. Where the smallest are so small beside the prior that one number stands for all of them, their eigenvectors
are not needed one by one: what an input has in common with none of the others is one vector.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log, log10, pi

import torch
from torch import Tensor

from boxcov.posterior.posterior import Posterior

_POINTS = 60  # where the error is looked at, over the range of a
_MOST = 30  # terms of a band
_EDGES = tuple(10 ** (i / 2) for i in range(-6, 13))  # of bands, in multiples of the smallest a
_BAND = 80  # what a term costs besides its columns, in columns: the sum over terms, and the inefficiency of narrow products


@dataclass(frozen=True)
class Separable:
    """``v[k][p, q] = sum over s of rows[k][p, s] columns[s, q]``; in a band of q only some s count, and others are not stored."""

    rows: tuple[
        Tensor, ...
    ]  # (n_out, S) for each layer, the bands one after the other; with a rest, its own come last
    bands: tuple[tuple[slice, Tensor], ...]  # columns q, and (S of the band, columns)
    error: float  # relative, the largest over all entries
    rest: int = 0  # the first so many columns have one variance in each row

    def of(self, layer: int) -> Tensor:
        """The variances (n_out, n_in) of one layer, as they are represented."""
        *parts, last = self.rows[layer].split(
            [*(len(columns) for _, columns in self.bands), int(self.rest > 0)], 1
        )
        own = torch.cat([rows @ columns for rows, (_, columns) in zip(parts, self.bands)], 1)
        return torch.cat([last.expand(-1, self.rest), own], 1) if self.rest else own


def separable(
    posterior: Posterior, names: list[str], tolerance: float, merge: bool = False
) -> Separable | None:
    """The variances of layers with one input factor and one group, in as few terms as ``tolerance`` allows; None if too many are needed.

    merge: let the smallest eigenvalues have one number, if they are more than half.

    >>> import boxcov
    >>> from boxcov.data import shapes
    >>> from boxcov.detectors.tiny import TinyCenter
    >>> posterior = boxcov.fit(TinyCenter(), shapes.frames(count=4))
    >>> found = separable(posterior, ["head.branches.size.0", "head.branches.rot.0"], 1e-5)
    >>> v = posterior.variances("head.branches.rot.0")[0]
    >>> bool(((found.of(1) / v - 1).abs() < 2e-5).all())
    True
    """
    blocks = [posterior.blocks[name] for name in names]
    if any(block.refined for block in blocks):  # variances of no particular form
        return None
    dtype = blocks[0].H.values.dtype
    l = blocks[0].Q.values[0].double()
    if posterior.form == "paper":
        values = blocks[0].Q.jittered(posterior.jitter)[0].double()
        rows = [1 / block.H.jittered(posterior.jitter)[0].double() for block in blocks]
        whole = slice(0, len(l)), (1 / values).unsqueeze(0).to(dtype)
        return Separable(tuple(row.unsqueeze(1).to(dtype) for row in rows), (whole,), 0.0)
    pairs = [
        (posterior.n_data * block.H.values[0].double(), posterior.tau(name))
        for name, block in zip(names, blocks)
    ]
    a = torch.cat([tau / nm.clamp(min=1e-300) for nm, tau in pairs])
    low, top = float(a.min()), float(l.max())
    if not 0 < low < 1e100 or not top > 0:  # no prior, or no curvature at all
        return None
    high = min(float(a.max()), 1e4 * max(top, low))  # beyond, 1 / (a + l) is flat
    grid = _spread(low, max(high, 1.01 * low), _POINTS, l)
    bands = []
    nodes: list[Tensor] = []
    error = 0.0
    rest = _mergeable(l, low, tolerance) if merge else 0
    for part in _bands(l[rest:], grid, tolerance):
        band = slice(part.start + rest, part.stop + rest)
        found = _fewest(
            float(l[band.start]) if band.start else 0.0,
            float(l[band.stop - 1]),
            l[band],
            grid,
            tolerance,
        )
        if found is None:
            return None
        h, off, own = found
        bands.append((band, h.T.to(dtype).contiguous()))
        nodes.append(own)
        error = max(error, off)
    if rest:
        nodes.append(l[rest - 1 : rest] / 2)
        error = max(error, float(l[rest - 1]) / 2 / low)
    every = torch.cat(nodes)
    return Separable(
        tuple((1 / (tau + nm.unsqueeze(1) * every)).to(dtype) for nm, tau in pairs),
        tuple(bands),
        error,
        rest,
    )


def _mergeable(l: Tensor, low: float, tolerance: float) -> int:
    """How many of the ascending eigenvalues half the largest of them can stand for, beside ``low``; none if that saves nothing.

    What is kept is a multiple of four, and there is always some.
    """
    kept = max(len(l) - int((l.clamp(min=0) <= 2 * tolerance * low).sum()), 1)
    kept += -kept % 4
    return len(l) - kept if 2 * kept < 0.9 * len(l) else 0


def _bands(l: Tensor, grid: Tensor, tolerance: float) -> list[slice]:
    """How to cut the ascending eigenvalues so that the terms, counted over all columns, are fewest: the shortest way over the edges."""
    low = float(grid[0])
    # in fours: a GPU's fast products take no other sizes
    edges = sorted({0, len(l), *(int((l < low * edge).sum()) // 4 * 4 for edge in _EDGES)})
    best: dict[int, tuple[float, list[slice]]] = {0: (0.0, [])}
    for j, stop in enumerate(edges[1:], 1):
        ways = []
        for start in edges[:j]:
            bottom, top = (float(l[start]) if start else 0.0), float(l[stop - 1])
            found = _fewest(bottom, top, _sample(bottom, top, low, l), grid, tolerance)
            if found is not None and start in best:
                cost, before = best[start]
                ways.append(
                    (
                        cost + (stop - start + _BAND) * (len(found[2]) + 0.5),
                        [*before, slice(start, stop)],
                    )
                )
        if ways:
            best[stop] = min(ways, key=lambda way: way[0])
    return best[len(l)][1] if len(l) in best else [slice(0, len(l))]


def _sample(bottom: float, top: float, low: float, like: Tensor) -> Tensor:
    """A few numbers from bottom to top, at equal ratios where they are far above ``low``."""
    return _spread(bottom + low, max(top + low, (bottom + low) * (1 + 1e-9)), 12, like) - low


def _fewest(
    bottom: float, top: float, l: Tensor, grid: Tensor, tolerance: float
) -> tuple[Tensor, float, Tensor] | None:
    """Coefficients (n, S), their error, and the nodes (S,), for eigenvalues between bottom and top: the fewest nodes that do."""
    low = float(grid[0])
    middle, half = (log((top + low) * (bottom + low)) / 2, log((top + low) / (bottom + low)) / 2)
    for count in range(1, _MOST + 1):
        around = torch.cos(
            (2 * torch.arange(count, dtype=l.dtype, device=l.device) + 1) * pi / (2 * count)
        )  # Chebyshev's
        nodes = ((middle + half * around).exp() - low).clamp(min=0)
        h, error = _coefficients(grid, l, nodes, 1e-2 * tolerance)
        if error <= tolerance:
            return h, error, nodes
    return None


def _spread(low: float, high: float, count: int, like: Tensor) -> Tensor:
    """``count`` numbers from low to high, at equal ratios."""
    return torch.logspace(log10(low), log10(high), count, dtype=like.dtype, device=like.device)


def _coefficients(a: Tensor, l: Tensor, nodes: Tensor, ridge: float) -> tuple[Tensor, float]:
    """h (n, S) of ``1 / (a + l) = sum over s of h_s / (a + beta_s)`` by least squares of the relative error, and the largest one.

    The ridge keeps coefficients small: large ones that cancel would cost digits.
    """
    system = (a + l.unsqueeze(1)).unsqueeze(2) / (a.unsqueeze(1) + nodes)  # (n, A, S)
    small = ridge * torch.eye(len(nodes), dtype=l.dtype, device=l.device)
    Q, R = torch.linalg.qr(torch.cat([system, small.expand(len(l), -1, -1)], 1))
    h = torch.linalg.solve_triangular(R, Q[:, : len(a)].sum(1).unsqueeze(2), upper=True)
    return h.squeeze(2), float(((system @ h).squeeze(2) - 1).abs().max())
