"""Layers as matrix products.

Every layer that boxcov factors is a product ``out = W a`` at T locations: a linear layer at each
row of its input, a convolution at each output pixel, where ``a`` (n_in,) is the patch that the
kernel sees. A grouped layer is G such products. This module holds pure functions of tensors;
``layer_calls.py`` finds the tensors.

Shapes: G groups, B items of the batch, T locations per item, n_in inputs (kernel taps included),
n_out outputs of one group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Geometry:
    """Kernel, stride, padding, dilation and groups of a layer; a linear layer has no kernel.

    ``padding`` is (before, after) per spatial dimension. For a transposed convolution it is the
    padding of the equivalent plain convolution over the input with ``stride - 1`` zeros between
    its pixels.

    >>> Geometry(kernel=(3, 3), stride=(1, 1), padding=((1, 1), (1, 1)), dilation=(1, 1)).taps
    9
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
class Layer:
    """A weight matrix of the posterior, and the parameters that it consists of."""

    weight: str  # name of the parameter
    bias: str | None
    shape: torch.Size  # of the weight
    geometry: Geometry  # kernel, groups, transposed; stride and padding may differ between calls

    @property
    def name(self) -> str:
        return self.weight.removesuffix(".weight")

    @property
    def n_in(self) -> int:
        """Number of columns of the matrix, the bias included."""
        inputs = (
            self.shape[0] // self.geometry.groups if self.geometry.transposed else self.shape[1]
        )
        return int(inputs) * self.geometry.taps + (self.bias is not None)

    @property
    def n_out(self) -> int:
        return int(
            self.shape[1] if self.geometry.transposed else self.shape[0] // self.geometry.groups
        )

    def to_json(self) -> dict[str, Any]:
        """Return the entry of this layer in the header of a file."""
        return {
            "weight": self.weight,
            "bias": self.bias,
            "shape": list(self.shape),
            "geometry": asdict(self.geometry),
        }

    @staticmethod
    def from_json(entry: Mapping[str, Any]) -> Layer:
        """Return the layer of a file's header; raise ValueError if the entry is invalid."""
        geometry, bias = entry["geometry"], entry["bias"]
        kernel, shape, groups = tuple(geometry["kernel"]), tuple(entry["shape"]), geometry["groups"]
        sizes = (*kernel, *shape, groups)
        valid = all(type(size) is int and 0 < size < 1 << 31 for size in sizes)
        if not valid or len(shape) != 2 + len(kernel):
            raise ValueError(f"invalid layer: shape {shape}, kernel {kernel}, {groups} groups")
        if not isinstance(entry["weight"], str) or not (bias is None or isinstance(bias, str)):
            raise ValueError(f"invalid parameter names {entry['weight']!r} and {bias!r}")
        transposed = bool(geometry["transposed"])
        geometry = Geometry(kernel, groups=groups, transposed=transposed)
        return Layer(entry["weight"], bias, torch.Size(shape), geometry)


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
    """Return the weights (..., *shape) and biases (..., out) of matrices: inverts ``to_matrix``.

    >>> geometry = Geometry((2, 2), (2, 2), ((1, 1), (1, 1)), (1, 1), transposed=True)
    >>> weight, bias = torch.randn(3, 5, 2, 2), torch.randn(5)
    >>> again = from_matrix(to_matrix(weight, bias, geometry), weight.shape, True, geometry)
    >>> bool((again[0] == weight).all() and (again[1] == bias).all())
    True
    """
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

    >>> x = torch.randn(2, 4, 5, 5)
    >>> columns(x, Geometry((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), groups=2)).shape
    torch.Size([2, 2, 18, 25])
    """
    if not geometry.kernel:
        return x.transpose(1, 2).unsqueeze(1)
    if geometry.transposed:
        x, geometry = stretch(x, geometry), plain(geometry)
        return _patches(x, geometry, flip=True)
    return _patches(x, geometry, flip=False)


def columns_at(x: Tensor, geometry: Geometry, item: Tensor, location: Tensor) -> Tensor:
    """Return the vectors ``a`` (m, G, n_in) at locations (m,) of items (m,) only."""
    if not geometry.kernel:
        return x[item, location].unsqueeze(1)
    n = len(geometry.kernel)
    seen = (
        _windows(stretch(x, geometry), plain(geometry))
        if geometry.transposed
        else _windows(x, geometry)
    )
    at: list[Tensor] = []
    for size in reversed(seen.shape[2 : 2 + n]):
        at.insert(0, location % size)
        location = location // size
    picked = seen.movedim(1, 1 + n)[(item, *at)]  # (m, channels, *k)
    if geometry.transposed:
        picked = picked.flip(tuple(range(2, 2 + n)))
    return picked.reshape(
        len(item), geometry.groups, seen.shape[1] // geometry.groups * geometry.taps
    )


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
    return Geometry(
        geometry.kernel,
        (1,) * len(geometry.kernel),
        geometry.padding,
        geometry.dilation,
        geometry.groups,
    )


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
