"""Linear layers and convolutions: their calls, and the matrix products that these are.

Every layer that boxcov factors is a product ``out = W a`` at T locations: a linear layer at each
row of its input, a convolution at each output pixel, where ``a`` (n_in,) is the patch that the
kernel sees. A grouped layer is G such products.

Shapes: G groups, B items of the batch, T locations per item, n_in inputs (kernel taps included),
n_out outputs of one group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_TRANSPOSED = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
_CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)
_DIMENSIONS: dict[Any, int] = {F.linear: 0}  # of the kernel, by function
_DIMENSIONS |= {func: n for kind in (_CONVOLUTIONS, _TRANSPOSED) for n, func in enumerate(kind, 1)}
_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED_ARGUMENTS = (*_ARGUMENTS[:5], "output_padding", "groups", "dilation")


@dataclass(frozen=True)
class Geometry:
    """Kernel, stride, padding, dilation and groups of a layer; a linear layer has no kernel.

    ``padding`` is (before, after) per spatial dimension. For a transposed convolution it is the
    padding of the equivalent plain convolution over the input with ``stride - 1`` zeros between
    its pixels.
    """

    kernel: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    padding: tuple[tuple[int, int], ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1
    transposed: bool = False

    @property
    def taps(self) -> int:
        return prod(self.kernel)

    @property
    def reach(self) -> tuple[int, ...]:
        """Distance from the first to the last tap of the kernel, per dimension."""
        return tuple(d * (k - 1) for d, k in zip(self.dilation, self.kernel))


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer: ``func(x, weight, bias, **rest)``."""

    func: Callable[..., Tensor]
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    rest: Mapping[str, Any]
    geometry: Geometry

    def __call__(
        self, x: Tensor | None = None, weight: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        """Run the call, with the given tensors in place of its own."""
        return self.func(
            self.x if x is None else x,
            self.weight if weight is None else weight,
            self.bias if bias is None else bias,
            **self.rest,
        )

    @property
    def batched_x(self) -> Tensor:
        """The input as (B, channels, *spatial), or (B, T, n_in) for a linear layer."""
        return self.batched_out(self.x.detach())

    def batched_out(self, d: Tensor, lead: int = 0) -> Tensor:
        """Return a gradient of the output in the same layout, with ``lead`` dimensions in front."""
        if self.geometry.kernel:
            missing = d.dim() - lead < 2 + len(self.geometry.kernel)
            return d.unsqueeze(lead) if missing else d
        front, rest = d.shape[:lead], d.shape[lead:]
        if len(rest) <= 2:  # (n,) is B = 1, (B, n) has one location
            return d.reshape(*front, -1, 1, rest[-1])
        return d.reshape(*front, rest[0], -1, rest[-1])


def parse(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> LayerCall | None:
    """Return the call as a matrix product, or None if it is another function."""
    n = _DIMENSIONS.get(func)
    if n is None:
        return None
    is_transposed = func in _TRANSPOSED
    given = {**dict(zip(_TRANSPOSED_ARGUMENTS if is_transposed else _ARGUMENTS, args)), **kwargs}
    geometry = _geometry(given, n, is_transposed) if n else Geometry()
    rest = {name: value for name, value in given.items() if name not in ("input", "weight", "bias")}
    return LayerCall(func, given["input"], given["weight"], given.get("bias"), rest, geometry)


def _geometry(given: Mapping[str, Any], n: int, is_transposed: bool) -> Geometry:
    """The geometry of a convolution of n dimensions with the given arguments."""

    def each(name: str, default: int) -> tuple[int, ...]:
        value = given.get(name, default)
        values = (value,) if isinstance(value, int) else tuple(value)
        return values * n if len(values) == 1 else values

    kernel, dilation = tuple(given["weight"].shape[-n:]), each("dilation", 1)
    reach = [d * (k - 1) for d, k in zip(dilation, kernel)]
    if is_transposed:
        pairs = zip(reach, each("padding", 0), each("output_padding", 0))
        padding = tuple((r - p, r - p + extra) for r, p, extra in pairs)
    elif given.get("padding") == "valid":
        padding = ((0, 0),) * n
    elif given.get("padding") == "same":  # torch adds the odd pixel at the end
        padding = tuple((r // 2, r - r // 2) for r in reach)
    else:
        padding = tuple((p, p) for p in each("padding", 0))
    groups = given.get("groups", 1)
    return Geometry(kernel, each("stride", 1), padding, dilation, groups, is_transposed)


# weights and gradients of weights <-> matrices


def to_matrix(weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """Return weights (..., *shape) and biases (..., out) as matrices (..., G, n_out, n_in).

    The bias is the last column.
    """
    spatial = len(geometry.kernel)
    lead = weight.shape[: weight.dim() - 2 - spatial]
    first = len(lead)
    # (..., G, out / G, in, *k), or (..., G, in, out / G, *k) if transposed
    grouped = weight.unflatten(first, (geometry.groups, -1))
    if geometry.transposed:
        grouped = grouped.transpose(first + 1, first + 2)
    matrix: Tensor = grouped.flatten(first + 2)  # (..., G, n_out, n_in)
    if bias is None:
        return matrix
    return torch.cat([matrix, bias.reshape(*lead, geometry.groups, -1, 1)], dim=-1)


def from_matrix(
    matrix: Tensor, shape: torch.Size, has_bias: bool, geometry: Geometry
) -> tuple[Tensor, Tensor | None]:
    """Return the weights (..., *shape) and biases (..., out) of matrices: inverts ``to_matrix``."""
    lead = matrix.shape[:-3]
    first = len(lead)
    bias = None
    if has_bias:
        matrix, column = matrix[..., :-1], matrix[..., -1]
        bias = column.reshape(*lead, -1)
    n_out = matrix.shape[-2]
    grouped = matrix.reshape(*lead, geometry.groups, n_out, -1, *geometry.kernel)
    if geometry.transposed:
        grouped = grouped.transpose(first + 1, first + 2)
    return grouped.reshape(*lead, *shape), bias


# inputs and gradients of outputs -> the vectors a and d at every location


def columns(x: Tensor, geometry: Geometry) -> Tensor:
    """Return the vectors ``a`` at every location (B, G, n_in, T), without the 1 of a bias.

    x is (B, channels, *spatial), or (B, T, n_in) for a linear layer.
    """
    if not geometry.kernel:
        return x.transpose(1, 2).unsqueeze(1)
    if geometry.transposed:
        return _patches(stretch(x, geometry), plain(geometry), flip=True)
    return _patches(x, geometry, flip=False)


def rows(d: Tensor, geometry: Geometry) -> Tensor:
    """Return the gradients ``d`` at every location (..., B, G, n_out, T).

    d is (..., B, out, *spatial), or (..., B, T, out) for a linear layer.
    """
    if not geometry.kernel:
        return d.transpose(-1, -2).unsqueeze(-3)
    channel = d.dim() - 1 - len(geometry.kernel)
    grouped: Tensor = d.unflatten(channel, (geometry.groups, -1))
    return grouped.flatten(channel + 2)


def gram(vectors: Tensor) -> Tensor:
    """Return the sum over items and locations of the outer products: (B, G, n, T) -> (G, n, n)."""
    n, locations = vectors.shape[2:]
    if n <= 4:  # a reduction adds pairwise, which rounds less than a long product
        return (vectors.unsqueeze(2) * vectors.unsqueeze(3)).sum((0, 4))
    if len(vectors) > 1 and locations < n:  # few locations: one copy is cheaper than many products
        vectors = vectors.permute(1, 2, 0, 3).flatten(2).unsqueeze(0)
    products = vectors @ vectors.transpose(-1, -2)  # one per item, without a copy
    return products[0] if len(products) == 1 else products.sum(0)


def stretch(x: Tensor, geometry: Geometry) -> Tensor:
    """Return the input of a transposed convolution with ``stride - 1`` zeros between the pixels."""
    sizes = [s * (n - 1) + 1 for s, n in zip(geometry.stride, x.shape[2:])]
    out = x.new_zeros(*x.shape[:2], *sizes)
    out[(slice(None), slice(None), *(slice(None, None, s) for s in geometry.stride))] = x
    return out


def plain(geometry: Geometry) -> Geometry:
    """Return the plain convolution that equals a transposed one over its stretched input."""
    return replace(geometry, stride=(1,) * len(geometry.kernel), transposed=False)


def _patches(x: Tensor, geometry: Geometry, flip: bool) -> Tensor:
    x = _windows(x, geometry)
    n = len(geometry.kernel)
    x = x.permute(0, 1, *range(2 + n, 2 + 2 * n), *range(2, 2 + n))
    if flip:  # a transposed convolution reads its taps backwards
        x = x.flip(tuple(range(2, 2 + n)))
    batch, channels = x.shape[:2]
    return x.reshape(batch, geometry.groups, channels // geometry.groups * geometry.taps, -1)


def _windows(x: Tensor, geometry: Geometry) -> Tensor:
    """Return a view of the patches at every location (B, channels, *T, *k)."""
    x = pad(x, geometry.padding)
    for axis, (reach, step, dilation) in enumerate(
        zip(geometry.reach, geometry.stride, geometry.dilation)
    ):
        x = x.unfold(2 + axis, reach + 1, step)[..., ::dilation]
    return x


def pad(x: Tensor, padding: tuple[tuple[int, int], ...]) -> Tensor:
    """Add zeros (before, after) in each spatial dimension; negative numbers crop."""
    if not any(p for pair in padding for p in pair):
        return x
    return F.pad(x, [p for pair in reversed(padding) for p in pair])
