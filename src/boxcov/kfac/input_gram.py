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
_BUSY_TILES = 1024  # tiles of 64 x 64 outputs that keep a GPU busy


def input_grams(xs: Sequence[Tensor], geometry: Geometry, has_bias: bool) -> Tensor:
    """Return the sums of ``a a^T`` over all locations, of n inputs of equal shape.

    With a bias, a has a 1 appended. The result is (n, G, n_in, n_in).
    """
    if not geometry.kernel:  # a convolution of one tap along the locations
        xs, geometry = [x.transpose(1, 2) for x in xs], Geometry((1,), (1,), ((0, 0),), (1,))
    n, x = len(xs), xs[0]
    locations = len(x) * prod(_output_sizes(x, geometry))
    if not locations:  # an empty batch, or an input smaller than the kernel
        n_in = x.shape[1] // geometry.groups * geometry.taps + has_bias
        return x.new_zeros(n, geometry.groups, n_in, n_in)
    if _correlates(x, geometry):
        Q, total = _by_correlation(xs, geometry)
    else:
        a = columns(_joined(xs), replace(geometry, groups=n * geometry.groups))
        Q, total = gram(a), a.sum(dim=(0, 3))
    if has_bias:
        Q = pad(Q, (0, 1, 0, 1), value=locations)
        Q[:, -1, :-1] = Q[:, :-1, -1] = total
    return Q.unflatten(0, (n, geometry.groups))


def _joined(xs: Sequence[Tensor]) -> Tensor:
    return xs[0] if len(xs) == 1 else torch.cat(list(xs), 1)


def memory_of(x: Tensor, geometry: Geometry) -> int:
    """Return the bytes that are read of one input: itself, or its columns if it is unfolded."""
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


def _by_correlation(xs: Sequence[Tensor], geometry: Geometry) -> tuple[Tensor, Tensor]:
    """Return the sum of ``a a^T`` (n G, n_in, n_in) and of ``a`` (n G, n_in) of n inputs."""
    lags, is_transposed = _lags(geometry), geometry.transposed
    if is_transposed:
        xs, geometry = [stretch(x, geometry) for x in xs], plain(geometry)
    groups, taps = len(xs) * geometry.groups, geometry.taps
    # blocks of all lags, of their opposites, and zeros; one gather puts them into place
    lagged = _correlations(xs, geometry, lags)  # (lags, n G, channels, channels)
    blocks = torch.cat([lagged, lagged.transpose(2, 3), torch.zeros_like(lagged[:1])])
    Q = blocks[_block_index(geometry.kernel, lags, lagged.device)]  # (taps, taps, n G, ...)
    channels = lagged.shape[-1]
    n_in = channels * taps  # runs over (channel, tap)
    Q = Q.permute(2, 3, 0, 4, 1).reshape(groups, n_in, n_in)
    total = torch.cat([x.sum(dim=(0, *range(2, x.dim()))) for x in xs]).view(groups, channels, 1)
    total = total.repeat(1, 1, taps).flatten(1)
    by_tap = channels, *geometry.kernel
    for touching, a in _ring(xs, geometry):
        at = (slice(None), *touching)
        some = total.view(groups, *by_tap)[(slice(None), *at)]
        some -= a.sum(dim=(0, 3)).view_as(some)
        block = Q.view(groups, *by_tap, *by_tap)[(slice(None), *at, *at)]
        block -= gram(a).view_as(block)
    if is_transposed:
        order = torch.arange(n_in, device=Q.device).view(channels, taps).flip(1).flatten()
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


def _correlations(
    xs: Sequence[Tensor], geometry: Geometry, lags: tuple[tuple[int, ...], ...]
) -> Tensor:
    """Return the sums over pixels and items of ``x[i] x[i + lag]^T``, with an input of 0 outside.

    All pixels of a group are laid out one after the other, with enough zeros behind each line that
    a lag is a shift: this is the only copy. The result is (lags, n G, channels, channels).
    """
    batch, groups = len(xs[0]), len(xs) * geometry.groups
    channels = xs[0].shape[1] // geometry.groups
    sizes = [n + r for n, r in zip(xs[0].shape[2:], geometry.reach)]
    strides = [prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    shifts = [sum(n * d * s for n, d, s in zip(lag, geometry.dilation, strides)) for lag in lags]
    length, most = batch * prod(sizes), max(shifts)
    pieces = _count_pieces(xs[0].device, groups, channels, length // (8 * max(most, 1)))
    each = -(-length // pieces)
    # behind them the zeros that shifts reach: if in pieces, then whole ones, which are not summed
    step, spare = (each + most, 0) if pieces == 1 else (each, -(-most // each))
    pixels = _laid_out(xs, geometry, sizes, (pieces + spare) * step)
    count = groups * (pieces + spare)
    used = count - spare
    size = used, each, channels
    stride = pixels.stride(0) // (pieces + spare), *pixels.stride()[1:]
    base = pixels.as_strided(size, stride).transpose(1, 2)
    sums = pixels.new_empty(len(lags), count, channels, channels)
    for out, shift in zip(sums, shifts):
        torch.bmm(base, pixels.as_strided(size, stride, shift * stride[1]), out=out[:used])
    sums = sums.unflatten(1, (groups, pieces + spare))
    return sums[:, :, 0] if pieces == 1 else sums[:, :, :pieces].sum(2)


def _laid_out(xs: Sequence[Tensor], geometry: Geometry, sizes: list[int], room: int) -> Tensor:
    """Return the pixels of each group, padded with zeros (n G, room, channels)."""
    n, groups, channels = len(xs), geometry.groups, xs[0].shape[1] // geometry.groups
    if _is_pixel_major(xs[0].device):
        pixels = xs[0].new_zeros(n * groups, room, channels)
    else:
        pixels = xs[0].new_zeros(n * groups, channels, room).transpose(1, 2)
    used = pixels[:, : len(xs[0]) * prod(sizes)]
    maps = used.view(n, groups, len(xs[0]), *sizes, channels)
    inside = (slice(None), slice(None), *(slice(size) for size in xs[0].shape[2:]))
    for target, x in zip(maps, xs):
        target[inside] = x.unflatten(1, (groups, channels)).movedim((0, 1, 2), (1, 0, -1))
    return pixels


def _is_pixel_major(device: torch.device) -> bool:
    """Return whether pixels are laid out as rows of their channels, and not channel by channel.

    In rows every shift keeps the alignment that fast products on a GPU need. A CPU needs none, and
    is faster and more accurate channel by channel where channels are few.
    """
    return device.type != "cpu"


def _count_pieces(device: torch.device, groups: int, channels: int, most: int) -> int:
    """Return into how many pieces, at most ``most``, to cut the pixels of each group.

    Few outputs would leave most of a GPU idle, and long sums in TF32 are less accurate.
    """
    if not _is_pixel_major(device):
        return 1
    tiles = groups * (-(-channels // _TILE)) ** 2
    return max(1, min(-(-_BUSY_TILES // tiles), most))


def _ring(xs: Sequence[Tensor], geometry: Geometry) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
    """Yield the columns (B, n G, n_in, T) of locations outside the output that touch the input.

    Each side of the ring comes with its own taps, given per dimension: the others read only zeros.
    """
    n = len(geometry.kernel)
    kernel, reach, groups = geometry.kernel, geometry.reach, len(xs) * geometry.groups
    for axis in range(n):
        size = xs[0].shape[2 + axis]
        # in earlier dimensions the real locations only, in later ones all that touch
        around = [geometry.padding[a] if a < axis else (reach[a], reach[a]) for a in range(n)]
        for side, p in enumerate(geometry.padding[axis]):
            thickness = reach[axis] - p
            if not thickness:
                continue
            count = kernel[axis] - p // geometry.dilation[axis] - 1  # of taps that touch
            touching = [slice(None)] * n
            touching[axis] = slice(count) if side else slice(kernel[axis] - count, None)
            # a slab thicker than the input is the input, padded with zeros
            inside = min(thickness, size)
            padding = [*around]
            padding[axis] = geometry.dilation[axis] * (count - 1), thickness - inside
            if side:
                padding[axis] = padding[axis][::-1]
            start = size - inside if side else 0
            slab = _joined([x.narrow(2 + axis, start, inside) for x in xs])
            some = (*kernel[:axis], count, *kernel[axis + 1 :])
            part = replace(geometry, kernel=some, padding=tuple(padding), groups=groups)
            yield tuple(touching), columns(slab, part)
