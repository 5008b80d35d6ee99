"""A sparse convolution as one Triton kernel, which gathers rows while it multiplies them.

Plain torch writes the gathered patches to memory, 27 times the size of the features, and copies
them in rows of 64 bytes: 20 of the 25 ms of a voxel encoder on an H200. Triton comes with the CUDA
builds of torch. Where it cannot be used, plain torch computes the same.
"""

from __future__ import annotations

from functools import cache
from typing import Any
from warnings import warn

import torch
from torch import Tensor

from boxcov._torch.process_state import allows_tf32
from boxcov.errors import BoxcovWarning

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

_ROWS, _DEPTH = 64, 32  # of a tile: output sites, and input channels per step


def can_gather(x: Tensor) -> bool:
    """Whether ``gather_linear`` can take these features."""
    is_taken = x.is_cuda and x.dtype in (torch.float32, torch.float16)
    return triton is not None and is_taken and _can_launch(x.device)


@cache
def _can_launch(device: torch.device) -> bool:
    """Try the kernel, once per device.

    Triton needs a C compiler, which slim containers lack, and a folder that it may write to. Before
    compute capability 8.0 it is not supported. On other GPUs than NVIDIA's a precision may lack.
    """
    if torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        _try_launch(device)
    except Exception as error:  # of any kind: compilers, drivers and files are involved
        reason = (str(error).splitlines() or [""])[0]
        warn(
            f"Triton's kernels do not run on {device} ({type(error).__name__}: {reason}), so plain "
            "torch is used, which is slower: is there a C compiler, and can the folder "
            "~/.triton, or TRITON_CACHE_DIR, be written to?",
            BoxcovWarning,
            stacklevel=2,
        )
        return False
    return True


def _try_launch(device: torch.device) -> Tensor:
    """Gather two sites of one channel, without waiting for the result (2, 1), which is 1 and 0."""
    one = torch.ones(1, 1, device=device)
    return gather_linear(one, torch.tensor([[0], [1]], device=device), one)


@cache
def _compiled_kernel() -> Any:
    return triton.jit(_gather_and_multiply)


def gather_linear(x: Tensor, table: Tensor, weight: Tensor) -> Tensor:
    """Return ``F.linear(patches, weight)`` (out, n_out), in a fixed order of additions.

    The patches (out, taps x C) are the rows of x (V, C) that ``table`` (out, taps) names, and zeros
    where it says V. weight: (n_out, taps x C).
    """
    (n, taps), (count, channels), n_out = table.shape, x.shape, len(weight)
    out = x.new_empty(n, n_out)
    width = min(64, max(16, 1 << (n_out - 1).bit_length()))  # tensor cores take tiles of 16
    kernel = _compiled_kernel()[-(-n // _ROWS), -(-n_out // width)]
    with torch.cuda.device_of(x):  # which may not be the current one
        kernel(
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
