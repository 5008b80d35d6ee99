"""``(t + other) * factor`` of tangents in one pass over memory: one Triton kernel, or plain torch.

The two terms have different layouts, and torch takes a pass for each operation: on an H200 these
passes take longer than the convolutions between them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from boxcov._torch.triton_kernels import has_triton, launch, tl

_BLOCK = 1024  # numbers per program and direction
_MAX_OFFSET = 2**31  # the kernel counts in 32 bits


def scaled_sum(
    t: Tensor, other: Tensor | None, factor: Tensor | None, multiplier: float, out: Tensor
) -> Tensor:
    """Write ``(t + other) * factor * multiplier`` to ``out`` (k, *shape), and return ``out``.

    The product is taken in float32. factor: broadcast to (*shape).
    """
    given = (t, *(() if other is None else (other,)))
    if has_triton(out) and _run_kernel(given, factor, multiplier, out):
        return out
    given = given if out.dtype == torch.float16 else tuple(x.float() for x in given)
    total = given[0] if other is None else given[0] + given[1]
    # a number would be rounded to float16, a tensor of float32 is not
    ones = torch.ones(1, device=out.device) if factor is None else factor
    return torch.mul(total, ones * multiplier, out=out)


class Layout(NamedTuple):
    """A tensor (k, *shape) as (k, pixels, C), with neighbouring channels."""

    tensor: Tensor
    direction: int  # stride from one direction to the next
    pixel: int  # stride from one pixel to the next

    @staticmethod
    def of(x: Tensor, channel: int) -> Layout | None:
        """The layout of ``x`` (k, *shape) with a dimension ``channel``; None if it has none."""
        x = x.movedim(channel, -1)
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            return None
        pixel = following = None
        for size, stride in list(zip(x.shape, x.stride()))[-2:0:-1]:
            if size == 1:
                continue
            if following is not None and stride != following:
                return None
            pixel = stride if pixel is None else pixel
            following = stride * size
        last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
        return None if last >= _MAX_OFFSET else Layout(x, x.stride(0), pixel or 0)


def channel_dim(t: Tensor) -> int:
    """The dimension of tangents (k, *shape) whose numbers are neighbours in memory.

    That of the channels for maps (k, B, C, H, W) with the channels last, else the last one.
    """
    return 2 if t.dim() == 5 and t.stride(2) == 1 else t.dim() - 1


def _run_kernel(
    given: tuple[Tensor, ...], factor: Tensor | None, multiplier: float, out: Tensor
) -> bool:
    """Whether the layouts suit the kernel, which then has run."""
    channel, k, n = channel_dim(out), len(out), out[0].numel()
    layouts = [Layout.of(x, channel) for x in (*given, out)]
    if factor is not None:
        factor = factor.view(torch.uint8) if factor.dtype == torch.bool else factor
        layouts.append(Layout.of(factor.expand(out.shape[1:]).unsqueeze(0), channel))
    found = [layout for layout in layouts if layout is not None]
    if len(found) < len(layouts) or n * k == 0 or n * k >= _MAX_OFFSET:
        return False
    a, b, to = found[0], found[len(given) - 1], found[len(given)]
    f = found[-1]  # ``out`` if there is no factor: it is not read
    launch(
        _add_and_scale,
        (-(-n // _BLOCK),),
        *(a.tensor, b.tensor, f.tensor, to.tensor, n, k, multiplier),
        *(a.direction, a.pixel, b.direction, b.pixel, f.pixel, to.direction, to.pixel),
        CHANNELS=out.shape[channel],
        HAS_OTHER=len(given) > 1,
        HAS_FACTOR=factor is not None,
        BLOCK=_BLOCK,
    )
    return True


def _add_and_scale(  # type: ignore[no-untyped-def]
    a,
    b,
    factor,
    out,
    n,
    k,
    multiplier,
    a_direction,
    a_pixel,
    b_direction,
    b_pixel,
    factor_pixel,
    out_direction,
    out_pixel,
    CHANNELS: tl.constexpr,
    HAS_OTHER: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write BLOCK numbers of each of the k directions; the factor is read once."""
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_number = number < n
    pixel, channel = number // CHANNELS, number % CHANNELS
    scale = tl.full((BLOCK,), 1.0, tl.float32) * multiplier
    if HAS_FACTOR:
        from_factor = factor + pixel * factor_pixel + channel
        scale *= tl.load(from_factor, mask=is_number, other=0).to(tl.float32)
    for i in range(k):
        from_a = a + i * a_direction + pixel * a_pixel + channel
        total = tl.load(from_a, mask=is_number, other=0.0).to(tl.float32)
        if HAS_OTHER:
            from_b = b + i * b_direction + pixel * b_pixel + channel
            total += tl.load(from_b, mask=is_number, other=0.0).to(tl.float32)
        to_out = out + i * out_direction + pixel * out_pixel + channel
        tl.store(to_out, (total * scale).to(out.dtype.element_ty), mask=is_number)
