"""The input factor of a convolution, computed without unfolding the input.

Q is the sum over locations t of ``a_t a_t^T``, where a_t holds the input at the taps ``t + o``. Its
block for two taps o and o' is a sum of ``x[i] x[i + o' - o]^T``. If the sum ran over every location
whose kernel touches the input, it would be the autocorrelation of the input at the lag o' - o: a
3x3 kernel has 81 blocks but 25 lags, 13 up to transposition. The locations outside the output form
a thin ring around it; they are unfolded and subtracted. The result is exact, and a 3x3 kernel needs
about six times less work than unfolding.

Layers of equal shape become the groups of one product, which saves kernel launches on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import pad

from boxcov._torch.layers import Geometry, columns, gram, plain, stretch

_TILE = 64
_BUSY_TILES = 256  # tiles of 64 x 64 outputs that keep a GPU busy


def input_gram(x: Tensor, geometry: Geometry, has_bias: bool) -> Tensor:
    """Return the sum of ``a a^T`` over all locations (G, n_in, n_in).

    With a bias, a has a 1 appended.
    """
    locations = len(x) * (prod(_output_sizes(x, geometry)) if geometry.kernel else x.shape[1])
    if not locations:  # an empty batch, or an input smaller than the kernel
        n_in = x.shape[1] // geometry.groups * geometry.taps if geometry.kernel else x.shape[-1]
        return x.new_zeros(geometry.groups, n_in + has_bias, n_in + has_bias)
    if _correlates(x, geometry):
        Q, total = _by_correlation(x, geometry)
    else:
        a = columns(x, geometry)
        Q, total = gram(a), a.sum(dim=(0, 3))
    if has_bias:
        Q = pad(Q, (0, 1, 0, 1), value=locations)
        Q[:, -1, :-1] = Q[:, :-1, -1] = total
    return Q


def input_grams(xs: Sequence[Tensor], geometry: Geometry, has_bias: bool) -> Tensor:
    """Return the sums of ``a a^T`` of n inputs of equal shape (n, G, n_in, n_in)."""
    n = len(xs)
    if n == 1:
        return input_gram(xs[0], geometry, has_bias).unsqueeze(0)
    if not geometry.kernel:  # a convolution of one tap along the locations
        xs, geometry = [x.transpose(1, 2) for x in xs], Geometry((1,), (1,), ((0, 0),), (1,))
    grouped = replace(geometry, groups=n * geometry.groups)
    Q = input_gram(torch.cat(list(xs), 1), grouped, has_bias)
    return Q.unflatten(0, (n, geometry.groups))


def memory_of(x: Tensor, geometry: Geometry) -> int:
    """Return the bytes that ``input_gram`` reads: the input, or its columns if it is unfolded."""
    size = max(4, x.element_size())
    if not geometry.kernel or _correlates(x, geometry):
        return x.numel() * size
    return x.shape[0] * x.shape[1] * geometry.taps * prod(_output_sizes(x, geometry)) * size


def _correlates(x: Tensor, geometry: Geometry) -> bool:
    """Return whether the autocorrelation applies and is less work than unfolding."""
    if geometry.taps <= 1 or not (geometry.transposed or all(s == 1 for s in geometry.stride)):
        return False
    if any(p > r for pair, r in zip(geometry.padding, geometry.reach) for p in pair):
        return False
    sizes = _output_sizes(x, geometry)
    extended = prod(s + 2 * r for s, r in zip(sizes, geometry.reach))
    ring = extended - prod(sizes)
    lags = len(_lags(geometry))
    overhead = 16 * lags  # many small products do not pay for a small map
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
    """Return the differences of two taps, one of each pair of opposites.

    For a transposed convolution, only those that are multiples of the stride: between the pixels
    of its stretched input are zeros.
    """
    steps = geometry.stride if geometry.transposed else (1,) * len(geometry.kernel)
    return tuple(
        lag
        for lag in product(*(range(1 - k, k) for k in geometry.kernel))
        if lag >= (0,) * len(lag)
        and all(d * n % s == 0 for d, n, s in zip(geometry.dilation, lag, steps))
    )


def _by_correlation(x: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """Return the sum of ``a a^T`` (G, n_in, n_in) and of ``a`` (G, n_in)."""
    lags, is_transposed = _lags(geometry), geometry.transposed
    if is_transposed:
        x, geometry = stretch(x, geometry), plain(geometry)
    groups, taps = geometry.groups, geometry.taps
    channels = x.shape[1] // groups
    # blocks of all lags, of their opposites, and zeros; one gather puts them into place
    lagged = _correlations(x, geometry, lags)  # (lags, G, channels, channels)
    blocks = torch.cat([lagged, lagged.transpose(2, 3), torch.zeros_like(lagged[:1])])
    Q = blocks[_block_index(geometry.kernel, lags, x.device)]  # (taps, taps, G, channels, channels)
    n_in = channels * taps  # runs over (channel, tap)
    Q = Q.permute(2, 3, 0, 4, 1).reshape(groups, n_in, n_in)
    total = x.sum(dim=(0, *range(2, x.dim()))).view(groups, channels, 1)
    total = total.expand(-1, -1, taps).flatten(1)
    ring = list(_ring(x, geometry))
    if ring:
        a = torch.cat(ring, 3) if len(ring) > 1 else ring[0]
        Q, total = Q - gram(a), total - a.sum(dim=(0, 3))
    if is_transposed:
        order = torch.arange(n_in, device=x.device).view(channels, taps).flip(1).flatten()
        Q, total = Q[:, order][:, :, order], total[:, order]
    return Q, total


@lru_cache(maxsize=64)
def _block_index(
    kernel: tuple[int, ...], lags: tuple[tuple[int, ...], ...], device: torch.device
) -> Tensor:
    """Return the block of each pair of taps (taps, taps): of its lag, of the opposite, or zeros."""
    number = {lag: i for i, lag in enumerate(lags)}
    opposite = {tuple(-n for n in lag): len(lags) + i for lag, i in number.items()}
    offsets = list(product(*(range(k) for k in kernel)))
    between = [[tuple(b - a for a, b in zip(o, p)) for p in offsets] for o in offsets]
    return torch.tensor(
        [[number.get(lag, opposite.get(lag, 2 * len(lags))) for lag in row] for row in between],
        device=device,
    )


def _correlations(x: Tensor, geometry: Geometry, lags: tuple[tuple[int, ...], ...]) -> Tensor:
    """Return the sums over pixels and items of ``x[i] x[i + lag]^T`` (lags, G, channels, channels).

    The input is 0 outside. All pixels are laid out in one row, with enough zeros behind each line
    that a lag is a shift of the row: this is the only copy.
    """
    batch, channels = x.shape[:2]
    sizes = [n + r for n, r in zip(x.shape[2:], geometry.reach)]
    strides = [prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    shifts = [sum(n * d * s for n, d, s in zip(lag, geometry.dilation, strides)) for lag in lags]
    length, most = batch * prod(sizes), max(shifts)
    pieces = _count_pieces(x, geometry.groups, length, most)
    each = -(-length // pieces)
    row = x.new_zeros(channels, pieces * each + most)
    pixels = row[:, :length].view(channels, batch, *sizes)
    pixels[(slice(None), slice(None), *(slice(n) for n in x.shape[2:]))] = x.transpose(0, 1)
    if pieces > 1:  # each piece with what its shifts reach
        row = row.unfold(1, each + most, each).transpose(0, 1).contiguous()
    row = row.view(pieces * geometry.groups, channels // geometry.groups, each + most)
    base = row[..., :each]
    sums = row.new_empty(len(lags), len(row), row.shape[1], row.shape[1])
    for out, shift in zip(sums, shifts):
        torch.bmm(base, row[..., shift : shift + each].transpose(1, 2), out=out)
    return sums if pieces == 1 else sums.unflatten(1, (pieces, geometry.groups)).sum(1)


def _count_pieces(x: Tensor, groups: int, length: int, most: int) -> int:
    """Return into how many pieces to cut the row; few outputs would leave most of a GPU idle."""
    if x.device.type == "cpu":
        return 1
    tiles = groups * (-(-x.shape[1] // (groups * _TILE))) ** 2
    return max(1, min(-(-_BUSY_TILES // tiles), length // (8 * max(most, 1))))


def _ring(x: Tensor, geometry: Geometry) -> Iterator[Tensor]:
    """Yield the columns (B, G, n_in, T) of locations outside the output that touch the input."""
    n = len(geometry.kernel)
    reach = geometry.reach
    for axis in range(n):
        size = x.shape[2 + axis]
        # in earlier dimensions the real locations only, in later ones all that touch
        around = [geometry.padding[a] if a < axis else (reach[a], reach[a]) for a in range(n)]
        before, after = (reach[axis] - p for p in geometry.padding[axis])
        for start, stop, sides in (
            (0, before, (reach[axis], 0)),
            (size - after, size, (0, reach[axis])),
        ):
            if start == stop:
                continue
            # a slab thicker than the input is the input, padded with zeros
            low, high = max(start, 0), min(stop, size)
            padding = [*around]
            padding[axis] = (sides[0] + low - start, sides[1] + stop - high)
            yield columns(
                x.narrow(2 + axis, low, high - low), replace(geometry, padding=tuple(padding))
            )
