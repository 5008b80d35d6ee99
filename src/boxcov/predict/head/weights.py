"""Weights and posterior of a staged head, arranged so that a frame takes matrix products only.

G is the number of box kinds, B the number of branches per kind; a stage of the stem has one of
each. The inputs of a layer are ordered tap by tap, then by channel, as ``Cells.gather`` gathers
them. The 1 of a bias follows, then, on a GPU, zeros up to a multiple of four.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad, relu

from boxcov._torch.process_state import matrix_precision
from boxcov.predict.cuda.head_kernels import project

_WIDEST = 1200  # columns of a Gram matrix on a GPU

Bands = tuple[tuple[slice, Tensor | None], ...]


@dataclass(frozen=True)
class StagePosterior:
    """Posterior of the layers of a stage in its eigenbasis, zero-padded to the most outputs.

    With ``F`` the variances are also given as ``v[p, q] = sum over s of F[p, s] h[s, q]``, where a
    band of q has its own h. See ``separable_variances.py``.
    """

    U: Tensor  # (n_in, n_in) where all layers share one input factor, else (G, B, n_in, n_in)
    V: Tensor  # (G, B, n_out, n_out)
    variances: Tensor  # (G, B, n_out, n_in)
    F: Tensor | None = None  # (G, B, n_out, S)
    bands: Bands = ()  # q, and h (S of the band, number of q); None stands for ones
    has_remainder: bool = False  # U is (n_in, kept), and ``a - U U^T a`` is appended to ``U^T a``
    kinds: Tensor | None = None  # (G,) the rows of U (kinds, B, n_in, n_in); None: all, in order
    uses_kernels: bool = False  # Triton kernels take the tensors of a frame

    def project(self, A: Tensor) -> Tensor:
        """alpha: ``A U`` of inputs A (L + 1, n_in), with a remainder ``[A U, A - A U U^T]``."""
        if not self.has_remainder:
            return A @ self.U
        kept = self.U.shape[1]
        alpha = A.new_empty(len(A), kept + A.shape[1])
        projected = torch.mm(A, self.U, out=alpha[:, :kept])
        torch.addmm(A, projected, self.U.T, alpha=-1, out=alpha[:, kept:])
        return alpha

    def project_each(self, A: Tensor) -> Tensor:
        """``A U`` (G, B, n, n_in) where every layer has a U of its own, for A (G, B, n, n_in)."""
        return A @ self.U if self.kinds is None else project(A, self.U, self.kinds)

    @cached_property
    def terms(self) -> tuple[Tensor, Tensor]:
        """h of all bands (S, columns of alpha), zero outside its band, and the columns (S, 2)."""
        width = max(q.stop for q, _ in self.bands)
        rows, columns = [], []
        for q, h in self.bands:
            h = self.U.new_ones(1, q.stop - q.start) if h is None else h
            rows.append(pad(h, (q.start, width - q.stop)))
            columns += [[q.start, q.stop]] * len(h)
        return torch.cat(rows), torch.tensor(columns, dtype=torch.int32, device=self.U.device)

    def for_kernels(self) -> StagePosterior:
        """The same as the Triton kernels read it.

        Wide bands are cut into pieces, which the programs of a GPU share. Tensor cores read both
        factors of A U along the sum: columns of U are side by side.
        """
        assert self.F is not None
        bands: list[tuple[slice, Tensor | None]] = []
        F = []
        sizes = [1 if h is None else len(h) for _, h in self.bands]
        for (q, h), own in zip(self.bands, self.F.split(sizes, 3)):
            width = q.stop - q.start
            step = -(-width // -(-width // _WIDEST))
            for start in range(0, width, step):
                piece = slice(start, min(start + step, width))
                at = slice(q.start + piece.start, q.start + piece.stop)
                bands.append((at, None if h is None else h[:, piece]))
                F.append(own)
        return replace(
            self,
            U=self.U.T.contiguous().T,
            bands=tuple(bands),
            F=torch.cat(F, 3),
            uses_kernels=True,
        )

    def select(self, kinds: slice | Tensor) -> StagePosterior:
        """The layers of some kinds."""
        U, rows = self.U, None
        if U.dim() == 4 and self.uses_kernels and isinstance(kinds, Tensor):
            rows = kinds
        elif U.dim() == 4:
            U = U[kinds]
        F = None if self.F is None else self.F[kinds]
        V, variances = self.V[kinds], self.variances[kinds]
        return replace(self, U=U, V=V, variances=variances, F=F, kinds=rows)


@dataclass(frozen=True)
class StageWeights:
    """The layers of a stage: G kinds of B branches."""

    W: Tensor  # (G, B, n_in, n_out)
    scale: Tensor  # (G, B, n_out) of the batch norm
    shift: Tensor  # (G, B, n_out)
    activation: Callable[[Tensor], Tensor] | None
    reach: int  # cells that the kernel covers to each side
    has_bias: bool
    n_extra: int  # input columns behind the gathered ones: the 1 of a bias, then zeros
    parameters: tuple[str, ...]  # those that the posterior contains
    # at most one of the two; neither if the posterior does not contain the stage
    posterior: StagePosterior | None
    directions: Tensor | None  # (G, B, n_in, k, n_out)
    uses_kernels: bool  # Triton kernels take the tensors of a frame

    def select(self, kinds: slice | Tensor) -> StageWeights:
        """The layers of some kinds."""
        return replace(
            self,
            W=self.W[kinds],
            scale=self.scale[kinds],
            shift=self.shift[kinds],
            posterior=None if self.posterior is None else self.posterior.select(kinds),
            directions=None if self.directions is None else self.directions[kinds],
        )

    def product(self, A: Tensor, W: Tensor) -> Tensor:
        """The layer's outputs ``A W``, as the network computes them.

        With directions always in float32, also where TF32 is allowed: the input of a ReLU near zero
        must keep its sign, since the error of a few directions does not average out.
        """
        if self.directions is None or not A.is_cuda:
            return A @ W
        with matrix_precision("float32"):
            return A @ W

    def activate(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Norm and activation of the layers' outputs y (G, B, ..., n_out), and the derivative."""
        between = [1] * (y.dim() - 3)
        scale, shift = (t.view(*t.shape[:2], *between, -1) for t in (self.scale, self.shift))
        z = torch.addcmul(shift, y, scale)
        if self.activation is None:
            return z, scale.expand_as(z)
        if self.activation in (torch.relu, relu):
            positive = z > 0
            return z * positive, positive * scale
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            h = self.activation(z)
            (slope,) = torch.autograd.grad(h, z, torch.ones_like(h))
        return h.detach(), slope * scale


@dataclass(frozen=True)
class HeadWeights:
    """All stages of a head."""

    stem: tuple[StageWeights, ...]
    branches: tuple[StageWeights, ...]
    output_index: Tensor  # (R,) the raw outputs among the B n_out padded ones of the last stage
    branch_index: Tensor  # (R,) the branch of each raw output

    @property
    def stages(self) -> tuple[StageWeights, ...]:
        return (*self.stem, *self.branches)

    def branches_of(self, kinds: slice | Tensor) -> tuple[StageWeights, ...]:
        """The stages of the branches of some kinds."""
        return tuple(stage.select(kinds) for stage in self.branches)

    @property
    def radius(self) -> int:
        """Cells to each side that a box depends on."""
        return sum(stage.reach for stage in self.stages)

    @property
    def parameters(self) -> set[str]:
        """Names of the posterior's parameters in the head."""
        return {name for stage in self.stages for name in stage.parameters}

    @property
    def has_directions(self) -> bool:
        return any(stage.directions is not None for stage in self.stages)

    @property
    def n_kinds(self) -> int:
        return self.branches[0].W.shape[0]

    @property
    def reaches(self) -> list[int]:
        """Reach of the stages whose input does not depend on the kind of the box."""
        return [stage.reach for stage in (*self.stem, self.branches[0])]


def padding_to_four(size: int, like: Tensor) -> int:
    """What is missing to a multiple of four on a GPU: its fast products need such sizes."""
    return -size % 4 if like.is_cuda else 0
