"""How tangents are stored: in the dtype of their tensor, or in float16 with a scale.

Float16 has as many digits as TF32, half the bytes, and twice the speed in a convolution, but a
small range. Tangents are linear, so each tensor of them has a scale of its own: a power of two,
which rounds nothing, measured on the first frame. It leaves a factor of 1,000 above the largest
tangent of that frame, and 1,000,000 below it before digits are lost. A tangent that overflows is
infinite, and the covariance from it is not finite, which the check of every result notices.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from math import frexp, isfinite

import torch
from torch import Tensor

from boxcov.predict.forward_mode.sum_kernel import channel_dim, scaled_sum

_LARGEST = 6  # exponent of the largest number of the first frame; that of float16 is 16


@dataclass(frozen=True)
class Tangent:
    """Tangents (k, *shape) of a tensor: ``(t + other) * factor * scale``.

    The factor (*shape) and the sum are taken where the tangents are read.
    """

    t: Tensor  # (k, *shape)
    factor: Tensor | None = None
    scale: float | None = None  # of float16 tangents of a float32 tensor
    other: Tensor | None = None  # (k, *shape); only with a scale

    def whole(self) -> Tensor:
        """The tangents in the dtype of their tensor."""
        if self.scale is not None:
            out = empty_tangents(self.t.shape, self.t, torch.float32)
            return scaled_sum(self.t, self.other, self.factor, self.scale, out)
        if self.factor is None:
            return self.t
        out = empty_tangents(self.t.shape, self.t, self.t.dtype)
        return torch.mul(self.t, self.multiplier(), out=out)

    @property
    def whole_dtype(self) -> torch.dtype:
        """The dtype of the tensor."""
        return self.t.dtype if self.scale is None else torch.float32

    def half(self, scale: float) -> Tensor:
        """The tangents divided by ``scale``, in float16."""
        if scale == self.scale and self.factor is None and self.other is None:
            return self.t
        return self.half_into(empty_tangents(self.t.shape, self.t, torch.float16), scale)

    def half_into(self, out: Tensor, scale: float) -> Tensor:
        """Write the tangents divided by ``scale`` to ``out``."""
        own = 1.0 if self.scale is None else self.scale
        return scaled_sum(self.t, self.other, self.factor, own / scale, out)

    def multiplier(self) -> Tensor:
        """The factor in the dtype and memory format of ``t``: other strides are slow."""
        assert self.factor is not None
        return channels_last(self.factor.to(self.t.dtype))

    def scaled(self, factor: Tensor) -> Tangent:
        return replace(self, factor=factor if self.factor is None else self.factor * factor)

    def simple(self) -> Tangent:
        """The same tangents as one tensor, with no more than a scale beside it."""
        return self if self.factor is None and self.other is None else Tangent(self.whole())


class Float16Operands:
    """Scales of tangents in float16, and weights in float16; cached from frame to frame.

    What has no scale is not stored in float16.
    """

    def __init__(self) -> None:
        self._scales: dict[Hashable, float | None] = {}
        self._operands: dict[Hashable, Tensor] = {}

    def scale(self, key: Hashable, values: Callable[[], Tensor]) -> float | None:
        """The scale of what ``key`` names; measured on ``values()`` at the first call.

        None, for good, if these are all zero: in another frame they may be of any size.
        """
        if key not in self._scales:
            found = values()
            largest = float(found.abs().amax()) if found.numel() else 0.0
            is_size = isfinite(largest) and largest > 0
            self._scales[key] = 2.0 ** (frexp(largest)[1] - _LARGEST) if is_size else None
        return self._scales[key]

    def operand(self, key: Hashable, weight: Callable[[], Tensor], factor: float) -> Tensor:
        """A weight times ``factor``; both must be the same in every call."""
        if key not in self._operands:
            self._operands[key] = channels_last((weight() * factor).half())
        return self._operands[key]


def channels_last(x: Tensor) -> Tensor:
    """``x`` in the memory format in which convolutions of two dimensions are fastest."""
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


def empty_tangents(shape: torch.Size, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory for tangents (k, *shape); those of maps have their channels last if ``like`` has."""
    if len(shape) != 5 or channel_dim(like) != 2:
        return like.new_empty(shape, dtype=dtype)
    k, batch, channels, height, width = shape
    out = like.new_empty((k, batch, height, width, channels), dtype=dtype)
    return out.permute(0, 1, 4, 2, 3)
