"""The posterior of one weight matrix, in the basis in which it is diagonal."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log

import torch
from torch import Tensor

from boxcov._torch.unfold import Layer
from boxcov.posterior.householder import Packed


@dataclass(frozen=True)
class Eigendecomposition:
    """A symmetric matrix in its eigenbasis, one a group; layers that read the same tensor share one object."""

    vectors: Tensor  # (G, n, n), in columns
    values: Tensor  # (G, n), ascending, never negative
    packed: Packed | None = None  # what a file holds in their place, if they were truncated

    @staticmethod
    def of(matrix: Tensor, dtype: torch.dtype) -> Eigendecomposition:
        """Decompose (G, n, n) in float64.

        >>> Eigendecomposition.of(torch.diag(torch.tensor([1.0, 4.0]))[None], torch.float32).values
        tensor([[1., 4.]])
        """
        values, vectors = torch.linalg.eigh(matrix.double())
        # contiguous, as a file would give it back: the layout decides how products round
        return Eigendecomposition(vectors.to(dtype).contiguous(), values.clamp(min=0).to(dtype))

    @property
    def matrix(self) -> Tensor:
        return (self.vectors * self.values.unsqueeze(1)) @ self.vectors.transpose(1, 2)

    def to(self, device: torch.device | str) -> Eigendecomposition:
        return Eigendecomposition(self.vectors.to(device), self.values.to(device), self.packed)

    def jittered(self, jitter: float) -> Tensor:
        """Eigenvalues (G, n) of the factor plus ``jitter`` times its mean eigenvalue."""
        return self.values + jitter * self.values.mean(1, keepdim=True)

    @property
    def rank(self) -> int:
        """Of the poorest group, to rounding."""
        return rank(self.values)


@dataclass(frozen=True)
class KroneckerBlock:
    """The posterior of one weight matrix.

    It is diagonal in the basis of the matrices ``v_a u_b^T``, eigenvectors of H and Q, or, where the Fisher is known whole, in that one's own
    eigenbasis, whose w = n_out n_in vectors of a group are numbered as the entries of the matrix are.
    """

    layer: Layer
    Q: Eigendecomposition  # (G, n_in): inputs
    H: Eigendecomposition  # (G, n_out): gradients
    square_norm: float  # of the trained weights, for the marginal likelihood
    corrected: Tensor | None = (
        None  # (G, n_out, n_in) second moments of the frames' gradients in the eigenbasis of Q and H
    )
    full: Eigendecomposition | None = None  # (G, n_out n_in): the whole Fisher of each group

    @property
    def size(self) -> int:
        return self.layer.geometry.groups * self.layer.n_in * self.layer.n_out

    @property
    def refined(self) -> bool:
        """Whether it is more than a product of two factors."""
        return self.corrected is not None or self.full is not None

    @property
    def curvature(self) -> Tensor:
        """The Fisher on the diagonal of the basis (G, n_out, n_in): m_a l_b unless a second pass made it better."""
        if self.full is not None:
            return self.full.values.view(-1, self.layer.n_out, self.layer.n_in)
        if self.corrected is not None:
            return self.corrected
        return self.H.values.unsqueeze(2) * self.Q.values.unsqueeze(1)

    def rotate(self, matrix: Tensor) -> Tensor:
        """A weight matrix (..., G, n_out, n_in) in the basis: V^T M U."""
        if self.full is not None:
            return torch.einsum("...gw,gwv->...gv", matrix.flatten(-2), self.full.vectors).view(
                matrix.shape
            )
        return self.H.vectors.transpose(1, 2) @ matrix @ self.Q.vectors

    def unrotate(self, matrix: Tensor) -> Tensor:
        """The inverse: V M U^T."""
        if self.full is not None:
            return torch.einsum("...gv,gwv->...gw", matrix.flatten(-2), self.full.vectors).view(
                matrix.shape
            )
        return self.H.vectors @ matrix @ self.Q.vectors.transpose(1, 2)

    def basis(self, group: int) -> Tensor:
        """The basis of one group, dense (n_out n_in, n_out n_in), in columns: for small layers and for tests."""
        if self.full is not None:
            return self.full.vectors[group]
        dense: Tensor = torch.kron(self.H.vectors[group], self.Q.vectors[group])
        return dense

    def cholesky(self, jitter: float) -> tuple[Tensor, Tensor]:
        """Lower Cholesky factors of Q and H with their jitter (G, n, n): section III-H of the paper."""
        pair = []
        for factor in (self.Q, self.H):
            values = factor.jittered(jitter).double()
            vectors = factor.vectors.double()
            matrix = (vectors * values.unsqueeze(1)) @ vectors.transpose(1, 2)
            pair.append(torch.linalg.cholesky(matrix).to(factor.values.dtype))
        return pair[0], pair[1]

    def to(
        self, device: torch.device | str, moved: dict[int, Eigendecomposition]
    ) -> KroneckerBlock:
        """On another device; ``moved`` knows the factors that are there already, by id, so that shared ones stay shared."""
        for factor in (self.Q, self.H):
            if id(factor) not in moved:
                moved[id(factor)] = factor.to(device)
        corrected = None if self.corrected is None else self.corrected.to(device)
        full = None if self.full is None else self.full.to(device)
        return replace(
            self, Q=moved[id(self.Q)], H=moved[id(self.H)], corrected=corrected, full=full
        )

    # whether it has an inverse without a prior

    @property
    def has_full_rank(self) -> bool:
        if self.refined:
            return rank(self.curvature.flatten(1)) == self.layer.n_in * self.layer.n_out
        return self.Q.rank == self.layer.n_in and self.H.rank == self.layer.n_out

    @property
    def ranks(self) -> str:
        """In words."""
        if self.refined:
            return f"the Fisher has rank {rank(self.curvature.flatten(1))} of {self.layer.n_in * self.layer.n_out}"
        return f"Q has rank {self.Q.rank} of {self.layer.n_in}, H has rank {self.H.rank} of {self.layer.n_out}"


def rank(values: Tensor) -> int:
    """How many of the eigenvalues (G, n) are above rounding, in the poorest group.

    >>> rank(torch.tensor([[0.0, 1e-12, 1.0, 2.0]]))
    2
    """
    floor = values.shape[1] * torch.finfo(values.dtype).eps * values.amax(1, keepdim=True)
    return int((values > floor).sum(1).min())


def log_evidence(block: KroneckerBlock, n_data: float, tau: float) -> float:
    """What one layer adds to the log marginal likelihood: prior at the weights, and the volume that the data left of the prior's."""
    if tau == 0:
        return float("-inf")
    precision = n_data * block.curvature.double() + tau
    return 0.5 * (block.size * log(tau) - tau * block.square_norm - float(precision.log().sum()))
