"""A factor in a quarter of its room: the leading eigenvectors as rounded reflections, and one eigenvalue for all other directions.

r orthonormal columns in n dimensions have the freedom of n r - r (r + 1) / 2 numbers, the triangle of a symmetric matrix if r = n. Householder's
reflections use no more: up to signs, which eigenvectors do not have, the columns are the first r of

    R_1 R_2 ... R_r,    R_j = I - 2 v_j v_j^T / (v_j^T v_j),    v_j = (0, ..., 0, 1, numbers that are stored),

and the other n - r columns are a basis of what is left. A reflection is orthogonal whatever v_j is, so the numbers can be rounded to 16 bits,
and no file, however damaged, holds a basis that is not orthonormal. Column j depends on the first j reflections alone: those that must be exact
come first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

STEPS = 32767  # of 16 bits, to each side


@dataclass(frozen=True)
class PackedFactor:
    """The eigenvectors of r eigenvalues of a factor, one a group, as reflections: the first c exact, the others rounded."""

    size: int  # n
    exact: Tensor  # (G, numbers of c reflections), one reflection after the other
    rounded: Tensor  # (G, numbers of r - c reflections) int16
    scale: Tensor  # (G, r - c) of each rounded one
    values: Tensor  # (G, r) in the order of the reflections
    rest: Tensor  # (G,) the eigenvalue of all other directions

    @property
    def rank(self) -> int:
        return self.values.shape[1]

    def tensors(self) -> dict[str, Tensor]:
        """By the name that a file has them under."""
        return {
            "exact": self.exact,
            "rounded": self.rounded,
            "scale": self.scale,
            "values": self.values,
            "rest": self.rest,
        }

    def opened(self) -> tuple[Tensor, Tensor]:
        """Eigenvectors (G, n, n) in columns and eigenvalues (G, n), ascending.

        >>> from boxcov.posterior.kronecker_block import Eigendecomposition
        >>> x = torch.randn(1, 50, 6, generator=torch.Generator().manual_seed(0))
        >>> factor = Eigendecomposition.of(x.transpose(1, 2) @ x / 50, torch.float32)
        >>> vectors, values = pack(factor.vectors.flip(2), factor.values.flip(1), torch.zeros(1), exact=2).opened()
        >>> bool((values - factor.values).abs().max() == 0), bool(((vectors * factor.vectors).sum(1).abs() > 1 - 1e-6).all())
        (True, True)
        """
        n, r = self.size, self.rank
        G, dtype = len(self.values), self.values.dtype
        v = torch.zeros(G, n, n, dtype=torch.float64, device=self.values.device)
        if r:
            steps = self.scale.double().repeat_interleave(
                _counts(n, r - self.scale.shape[1], r, self.scale.device), 1
            )
            v[:, :r][:, _below(n, r, v.device)] = torch.cat(
                [self.exact.double(), self.rounded * steps], 1
            )
            tau = 2 / (1 + v[:, :r].square().sum(2))
            v = torch.linalg.householder_product(v.transpose(1, 2), tau)
        else:
            v = torch.eye(n, dtype=torch.float64, device=v.device).expand(G, n, n)
        values = torch.cat([self.values, self.rest.unsqueeze(1).expand(G, n - r)], 1)
        values, order = values.sort(dim=1, stable=True)
        vectors = v.gather(2, order.unsqueeze(1).expand(G, n, n))
        return vectors.to(dtype).contiguous(), values.contiguous()


def pack(vectors: Tensor, values: Tensor, rest: Tensor, exact: int) -> PackedFactor:
    """The columns (G, n, r), orthonormal, as reflections; the first ``exact`` are not rounded."""
    n, r = vectors.shape[1:]
    dtype = values.dtype
    numbers = (
        torch.geqrf(vectors.double())[0].transpose(1, 2)[:, _below(n, r, vectors.device)]
        if r
        else vectors.new_zeros(len(vectors), 0)
    )
    counts = _counts(n, 0, r, vectors.device)
    first = int(counts[:exact].sum())
    later = counts[exact:]
    own = torch.repeat_interleave(
        torch.arange(r - exact, device=vectors.device), later
    )  # the reflection of each number
    numbers, kept = numbers[:, first:], numbers[:, :first]
    most = numbers.new_zeros(len(numbers), r - exact).scatter_reduce(
        1, own.expand(len(numbers), -1), numbers.abs(), "amax"
    )
    scale = (most / STEPS).to(dtype)
    steps = scale.double()[:, own]
    rounded = (
        torch.where(steps > 0, numbers / steps, 0).round().clamp(-STEPS, STEPS).to(torch.int16)
    )
    return PackedFactor(n, kept.to(dtype), rounded, scale, values, rest)


def numbers_of(size: int, start: int, stop: int) -> int:
    """How many numbers the reflections from ``start`` to ``stop`` have.

    >>> numbers_of(4, 0, 2), numbers_of(4, 2, 4)
    (5, 1)
    """
    return (stop - start) * (2 * size - start - stop - 1) // 2


def check_packed(packed: PackedFactor, groups: int, what: str) -> None:
    """Whether what a file holds fits together, before any memory is taken for it.

    >>> none = torch.zeros(1, 0)
    >>> check_packed(PackedFactor(3, none, none.to(torch.int16), none, torch.zeros(1, 2), torch.zeros(1)), 1, "Q of head.0")
    Traceback (most recent call last):
    ...
    ValueError: Q of head.0 holds 0 numbers of 2 reflections in 3 dimensions, expected 3
    """
    n, r, exact, rounded = (
        packed.size,
        packed.values.dim() == 2 and packed.values.shape[1],
        packed.exact,
        packed.rounded,
    )
    c = r - packed.scale.shape[-1]
    if not 0 <= c <= r <= n or {len(t) for t in packed.tensors().values()} != {groups}:
        raise ValueError(
            f"{what} holds {r} reflections, {c} of them exact, in {n} dimensions and {groups} groups"
        )
    sizes = [
        (exact, numbers_of(n, 0, c)),
        (rounded, numbers_of(n, c, r)),
        (packed.scale, r - c),
        (packed.values, r),
    ]
    for tensor, expected in sizes:
        if tuple(tensor.shape) != (groups, expected):
            raise ValueError(
                f"{what} holds {tensor.numel()} numbers of {r} reflections in {n} dimensions, expected {groups * expected}"
            )
    dtypes = {t.dtype for t in (exact, packed.scale, packed.values, packed.rest)}
    if (
        dtypes not in ({torch.float32}, {torch.float64})
        or rounded.dtype != torch.int16
        or packed.rest.dim() != 1
    ):
        raise ValueError(f"{what} is of {dtypes} and {rounded.dtype}")
    if not all(
        bool((t.abs() <= most).all()) for t, most in ((exact, 1.001), (packed.scale, 1.001 / STEPS))
    ):
        raise ValueError(f"{what} has reflections that no orthonormal basis has")
    if not all(bool(((t >= 0) & t.isfinite()).all()) for t in (packed.values, packed.rest)):
        raise ValueError(f"{what} holds a NaN, an infinity or a negative eigenvalue")


def _counts(n: int, start: int, stop: int, device: torch.device) -> Tensor:
    return n - 1 - torch.arange(start, stop, device=device)


def _below(n: int, r: int, device: torch.device) -> Tensor:
    """Where the stored numbers are (r, n), a row a reflection."""
    return torch.ones(r, n, dtype=torch.bool, device=device).triu(1)
