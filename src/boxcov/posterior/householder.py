"""Eigenvectors as rounded Householder reflections: a factor in a quarter of the memory.

r orthonormal columns in n dimensions have n r - r (r + 1) / 2 degrees of freedom. Householder
reflections need no more numbers: up to signs, the columns are the first r of

    R_1 R_2 ... R_r,    R_j = I - 2 v_j v_j^T / (v_j^T v_j),    v_j = (0, ..., 0, 1, stored),

and the other n - r columns are a basis of the complement. A reflection is orthogonal for any v_j,
so the numbers can be rounded to 16 bits, and even a damaged file holds an orthonormal basis.
Column j depends on the first j reflections only: those that must be exact come first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

STEPS = 32767  # largest int16
TENSORS = ("exact", "rounded", "scale", "values", "rest")  # of a packed factor


@dataclass(frozen=True)
class PackedFactor:
    """r eigenvectors of G factors as reflections: the first c exact, the others rounded."""

    size: int  # n
    exact: Tensor  # (G, numbers of c reflections)
    rounded: Tensor  # (G, numbers of r - c reflections) int16
    scale: Tensor  # (G, r - c) of each rounded reflection
    values: Tensor  # (G, r) in the order of the reflections
    rest: Tensor  # (G,) the eigenvalue of all other directions

    @property
    def rank(self) -> int:
        return self.values.shape[1]

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by their names in a file."""
        return {name: getattr(self, name) for name in TENSORS}

    def unpack(self) -> tuple[Tensor, Tensor]:
        """Return the eigenvectors (G, n, n), in columns, and ascending eigenvalues (G, n)."""
        n, r = self.size, self.rank
        G, dtype = len(self.values), self.values.dtype
        v = torch.zeros(G, n, n, dtype=torch.float64, device=self.values.device)
        counts = torch.tensor(_counts(n, r)[r - self.scale.shape[1] :], device=v.device).long()
        rounded = self.rounded * self.scale.double().repeat_interleave(counts, 1)
        v[:, :r][:, _stored_mask(n, r, v.device)] = torch.cat([self.exact.double(), rounded], 1)
        tau = 2 / (1 + v[:, :r].square().sum(2))
        v = torch.linalg.householder_product(v.transpose(1, 2), tau)
        values = torch.cat([self.values, self.rest.unsqueeze(1).expand(G, n - r)], 1)
        values, order = values.sort(dim=1, stable=True)
        vectors = v.gather(2, order.unsqueeze(1).expand(G, n, n))
        return vectors.to(dtype).contiguous(), values.contiguous()


def pack(vectors: Tensor, values: Tensor, rest: Tensor, exact: int) -> PackedFactor:
    """Pack orthonormal columns (G, n, r); the first ``exact`` reflections are not rounded."""
    n, r = vectors.shape[1:]
    dtype = values.dtype
    reflections = torch.geqrf(vectors.double())[0].transpose(1, 2)
    numbers = reflections[:, _stored_mask(n, r, vectors.device)]
    counts = _counts(n, r)
    first = sum(counts[:exact])
    numbers, kept = numbers[:, first:], numbers[:, :first]
    # the reflection that each number belongs to
    each = torch.tensor(counts[exact:], dtype=torch.long, device=vectors.device)
    own = torch.arange(r - exact, device=vectors.device).repeat_interleave(each)
    most = numbers.new_zeros(len(numbers), r - exact).scatter_reduce(
        1, own.expand(len(numbers), -1), numbers.abs(), "amax"
    )
    scale = (most / STEPS).to(dtype)
    steps = scale.double()[:, own]
    rounded = torch.where(steps > 0, numbers / steps, 0).round().clamp(-STEPS, STEPS)
    return PackedFactor(n, kept.to(dtype), rounded.to(torch.int16), scale, values, rest)


def check_packed(packed: PackedFactor, groups: int, what: str) -> None:
    """Raise ValueError if the tensors of a file do not fit together, before any allocation."""
    n, r = packed.size, packed.values.shape[-1]
    c = r - packed.scale.shape[-1]
    exact, rounded = sum(_counts(n, r)[:c]), sum(_counts(n, r)[c:])
    shapes: list[tuple[int, ...]] = [(groups, m) for m in (exact, rounded, r - c, r)] + [(groups,)]
    for (name, tensor), shape in zip(packed.tensors().items(), shapes):
        dtype = torch.int16 if name == "rounded" else packed.values.dtype
        if not 0 <= c <= r <= n or tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise ValueError(
                f"{what} holds {name} of shape {tuple(tensor.shape)} and {tensor.dtype} for {r} "
                f"reflections, {c} exact, in {n} dimensions and {groups} groups"
            )
    largest = ((packed.exact, 1.001), (packed.scale, 1.001 / STEPS))
    if not all(bool((t.abs() <= most).all()) for t, most in largest):
        raise ValueError(f"{what} has numbers out of the range of reflections")


def _counts(n: int, r: int) -> range:
    """Return how many numbers each of r reflections has."""
    return range(n - 1, n - 1 - r, -1)


def _stored_mask(n: int, r: int, device: torch.device) -> Tensor:
    """Return the mask (r, n) of the stored numbers, one row per reflection."""
    return torch.ones(r, n, dtype=torch.bool, device=device).triu(1)
