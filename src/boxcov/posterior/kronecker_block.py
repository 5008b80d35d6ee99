"""The Fisher of one weight matrix, in the basis in which it is diagonal.

With ``Q = U diag(l) U^T`` and ``H = V diag(m) V^T``, the Fisher ``Q (x) H`` of a weight matrix is
diagonal in the basis of the matrices ``v_a u_b^T``, with the eigenvalues m_a l_b. A second pass
over the frames (EKFAC) gives better eigenvalues in this basis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from boxcov._torch.layers import Geometry, LayerCall, from_matrix, to_matrix
from boxcov._torch.process_state import at_least_float32, full_precision
from boxcov.errors import BoxcovError

if TYPE_CHECKING:
    from boxcov.posterior.compress import PackedFactor

MAX_PRECISION = 1e30  # of a weight
MAX_FRAMES = 1e15
MEMORY = 256 * 2**20  # bytes of intermediates at once
CACHE = 4 * 2**20  # on a CPU, so that they stay in its cache: 1.6 times faster at 100 boxes


def check_precisions(n_data: float, tau: float, name: str) -> None:
    """Raise unless float32 holds the variances that follow from n_data and the prior precision."""
    for what, value in (("prior_precision", tau), ("n_data", n_data)):
        is_tensor = isinstance(value, Tensor) and value.numel() == 1
        if isinstance(value, bool) or not (is_tensor or isinstance(value, Real)):
            raise BoxcovError(f"{what} must be a number, got {value!r}")
    if not 1 / MAX_PRECISION <= tau <= MAX_PRECISION:
        raise BoxcovError(
            f"prior_precision must lie between {1 / MAX_PRECISION:g} and {MAX_PRECISION:g} so that "
            f"float32 holds the variances, got {tau} for {name}"
        )
    if not 0 < n_data <= MAX_FRAMES:
        raise BoxcovError(f"n_data must be above 0 and at most 1e15, got {n_data}")


@dataclass(frozen=True)
class Layer:
    """A weight matrix of the posterior, and the parameters that it consists of."""

    weight: str  # name of the parameter
    bias: str | None
    shape: torch.Size  # of the weight
    geometry: Geometry  # kernel, groups, transposed; stride and padding may differ between calls

    @staticmethod
    def of_call(weight: str, bias: str | None, call: LayerCall) -> Layer:
        """Return the layer of a call, given the names of its parameters."""
        form = call.geometry
        form = Geometry(form.kernel, groups=form.groups, transposed=form.transposed)
        return Layer(weight, bias, call.weight.shape, form)

    @property
    def name(self) -> str:
        return self.weight.removesuffix(".weight")

    @property
    def n_in(self) -> int:
        """Number of columns of the matrix, the bias included."""
        form = self.geometry
        inputs = self.shape[0] // form.groups if form.transposed else self.shape[1]
        return int(inputs) * form.taps + (self.bias is not None)

    @property
    def n_out(self) -> int:
        form = self.geometry
        return int(self.shape[1] if form.transposed else self.shape[0] // form.groups)

    def matrix(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return weight and bias, by name, as matrices (..., G, n_out, n_in), at least float32."""
        bias = None if self.bias is None else at_least_float32(tensors[self.bias])
        return to_matrix(at_least_float32(tensors[self.weight]), bias, self.geometry)

    def tensors(self, matrix: Tensor) -> dict[str, Tensor]:
        """Return weight and bias of matrices (..., G, n_out, n_in), by parameter name."""
        weight, bias = from_matrix(matrix, self.shape, self.bias is not None, self.geometry)
        if self.bias is None or bias is None:
            return {self.weight: weight}
        return {self.weight: weight, self.bias: bias}

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
        geometry, weight, bias = entry["geometry"], entry["weight"], entry["bias"]
        kernel, shape, groups = tuple(geometry["kernel"]), tuple(entry["shape"]), geometry["groups"]
        sizes = (*kernel, *shape, groups)
        valid = all(type(size) is int and 0 < size < 1 << 31 for size in sizes)
        if not valid or len(shape) != 2 + len(kernel):
            raise ValueError(f"invalid layer: shape {shape}, kernel {kernel}, {groups} groups")
        if not isinstance(weight, str) or not isinstance(bias, str | None):
            raise ValueError(f"invalid parameter names {weight!r} and {bias!r}")
        form = Geometry(kernel, groups=groups, transposed=bool(geometry["transposed"]))
        return Layer(weight, bias, torch.Size(shape), form)


@dataclass(frozen=True)
class Eigendecomposition:
    """Eigenvectors and eigenvalues of G symmetric matrices; layers may share one object."""

    vectors: Tensor  # (G, n, n), in columns
    values: Tensor  # (G, n), ascending, at least 0
    packed: PackedFactor | None = None  # the compressed form that is written to a file

    @staticmethod
    def of(matrix: Tensor, dtype: torch.dtype) -> Eigendecomposition:
        """Decompose (G, n, n) in float64."""
        values, vectors = torch.linalg.eigh(matrix.double())
        # contiguous like tensors from a file, because the layout decides how products round
        return Eigendecomposition(vectors.to(dtype).contiguous(), values.clamp(min=0).to(dtype))

    @property
    def matrix(self) -> Tensor:
        return (self.vectors * self.values.unsqueeze(1)) @ self.vectors.transpose(1, 2)

    def to(self, device: torch.device | str) -> Eigendecomposition:
        return Eigendecomposition(self.vectors.to(device), self.values.to(device), self.packed)

    def jittered(self, jitter: float) -> Tensor:
        """Return the eigenvalues (G, n) plus ``jitter`` times their mean."""
        return self.values + jitter * self.values.mean(1, keepdim=True)

    def cholesky(self, jitter: float) -> Tensor:
        """Return the lower Cholesky factors (G, n, n), with jitter (paper, III-H)."""
        vectors, values = self.vectors.double(), self.jittered(jitter).double()
        matrix = (vectors * values.unsqueeze(1)) @ vectors.transpose(1, 2)
        return torch.linalg.cholesky(matrix).to(self.values.dtype)


@dataclass(frozen=True)
class KroneckerBlock:
    """The Fisher of one weight matrix: Kronecker factors, and the eigenvalues of EKFAC."""

    layer: Layer
    Q: Eigendecomposition  # (G, n_in): inputs
    H: Eigendecomposition  # (G, n_out): output gradients
    square_norm: float  # of the trained weights, for the prior precision
    ekfac_eigenvalues: Tensor | None = None  # (G, n_out, n_in) lambda_ab, in place of m_a l_b

    @property
    def size(self) -> int:
        """Number of weights."""
        return self.layer.geometry.groups * self.layer.n_in * self.layer.n_out

    @property
    def is_kronecker(self) -> bool:
        """Whether the Fisher is the product ``Q (x) H``."""
        return self.ekfac_eigenvalues is None

    @property
    def curvature(self) -> Tensor:
        """The eigenvalues of the Fisher (G, n_out, n_in)."""
        if self.ekfac_eigenvalues is not None:
            return self.ekfac_eigenvalues
        return self.H.values.unsqueeze(2) * self.Q.values.unsqueeze(1)

    def rotate(self, matrix: Tensor) -> Tensor:
        """Return a weight matrix M (..., G, n_out, n_in) in the eigenbasis: ``V^T M U``."""
        return self.H.vectors.transpose(1, 2) @ matrix @ self.Q.vectors

    def unrotate(self, matrix: Tensor) -> Tensor:
        """Return the inverse of ``rotate``: ``V M U^T``."""
        return self.H.vectors @ matrix @ self.Q.vectors.transpose(1, 2)


@full_precision()
def layer_covariance(a: Tensor, d: Tensor, block: KroneckerBlock, variances: Tensor) -> Tensor:
    """Return what one layer contributes to the covariance ``J Sigma J^T`` of g boxes (g, D, D).

    With inputs ``alpha = U^T a`` and gradients ``delta_j = V^T d_j`` of a box at T locations it is

        C[j, j'] = sum over p, q of v[p, q] G_j[p, q] G_j'[p, q]
        G_j[p, q] = sum over t of delta_j[p, t] alpha[q, t]

    Either G is formed, or, for few locations, ``K[p, t, t'] = sum over q of v[p, q] alpha[q, t]
    alpha[q, t']``, which does not depend on j.

    a: inputs (g, G, n_in, T), without the 1 of a bias. d: gradients (D, g, G, n_out, T).
    variances: v (G, n_out, n_in).
    """
    D, g, _, n_out, T = d.shape
    if block.layer.bias is not None:
        a = torch.cat([a, a.new_ones(*a.shape[:2], 1, T)], 2)
    a, d = a.to(variances.dtype), d.to(variances.dtype)
    n_in = a.shape[2]
    by_pairs = T * T < D * T + D * D / 2
    numbers = a.shape[1] * (n_in * T * T if by_pairs else D * n_out * n_in)
    room = CACHE if a.device.type == "cpu" else MEMORY
    step = max(1, int(room // (numbers * variances.element_size())))
    a, d = _rotate(a, block.Q.vectors), _rotate(d, block.H.vectors)
    contract = _by_pairs if by_pairs else _by_gradients
    parts = [contract(a[i : i + step], d[:, i : i + step], variances) for i in range(0, g, step)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _rotate(x: Tensor, vectors: Tensor) -> Tensor:
    """``vectors^T x`` of x (..., G, n, T) and vectors (G, n, n), one product per group."""
    flat = x.movedim((-3, -2), (0, 1)).flatten(2)  # (G, n, ... T)
    out = vectors.transpose(1, 2) @ flat
    return out.reshape(*x.shape[-3:-1], *x.shape[:-3], x.shape[-1]).movedim((0, 1), (-3, -2))


def _by_gradients(alpha: Tensor, delta: Tensor, variances: Tensor) -> Tensor:
    G = delta @ alpha.transpose(-1, -2)  # (D, g, G, n_out, n_in)
    G = (G * variances.sqrt()).flatten(2).transpose(0, 1)  # (g, D, w)
    return G @ G.transpose(1, 2)


def _by_pairs(alpha: Tensor, delta: Tensor, variances: Tensor) -> Tensor:
    pairs = (alpha.unsqueeze(-1) * alpha.unsqueeze(-2)).flatten(3)  # (g, G, n_in, T T)
    K = (variances @ pairs).unflatten(3, (alpha.shape[3], -1))  # (g, G, n_out, T, T)
    weighted = (K @ delta.unsqueeze(-1)).squeeze(-1)  # (D, g, G, n_out, T)
    left, right = (x.flatten(2).transpose(0, 1) for x in (delta, weighted))  # (g, D, G n_out T)
    C = left @ right.transpose(1, 2)
    return (C + C.transpose(1, 2)) / 2
