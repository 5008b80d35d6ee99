"""A sparse convolution as one Triton kernel, which gathers rows while it multiplies them.

Plain torch writes the gathered patches to memory, 27 times the size of the features, and copies
them in rows of 64 bytes: 20 of the 25 ms of a voxel encoder on an H200.
"""

from __future__ import annotations

import torch
from torch import Tensor

from boxcov._torch.process_state import allows_tf32
from boxcov._torch.triton_kernels import has_triton, launch, tile_side, tl

_ROWS, _DEPTH = 64, 32  # of a tile: output sites, and input channels per step


def can_gather(x: Tensor) -> bool:
    """Whether ``gather_linear`` can take these features."""
    return x.dtype in (torch.float32, torch.float16) and has_triton(x)


def gather_linear(x: Tensor, table: Tensor, weight: Tensor) -> Tensor:
    """Return ``F.linear(patches, weight)`` (out, n_out), in a fixed order of additions.

    The patches (out, taps x C) are the rows of x (V, C) that ``table`` (out, taps) names, and zeros
    where it says V. weight: (n_out, taps x C).
    """
    (n, taps), (count, channels), n_out = table.shape, x.shape, len(weight)
    out = x.new_empty(n, n_out)
    width = min(64, tile_side(n_out))
    launch(
        _gather_and_multiply,
        (-(-n // _ROWS), -(-n_out // width)),
        *(x.contiguous(), table, weight.t().contiguous(), out, n, count),
        TAPS=taps,
        CHANNELS=channels,
        N_OUT=n_out,
        ROWS=_ROWS,
        WIDTH=width,
        DEPTH=16 if channels <= 16 else _DEPTH,
        PRECISION="tf32" if allows_tf32()[0] else "ieee",
    )
    return out


def _gather_and_multiply(  # type: ignore[no-untyped-def]
    x,
    table,
    weight,
    out,
    n,
    count,
    TAPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    N_OUT: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write a tile (ROWS, WIDTH) of the output; ``weight`` is (taps x C, n_out)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    depth = tl.arange(0, DEPTH)
    total = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    for tap in range(TAPS):
        site = tl.load(table + rows * TAPS + tap, mask=rows < n, other=count)
        for start in range(0, CHANNELS, DEPTH):
            channel = start + depth
            is_row = (site < count)[:, None] & (channel < CHANNELS)[None, :]
            a = tl.load(x + site[:, None] * CHANNELS + channel[None, :], mask=is_row, other=0.0)
            is_weight = (channel < CHANNELS)[:, None] & (columns < N_OUT)[None, :]
            at = (tap * CHANNELS + channel)[:, None] * N_OUT + columns[None, :]
            b = tl.load(weight + at, mask=is_weight, other=0.0)
            total += tl.dot(a, b, input_precision=PRECISION)
    is_out = (rows < n)[:, None] & (columns < N_OUT)[None, :]
    tl.store(out + rows[:, None] * N_OUT + columns[None, :], total, mask=is_out)
