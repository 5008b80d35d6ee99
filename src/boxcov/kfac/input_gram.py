"""The input factor of a convolution, without unfolding it.

Q is the sum over locations t of ``a_t a_t^T``, where ``a_t`` holds the input at the taps ``t + o``. Its block for two taps o, o' is a sum of
``x[i] x[i + o' - o]^T``: if every location counted whose kernel touches the input at all, that sum would be a correlation of the input with
itself, which depends on the difference of the taps only. A 3x3 kernel has 81 blocks but 25 differences, 13 up to transposition. The
locations that do not count are a thin ring around the output; they are unfolded and subtracted. Exact, and for a 3x3 kernel about
six times less work than unfolding.

Layers of one form are groups of one product: what takes one of them some hundred small operations takes all of them as many. On a GPU that is
the time it takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import prod

import torch
from torch import Tensor

from boxcov._torch.unfold import Geometry, columns, columns_at, gram, plain, stretch

_ROOM = 128 * 2**20  # bytes of columns at once
_BUSY = 256  # tiles of 64 x 64 outputs that keep a GPU busy: a correlation of fewer is cut into stretches of the row
_TILE = 64


def input_gram(x: Tensor, geometry: Geometry, has_bias: bool) -> tuple[Tensor, int]:
    """Sum of ``a a^T`` over all locations (G, n_in, n_in), and the number of locations; with a bias, a has a 1 appended.

    >>> x = torch.randn(2, 4, 8, 8)
    >>> Q, locations = input_gram(x, Geometry((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1)), has_bias=True)
    >>> Q.shape, locations
    (torch.Size([1, 37, 37]), 128)
    """
    locations = x.shape[0] * (
        x.shape[1] if not geometry.kernel else prod(_output_sizes(x, geometry))
    )
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
        Q = torch.cat(
            [
                torch.cat([Q, total.unsqueeze(2)], dim=2),
                torch.cat([total.unsqueeze(1), one], dim=2),
            ],
            dim=1,
        )
    return Q, locations


def input_grams(xs: Sequence[Tensor], geometry: Geometry, has_bias: bool) -> Tensor:
    """The sums of ``a a^T`` of several inputs of one shape (n, G, n_in, n_in), computed as groups of one.

    >>> x, y, geometry = torch.randn(2, 4, 8, 8), torch.randn(2, 4, 8, 8), Geometry((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1))
    >>> Q = input_grams([x, y], geometry, has_bias=True)
    >>> torch.allclose(Q[1], input_gram(y, geometry, has_bias=True)[0], atol=1e-4)
    True
    """
    n = len(xs)
    if n == 1:
        return input_gram(xs[0], geometry, has_bias)[0].unsqueeze(0)
    if not geometry.kernel:  # a convolution of one tap along the locations
        xs, geometry = [x.transpose(1, 2) for x in xs], Geometry((1,), (1,), ((0, 0),), (1,))
    Q, _ = input_gram(
        torch.cat(list(xs), 1), replace(geometry, groups=n * geometry.groups), has_bias
    )
    each: Tensor = Q.unflatten(0, (n, geometry.groups))
    return each


def room_for(x: Tensor, geometry: Geometry) -> int:
    """Bytes of what a factor is computed from: the input, or its columns where it must be unfolded.

    >>> room_for(torch.zeros(1, 4, 64, 64), Geometry((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1)))
    65536
    >>> room_for(torch.zeros(1, 4, 64, 64), Geometry((3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1)))
    147456
    """
    size = max(4, x.element_size())
    if not geometry.kernel or _correlates(x, geometry):
        return x.numel() * size
    return x.shape[0] * x.shape[1] * geometry.taps * prod(_output_sizes(x, geometry)) * size


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
    lags = len(_lags(geometry))
    overhead = 16 * lags  # a small map is not worth many small products
    return lags * (extended + overhead) + geometry.taps**2 * ring < geometry.taps**2 * prod(sizes)


def _output_sizes(x: Tensor, geometry: Geometry) -> list[int]:
    sizes = list(x.shape[2:])
    if geometry.transposed:
        sizes = [s * (n - 1) + 1 for s, n in zip(geometry.stride, sizes)]
        geometry = plain(geometry)
    return [
        (n + sum(p) - r - 1) // s + 1
        for n, p, r, s in zip(sizes, geometry.padding, geometry.reach, geometry.stride)
    ]


@lru_cache(maxsize=64)
def _lags(geometry: Geometry) -> tuple[tuple[int, ...], ...]:
    """Differences of two taps, in pixels, one of each pair of opposites; for a stretched input those that meet pixels."""
    steps = geometry.stride if geometry.transposed else (1,) * len(geometry.kernel)
    lags = (
        lag
        for lag in product(*(range(1 - k, k) for k in geometry.kernel))
        if lag >= (0,) * len(lag)
    )
    return tuple(
        lag for lag in lags if all(d * n % s == 0 for d, n, s in zip(geometry.dilation, lag, steps))
    )


def _by_correlation(x: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """(G, n_in, n_in) and the sum of the columns (G, n_in)."""
    lags = _lags(geometry)
    if geometry.transposed:
        x, geometry = stretch(x, geometry), plain(geometry)
        flip = True
    else:
        flip = False
    groups, taps = geometry.groups, geometry.taps
    channels = x.shape[1] // groups
    # one block for each lag, its opposite's behind it, zeros last; then one gather puts them where they belong
    there = _correlations(x, geometry, lags)  # (lags, G, channels, channels)
    blocks = torch.cat([there, there.transpose(2, 3), torch.zeros_like(there[:1])])
    Q = blocks[_places(geometry.kernel, lags, x.device)]  # (taps, taps, G, channels, channels)
    Q = Q.permute(2, 3, 0, 4, 1).reshape(
        groups, channels * taps, channels * taps
    )  # n_in runs over (channel, tap)
    total = (
        x.sum(dim=(0, *range(2, x.dim())))
        .reshape(groups, channels, 1)
        .expand(-1, -1, taps)
        .reshape(groups, -1)
    )
    ring = list(_ring(x, geometry))
    if ring:
        a = torch.cat(ring, 3) if len(ring) > 1 else ring[0]
        Q, total = Q - gram(a), total - a.sum(dim=(0, 3))
    if flip:
        order = (
            torch.arange(channels * taps, device=x.device).reshape(channels, taps).flip(1).flatten()
        )
        Q, total = Q[:, order][:, :, order], total[:, order]
    return Q, total


@lru_cache(maxsize=64)
def _places(
    kernel: tuple[int, ...], lags: tuple[tuple[int, ...], ...], device: torch.device
) -> Tensor:
    """For each pair of taps (taps, taps) the number of its block: of their lag, of the opposite one, or of none.

    >>> _places((2,), ((0,), (1,)), torch.device("cpu"))
    tensor([[0, 1],
            [3, 0]])
    """
    number = {lag: i for i, lag in enumerate(lags)}
    opposite = {tuple(-n for n in lag): len(lags) + i for lag, i in number.items()}
    offsets = list(product(*(range(k) for k in kernel)))
    between = [[tuple(b - a for a, b in zip(o, p)) for p in offsets] for o in offsets]
    return torch.tensor(
        [[number.get(lag, opposite.get(lag, 2 * len(lags))) for lag in row] for row in between],
        device=device,
    )


def _correlations(x: Tensor, geometry: Geometry, lags: tuple[tuple[int, ...], ...]) -> Tensor:
    """For each lag the sum over pixels and items of ``x[i] x[i + lag]^T`` (lags, G, channels, channels), the input being 0 outside.

    The pixels lie in one row with enough zeros behind each line that a lag becomes a shift of the row: no copies but this one.
    """
    batch, channels = x.shape[:2]
    sizes = [n + r for n, r in zip(x.shape[2:], geometry.reach)]
    strides = [prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    shifts = [sum(n * d * s for n, d, s in zip(lag, geometry.dilation, strides)) for lag in lags]
    length, most = batch * prod(sizes), max(shifts)
    parts = _stretches(x, geometry.groups, length, most)
    each = -(-length // parts)
    row = x.new_zeros(channels, parts * each + most)
    pixels = row[:, :length].view(channels, batch, *sizes)
    pixels[(slice(None), slice(None), *(slice(n) for n in x.shape[2:]))] = x.transpose(0, 1)
    if parts > 1:  # each with what its shifts reach behind it
        row = row.unfold(1, each + most, each).transpose(0, 1).contiguous()
    row = row.view(parts * geometry.groups, channels // geometry.groups, each + most)
    base = row[..., :each]
    there = row.new_empty(len(lags), len(row), row.shape[1], row.shape[1])
    for found, shift in zip(there, shifts):
        torch.bmm(base, row[..., shift : shift + each].transpose(1, 2), out=found)
    return there if parts == 1 else there.unflatten(1, (parts, geometry.groups)).sum(1)


def _stretches(x: Tensor, groups: int, length: int, most: int) -> int:
    """Into how many stretches a row of ``length`` is cut: a long sum of few outputs would leave most of a GPU idle."""
    if x.device.type == "cpu":
        return 1
    tiles = groups * (-(-x.shape[1] // (groups * _TILE))) ** 2
    return max(1, min(-(-_BUSY // tiles), length // (8 * max(most, 1))))


def _ring(x: Tensor, geometry: Geometry) -> Iterator[Tensor]:
    """Columns (B, G, n_in, T) of the locations outside the output whose kernel still touches the input, slab by slab."""
    n = len(geometry.kernel)
    reach = geometry.reach
    for axis in range(n):
        size = x.shape[2 + axis]
        # dimensions before this one: the real locations only; those after: all that touch
        around = [geometry.padding[a] if a < axis else (reach[a], reach[a]) for a in range(n)]
        before, after = (reach[axis] - p for p in geometry.padding[axis])
        for start, stop, sides in (
            (0, before, (reach[axis], 0)),
            (size - after, size, (0, reach[axis])),
        ):
            if start == stop:
                continue
            # a slab thicker than the input is the input, with the zeros that lie beyond it
            low, high = max(start, 0), min(stop, size)
            padding = [*around]
            padding[axis] = (sides[0] + low - start, sides[1] + stop - high)
            yield columns(
                x.narrow(2 + axis, low, high - low), replace(geometry, padding=tuple(padding))
            )
