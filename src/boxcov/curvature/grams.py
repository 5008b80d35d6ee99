"""The input factor of a convolution, without unfolding it.

Q is the sum over locations t of ``a_t a_t^T``, where ``a_t`` holds the input at the taps ``t + o``. Its block for two taps o, o' is a sum of
``x[i] x[i + o' - o]^T``: if every location counted whose kernel touches the input at all, that sum would be a correlation of the input with
itself, which depends on the difference of the taps only. A 3x3 kernel has 81 blocks but 25 differences, 13 up to transposition. The
locations that do not count are a thin ring around the output; they are unfolded and subtracted. Exact, and for a 3x3 kernel about
six times less work than unfolding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import prod

import torch
from torch import Tensor

from boxcov.curvature.layers import Geometry, columns, columns_at, gram, pad, plain, stretch

_ROOM = 128 * 2**20  # bytes of columns at once


def input_gram(x: Tensor, geometry: Geometry, has_bias: bool) -> tuple[Tensor, int]:
    """Sum of ``a a^T`` over all locations (G, n_in, n_in), and the number of locations; with a bias, a has a 1 appended.

    >>> x = torch.randn(2, 4, 8, 8)
    >>> Q, locations = input_gram(x, Geometry((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1)), has_bias=True)
    >>> Q.shape, locations
    (torch.Size([1, 37, 37]), 128)
    """
    locations = x.shape[0] * (x.shape[1] if not geometry.kernel else prod(_output_sizes(x, geometry)))
    if not locations:  # no item, or an input smaller than the kernel's reach
        n_in = x.shape[-1] if not geometry.kernel else x.shape[1] // geometry.groups * geometry.taps
        return x.new_zeros(geometry.groups, n_in + has_bias, n_in + has_bias), 0
    if _correlates(x, geometry):
        Q, total = _by_correlation(x, geometry)
    else:
        a = columns(x, geometry)
        Q, total = gram(a), a.sum(dim=(0, 3))
    if has_bias:
        one = Q.new_full((Q.shape[0], 1, 1), float(locations))
        Q = torch.cat([torch.cat([Q, total.unsqueeze(2)], dim=2), torch.cat([total.unsqueeze(1), one], dim=2)], dim=1)
    return Q, locations


def weighted_gram(x: Tensor, weights: Tensor, geometry: Geometry, has_bias: bool) -> Tensor:
    """Sum of ``w a a^T`` (G, n_in, n_in) over all locations, with weights (B, G, T) of at least 0; those of weight 0 cost nothing.

    >>> x, geometry = torch.randn(2, 4, 8, 8), Geometry((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1))
    >>> same = weighted_gram(x, torch.ones(2, 1, 64), geometry, has_bias=True), input_gram(x, geometry, has_bias=True)[0]
    >>> torch.allclose(*same, atol=1e-4)
    True
    """
    n_in = x.shape[-1] if not geometry.kernel else x.shape[1] // geometry.groups * geometry.taps
    Q = x.new_zeros(geometry.groups, n_in + has_bias, n_in + has_bias)
    items, locations = weights.amax(1).nonzero(as_tuple=True)
    step = max(1, _ROOM // (geometry.groups * n_in * x.element_size()))
    for item, location in zip(items.split(step), locations.split(step)):
        a = columns_at(x, geometry, item, location)  # (m, G, n_in)
        if has_bias:
            a = torch.cat([a, torch.ones_like(a[:, :, :1])], 2)
        a = a * weights[item, :, location].sqrt().unsqueeze(2)
        Q += a.permute(1, 2, 0) @ a.transpose(0, 1)
    return Q


def _correlates(x: Tensor, geometry: Geometry) -> bool:
    """Whether correlating is possible, and less work than unfolding (both counted in products of channel blocks)."""
    if geometry.taps <= 1 or not (geometry.transposed or all(s == 1 for s in geometry.stride)):
        return False
    if any(p > r for pair, r in zip(geometry.padding, geometry.reach) for p in pair):
        return False
    sizes = _output_sizes(x, geometry)
    extended = prod(s + 2 * r for s, r in zip(sizes, geometry.reach))
    ring = extended - prod(sizes)
    lags = len(list(_lags(geometry)))
    overhead = 16 * lags  # a small map is not worth many small products
    return lags * (extended + overhead) + geometry.taps**2 * ring < geometry.taps**2 * prod(sizes)


def _output_sizes(x: Tensor, geometry: Geometry) -> list[int]:
    sizes = list(x.shape[2:])
    if geometry.transposed:
        sizes = [s * (n - 1) + 1 for s, n in zip(geometry.stride, sizes)]
        geometry = plain(geometry)
    return [(n + sum(p) - r - 1) // s + 1 for n, p, r, s in zip(sizes, geometry.padding, geometry.reach, geometry.stride)]


def _lags(geometry: Geometry) -> Iterator[tuple[int, ...]]:
    """Differences of two taps, in pixels, one of each pair of opposites; for a stretched input those that meet pixels."""
    steps = geometry.stride if geometry.transposed else (1,) * len(geometry.kernel)
    for lag in product(*(range(1 - k, k) for k in geometry.kernel)):
        pixels = tuple(d * n for d, n in zip(geometry.dilation, lag))
        if lag >= (0,) * len(lag) and all(p % s == 0 for p, s in zip(pixels, steps)):
            yield lag


def _by_correlation(x: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """(G, n_in, n_in) and the sum of the columns (G, n_in)."""
    lags = list(_lags(geometry))
    if geometry.transposed:
        x, geometry = stretch(x, geometry), plain(geometry)
        flip = True
    else:
        flip = False
    groups, taps = geometry.groups, geometry.taps
    channels = x.shape[1] // groups
    # one block for each lag, its opposite's behind it, zeros last; then one gather puts them where they belong
    there = torch.stack(_correlations(x, geometry, lags))  # (lags, G, channels, channels)
    blocks = torch.cat([there, there.transpose(2, 3), torch.zeros_like(there[:1])])
    Q = blocks[_places(geometry.kernel, tuple(lags)).to(x.device)]  # (taps, taps, G, channels, channels)
    Q = Q.permute(2, 3, 0, 4, 1).reshape(groups, channels * taps, channels * taps)  # n_in runs over (channel, tap)
    total = x.sum(dim=(0, *range(2, x.dim()))).reshape(groups, channels, 1).expand(-1, -1, taps).reshape(groups, -1)
    for a in _ring(x, geometry):
        Q, total = Q - gram(a), total - a.sum(dim=(0, 3))
    if flip:
        order = torch.arange(channels * taps, device=x.device).reshape(channels, taps).flip(1).flatten()
        Q, total = Q[:, order][:, :, order], total[:, order]
    return Q, total


@lru_cache(maxsize=64)
def _places(kernel: tuple[int, ...], lags: tuple[tuple[int, ...], ...]) -> Tensor:
    """For each pair of taps (taps, taps) the number of its block: of their lag, of the opposite one, or of none.

    >>> _places((2,), ((0,), (1,)))
    tensor([[0, 1],
            [3, 0]])
    """
    number = {lag: i for i, lag in enumerate(lags)}
    opposite = {tuple(-n for n in lag): len(lags) + i for lag, i in number.items()}
    offsets = list(product(*(range(k) for k in kernel)))
    between = [[tuple(b - a for a, b in zip(o, p)) for p in offsets] for o in offsets]
    return torch.tensor([[number.get(lag, opposite.get(lag, 2 * len(lags))) for lag in row] for row in between])


def _correlations(x: Tensor, geometry: Geometry, lags: list[tuple[int, ...]]) -> list[Tensor]:
    """For each lag the sum over pixels and items of ``x[i] x[i + lag]^T`` (G, channels, channels), the input being 0 outside.

    The pixels lie in one row with enough zeros behind each line that a lag becomes a shift of the row: no copies but this one.
    """
    padded = pad(x, tuple((0, r) for r in geometry.reach))
    sizes = padded.shape[2:]
    strides = [prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    shifts = [sum(n * d * s for n, d, s in zip(lag, geometry.dilation, strides)) for lag in lags]
    batch, channels = padded.shape[:2]
    row = padded.new_zeros(channels, batch * prod(sizes) + max(shifts))
    row[:, : batch * prod(sizes)].view(channels, batch, *sizes).copy_(padded.transpose(0, 1))
    row = row.view(geometry.groups, channels // geometry.groups, -1)
    length = batch * prod(sizes)
    base = row[..., :length]
    return [base @ row[..., shift : shift + length].transpose(1, 2) for shift in shifts]


def _ring(x: Tensor, geometry: Geometry) -> Iterator[Tensor]:
    """Columns (B, G, n_in, T) of the locations outside the output whose kernel still touches the input, slab by slab."""
    n = len(geometry.kernel)
    reach = geometry.reach
    for axis in range(n):
        size = x.shape[2 + axis]
        # dimensions before this one: the real locations only; those after: all that touch
        around = [geometry.padding[a] if a < axis else (reach[a], reach[a]) for a in range(n)]
        before, after = (reach[axis] - p for p in geometry.padding[axis])
        for start, stop, sides in ((0, before, (reach[axis], 0)), (size - after, size, (0, reach[axis]))):
            if start == stop:
                continue
            # a slab thicker than the input is the input, with the zeros that lie beyond it
            low, high = max(start, 0), min(stop, size)
            padding = [*around]
            padding[axis] = (sides[0] + low - start, sides[1] + stop - high)
            yield columns(x.narrow(2 + axis, low, high - low), replace(geometry, padding=tuple(padding)))
