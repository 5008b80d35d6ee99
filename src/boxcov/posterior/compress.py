"""Compress a posterior with an error bound.

Of an input factor ``Q = U diag(l) U^T``, eigenvalues that are close to each other compared with the
prior are replaced by one number, and their eigenvectors by any basis of the same space: low rank
plus a multiple of the identity. The other eigenvectors are stored as rounded Householder
reflections. The result is another factor Q'. A layer's precision is
``n m_p Q + tau I`` for each eigenvalue m_p of H. With m the largest, ``a = tau / (n m)`` and

    delta = || (Q + a I)^-1/2 (Q' - Q) (Q + a I)^-1/2 ||_2,

the new precision lies between 1 - delta and 1 + delta times the old one in every direction: for
this m, and for smaller m too, because then ``a`` is larger. So every variance of any linear
function of the weights lies within 1 / (1 +- delta) of what it was: the trace and every diagonal
entry of every box's covariance, on any frame. delta is computed from the values as they are read
back from the file.

Eigenvalues far below ``tau / (n m)`` all have the variance 1 / tau and become one number.

r orthonormal columns in n dimensions have n r - r (r + 1) / 2 degrees of freedom. Householder
reflections need no more numbers: up to signs, the columns are the first r of

    R_1 R_2 ... R_r,    R_j = I - 2 v_j v_j^T / (v_j^T v_j),    v_j = (0, ..., 0, 1, stored),

and the other n - r columns are a basis of the complement. A reflection is orthogonal for any v_j,
so the numbers can be rounded to 16 bits, and even a damaged file holds an orthonormal basis.
Column j depends on the first j reflections only: those that must be exact come first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from boxcov._torch.process_state import full_precision
from boxcov.errors import BoxcovError, join_names
from boxcov.posterior.kronecker_block import Eigendecomposition
from boxcov.posterior.posterior import Posterior

STEPS = 32767  # largest int16
TENSORS = ("exact", "rounded", "scale", "values", "rest")  # of a packed factor
_ROUNDING = 6e-5  # approximate relative rounding error of a reflection in 16 bits
_MERGING = 0.9  # share of delta for merged eigenvalues; the rest is for rounding


def compress(posterior: Posterior, error: float = 0.01) -> Posterior:
    """Return a smaller posterior whose variances differ by at most the relative ``error``.

    This holds for every linear function of the weights. The achieved bound is ``Posterior.error``.
    The factors H are small and stay as they are.
    """
    _check(posterior, error)
    max_delta = error / (1 + error)
    factors: dict[int, Eigendecomposition] = {}  # by id: layers may share one
    floors: dict[int, Tensor] = {}
    for name, block in posterior.blocks.items():
        largest = posterior.n_data * block.H.values.double().amax(1)
        floor = posterior.tau(name) / largest.clamp(min=1e-300)
        factors[id(block.Q)] = block.Q
        floors[id(block.Q)] = torch.minimum(floors.get(id(block.Q), floor), floor)
    compressed = {key: _compress_factor(Q, floors[key], max_delta) for key, Q in factors.items()}
    blocks = {
        name: replace(block, Q=compressed[id(block.Q)][0])
        for name, block in posterior.blocks.items()
    }
    delta = max(delta for _, delta in compressed.values())
    return replace(posterior, blocks=blocks, error=_variance_error(delta))


def error_under_prior(error: float, ratio: float) -> float:
    """Return the bound for a prior precision that is smaller by ``ratio``."""
    return error if ratio <= 1 else _variance_error(error / (1 + error) * ratio)


def _variance_error(delta: float) -> float:
    """Return the relative change of variances if precisions change by ``delta``."""
    return delta / (1 - delta) if delta < 1 else float("inf")


def _check(posterior: Posterior, error: float) -> None:
    if not 0 < error < 1:
        raise BoxcovError(f"error is relative and must lie above 0 and below 1, got {error}")
    if posterior.error:
        raise BoxcovError(
            f"this posterior is already compressed, to {posterior.error:.2g}: compress the original"
        )
    if posterior.form == "paper":
        raise BoxcovError(
            "compressing needs form='eigen': the paper's form has no prior to compare with"
        )
    if posterior.ekfac_layers:
        raise BoxcovError(
            f"the Fisher of {join_names(posterior.ekfac_layers)} comes from a second pass and "
            "cannot be compressed: fit without ekfac"
        )


@full_precision()
def _compress_factor(
    factor: Eigendecomposition, floor: Tensor, max_delta: float
) -> tuple[Eigendecomposition, float]:
    """Return the compressed factor and its delta."""
    order, rest = _split(factor.values.double(), floor, _MERGING * max_delta)
    G, n = factor.values.shape
    rank = order.shape[1]
    vectors = factor.vectors.gather(2, order.unsqueeze(1).expand(G, n, rank)).cpu()
    values = factor.values.gather(1, order).cpu()
    weight = (values.double() / floor.cpu().unsqueeze(1)).amax(0)
    exact = int((weight > ((1 - _MERGING) * max_delta / 2 / _ROUNDING) ** 2).sum())  # a first guess
    while True:
        packed = pack(vectors, values, rest.to(values), exact)
        eigen = Eigendecomposition(*packed.unpack(), packed)  # on a CPU, like from a file
        eigen = eigen.to(factor.vectors.device)
        delta = difference(factor, eigen, floor)
        if delta <= max_delta:
            return eigen, delta
        if exact == rank:
            return factor, 0.0  # nothing can be merged
        exact = min(rank, max(2 * exact, exact + n // 32 + 1))


def _split(values: Tensor, floor: Tensor, max_error: float) -> tuple[Tensor, Tensor]:
    """Return the eigenvectors to keep (G, r), largest first, and the eigenvalue (G,) of the rest.

    The rest is the longest run of eigenvalues that one number can replace. If s = l + a lies
    between b and c, it is ``2 b c / (b + c)`` with the relative error ``(c - b) / (c + b)``.
    """
    G, n = values.shape
    s = values + floor.unsqueeze(1)
    # the end of the longest run from each eigenvalue on
    stop = torch.searchsorted(s, s * (1 + max_error) / (1 - max_error), right=True)
    run = int((stop - torch.arange(n, device=s.device)).amax(1).min())  # equal in all groups
    spread = s[:, run - 1 :] / s[:, : n - run + 1]
    start = spread.argmin(1, keepdim=True)
    first, last = start, start + run - 1
    low, high = s.gather(1, first), s.gather(1, last)
    rest = 2 * low * high / (low + high) - floor.unsqueeze(1)
    rest = rest.clamp(values.gather(1, first), values.gather(1, last))
    at = torch.arange(n, device=s.device).expand(G, n)
    kept = at[(at < start) | (at >= start + run)].view(G, n - run)
    return kept.flip(1), rest.squeeze(1)


def difference(factor: Eigendecomposition, other: Eigendecomposition, floor: Tensor) -> float:
    """Return delta of two factors, for a = ``floor`` (G,)."""
    s, other_s = (eigen.values.double() + floor.unsqueeze(1) for eigen in (factor, other))
    turn = factor.vectors.double().transpose(1, 2) @ other.vectors.double()
    half = turn * (other_s.unsqueeze(1) / s.unsqueeze(2)).sqrt()
    ratios = torch.linalg.eigvalsh(half @ half.transpose(1, 2))
    return float((ratios - 1).abs().max())


# factors as reflections, in a quarter of the memory


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
