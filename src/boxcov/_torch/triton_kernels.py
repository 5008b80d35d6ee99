"""Triton kernels: on which devices they can be used, and how they are launched.

Triton comes with the CUDA builds of torch. Where it cannot be used, plain torch computes the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any
from warnings import warn

import torch
from torch import Tensor

from boxcov.errors import BoxcovWarning

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

__all__ = ["has_triton", "launch", "tile_side", "tl"]

_SIDE = 16


def has_triton(x: Tensor) -> bool:
    """Return whether kernels can be launched on the device of ``x``."""
    return triton is not None and x.is_cuda and _can_launch(x.device)


def launch(
    kernel: Callable[..., None], grid: tuple[int, ...], *args: Any, **constants: Any
) -> None:
    """Run a kernel on the device of its first argument, which may not be the current one."""
    with torch.cuda.device_of(args[0]):
        _compiled(kernel)[grid](*args, **constants)


def tile_side(count: int) -> int:
    """Return the side of a tile that holds ``count``: at least 16, for tensor cores."""
    return max(_SIDE, 1 << (count - 1).bit_length())


@cache
def _compiled(kernel: Callable[..., None]) -> Any:
    return triton.jit(kernel)


@cache
def _can_launch(device: torch.device) -> bool:
    """Try a small kernel, once per device.

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
    """The square (16, 16) of a matrix of ones, without waiting for it."""
    ones = torch.ones(_SIDE, _SIDE, device=device)
    out = torch.empty_like(ones)
    launch(_square, (1,), ones, out, SIDE=_SIDE)
    return out


def _square(x, out, SIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the product of a matrix with itself, in the precision that the kernels use."""
    at = tl.arange(0, SIDE)[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
    a = tl.load(x + at)
    tl.store(out + at, tl.dot(a, a, input_precision="tf32x3"))
