"""The Kronecker factors of one layer, from sums over all frames.

    Q = mean over frames and locations of a a^T                (n_in, n_in)
    H = mean over frames of the sum over locations of d d^T    (n_out, n_out)

Only Q is divided by the number of locations T ("expand" scaling): dividing both would lose a
factor T. With ``locations="gradient"`` each location has the weight |d|^2,

    Q = (sum of |d|^2 a a^T) / (sum of |d|^2),

so that ``tr Q tr H`` is exactly the mean over frames of the sum over locations of |a|^2 |d|^2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from boxcov._torch.layers import to_matrix
from boxcov.posterior.kronecker_block import Eigendecomposition, KroneckerBlock, Layer


@dataclass
class FactorSums:
    """The sums of one layer, in float64 so that late frames are not lost to rounding."""

    layer: Layer
    Q: Tensor  # (G, n_in, n_in) sum of a a^T, or of |d|^2 a a^T
    H: Tensor  # (G, n_out, n_out) sum of d d^T
    locations: int = 0
    has_gradient: bool = False  # whether any loss depended on the layer

    @staticmethod
    def zeros(layer: Layer, device: torch.device) -> FactorSums:
        groups = layer.geometry.groups
        Q, H = (
            torch.zeros(groups, n, n, dtype=torch.float64, device=device)
            for n in (layer.n_in, layer.n_out)
        )
        return FactorSums(layer, Q, H)

    def factors(self, frames: int, by_gradient: bool) -> tuple[Tensor, Tensor]:
        """Return Q (G, n_in, n_in) and H (G, n_out, n_out) of ``frames`` frames."""
        H = self.H / frames
        if not by_gradient:
            return self.Q / self.locations, H
        total = self.H.diagonal(dim1=1, dim2=2).sum(1)  # sum of |d|^2; 0 for a group without any
        return self.Q / torch.where(total > 0, total, 1)[:, None, None], H

    def identity(self) -> tuple[Tensor, Tensor]:
        """Return identity matrices in place of Q and H, for ``fisher="identity"``."""
        Q, H = (torch.eye(len(M[0]), device=M.device).expand_as(M) for M in (self.Q, self.H))
        return Q, H


def kronecker_blocks(
    factors: Iterable[tuple[Layer, Tensor, Tensor]], parameters: Mapping[str, nn.Parameter]
) -> dict[str, KroneckerBlock]:
    """Decompose the factors ``(layer, Q, H)`` of each layer; equal Q share one decomposition."""
    decomposed: list[tuple[Tensor, Eigendecomposition]] = []
    blocks = {}
    for layer, Q, H in factors:
        weight = parameters[layer.weight].detach()
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        eigen_Q = next((eigen for other, eigen in decomposed if _equal(other, Q)), None)
        if eigen_Q is None:
            eigen_Q = Eigendecomposition.of(Q, dtype)
            decomposed.append((Q, eigen_Q))
        bias = None if layer.bias is None else parameters[layer.bias].detach().double()
        square_norm = float(to_matrix(weight.double(), bias, layer.geometry).square().sum())
        eigen_H = Eigendecomposition.of(H, dtype)
        blocks[layer.name] = KroneckerBlock(layer, eigen_Q, eigen_H, square_norm)
    return blocks


def _equal(one: Tensor, other: Tensor) -> bool:
    """Layers that read the same tensor have bitwise equal Q."""
    return one.shape == other.shape and torch.equal(one, other)


# checkpoint files


def pack_sums(sums: Iterable[FactorSums]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Return the tensors of a checkpoint and a header entry per layer; equal Q are stored once."""
    tensors: dict[str, Tensor] = {}
    entries = []
    for number, one in enumerate(sums):
        stored = (name for name, Q in tensors.items() if name.endswith("Q") and _equal(Q, one.Q))
        name_Q = next(stored, None)
        if name_Q is None:
            tensors[name_Q := f"{number}.Q"] = one.Q
        tensors[f"{number}.H"] = one.H
        entries.append(
            {
                **one.layer.to_json(),
                "Q": name_Q,
                "H": f"{number}.H",
                "locations": one.locations,
                "reached": one.has_gradient,
            }
        )
    return tensors, entries


def unpack_sums(
    entry: Mapping[str, Any], file: Any, parameters: Mapping[str, nn.Parameter]
) -> FactorSums:
    """Read the sums of one header entry; raise ValueError if they do not fit ``parameters``."""
    layer = Layer.from_json(entry)
    groups = layer.geometry.groups
    for name, shape in (
        (layer.weight, tuple(layer.shape)),
        (layer.bias, (groups * layer.n_out,)),
    ):
        if name is not None and (name not in parameters or tuple(parameters[name].shape) != shape):
            raise ValueError(f"the detector has no parameter {name} of shape {shape}")
    device = parameters[layer.weight].device
    Q = read_sum(file, entry["Q"], [groups, layer.n_in, layer.n_in], device)
    H = read_sum(file, entry["H"], [groups, layer.n_out, layer.n_out], device)
    return FactorSums(layer, Q, H, check_count(entry["locations"]), bool(entry["reached"]))


def check_count(count: Any) -> int:
    """Return ``count`` if it is a valid count; raise ValueError otherwise."""
    if type(count) is not int or not 0 <= count < 1 << 53:
        raise ValueError(f"a count of {count!r}")
    return count


def read_sum(file: Any, name: str, shape: list[int], device: torch.device) -> Tensor:
    """Read a float64 tensor; its header is checked before memory is allocated."""
    header = file.get_slice(name)
    if header.get_shape() != shape or header.get_dtype() != "F64":
        raise ValueError(
            f"{name} has shape {header.get_shape()} and type {header.get_dtype()}, "
            f"expected {shape} and F64"
        )
    tensor: Tensor = file.get_tensor(name)
    if not bool(tensor.isfinite().all()):
        raise ValueError(f"{name} holds a NaN or an infinity")
    return tensor.to(device, copy=True)
