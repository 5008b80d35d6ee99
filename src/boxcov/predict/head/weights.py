"""Weights and posterior of a staged head, arranged once so that a frame takes matrix products only.

G is the number of box kinds, B the number of branches per kind; a stage of the stem has one of
each. The inputs of a layer are ordered tap by tap, then by channel, as ``Cells.gather`` gathers
them. The 1 of a bias follows, then, on a GPU, zeros up to a multiple of four.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, relu

from boxcov._torch.process_state import matrix_precision
from boxcov.head_stages import HeadStages, Stage
from boxcov.posterior.posterior import Posterior
from boxcov.predict.cuda.head_kernels import has_kernels, project
from boxcov.predict.head.separable_variances import fit_separable

# relative error of the separable variances in float32; float64 uses the variances as they are
TOLERANCE = 1e-5

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
    remainder_share: float = 0.0  # of the inputs' mean squared norm, by the merged eigenvalues

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

    def with_narrow_bands(self) -> StagePosterior:
        """The same with wide bands cut into pieces, which the programs of a GPU share."""
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
        return replace(self, bands=tuple(bands), F=torch.cat(F, 3))

    def select(self, kinds: slice | Tensor) -> StagePosterior:
        """The layers of some kinds."""
        has_own = self.U.dim() == 4
        in_kernel = has_own and isinstance(kinds, Tensor) and has_kernels(self.U)
        return replace(
            self,
            U=self.U[kinds] if has_own and not in_kernel else self.U,
            kinds=kinds if in_kernel and isinstance(kinds, Tensor) else None,
            V=self.V[kinds],
            variances=self.variances[kinds],
            F=None if self.F is None else self.F[kinds],
        )


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


def build_head_weights(
    staged: HeadStages,
    posterior: Posterior,
    names: Mapping[int, str],
    etas: Mapping[str, Tensor] | None,
    tolerance: float,
) -> HeadWeights | None:
    """Arrange a head for ``head_covariance``; None if its layers or posterior cannot be stacked.

    names: parameter names by ``id``.
    etas: directions (k, *shape) by parameter name; ``head_covariance`` then returns the directional
        derivatives along them instead of the covariance.
    tolerance: relative error that the variances may have in float32.
    """
    stages = (*staged.stem, *staged.branches)
    if not staged.stem or not staged.branches or not all(stage.fits() for stage in stages):
        return None
    if any(len(stage.layers) > 1 or len(stage.layers[0]) > 1 for stage in staged.stem):
        return None
    source = _Source(posterior, names, etas, tolerance)
    built = [
        _stage_weights(
            stage, source, is_last=stage is stages[-1], merge=stage not in staged.branches[1:]
        )
        for stage in stages
    ]
    stacked = [stage for stage in built if stage is not None]
    stem, branches = stacked[: len(staged.stem)], stacked[len(staged.stem) :]
    if len(stacked) < len(built) or len({stage.W.shape[:2] for stage in branches}) > 1:
        return None
    W = branches[-1].W
    n_out = W.shape[3]
    channels = torch.tensor([layer.out_channels for layer in staged.branches[-1].layers[0]])
    is_output = torch.arange(n_out) < channels.unsqueeze(1)  # (B, n_out)
    output_index = is_output.flatten().nonzero()[:, 0].to(W.device)
    return HeadWeights(tuple(stem), tuple(branches), output_index, output_index // n_out)


@dataclass(frozen=True)
class _Source:
    """Where the posterior, or the directions, of a stage come from."""

    posterior: Posterior
    names: Mapping[int, str]
    etas: Mapping[str, Tensor] | None
    tolerance: float

    def block_names(self, layers: list[nn.Conv2d]) -> list[str] | None:
        """Names of the layers' posterior blocks, [] if there are none; None if they do not fit."""
        names = [self.names.get(id(layer.weight), "").removesuffix(".weight") for layer in layers]
        names = [name for name in names if name in self.posterior.blocks]
        blocks = [self.posterior.blocks[name] for name in names]
        has_bias = layers[0].bias is not None
        if names and len(names) < len(layers):
            return None
        if any((block.layer.bias is not None) != has_bias for block in blocks):
            return None
        return names


def _stage_weights(
    stage: Stage, source: _Source, *, is_last: bool, merge: bool
) -> StageWeights | None:
    """The weights of a stage; None if its layers or its posterior cannot be stacked.

    merge: whether the smallest eigenvalues of the inputs may share one variance.
    """
    layers = [layer for row in stage.layers for layer in row]
    G, B = len(stage.layers), len(stage.layers[0])
    channels = [tuple(layer.out_channels for layer in row) for row in stage.layers]
    forms = {(tuple(layer.weight.shape[1:]), layer.bias is not None) for layer in layers}
    blocks = source.block_names(layers)
    if len(forms) > 1 or len(set(channels)) > 1 or blocks is None:
        return None
    n_out, has_bias = max(channels[0]), layers[0].bias is not None
    if is_last and stage.norms is None:
        n_out += padding_to_four(n_out, layers[0].weight)
    matrices = [_weight_matrix(layer.weight.detach(), _bias(layer)) for layer in layers]
    n_extra = has_bias + padding_to_four(matrices[0].shape[1], matrices[0])
    n_in = matrices[0].shape[1] + n_extra - has_bias
    W = torch.stack([_pad_matrix(matrix, n_out, n_in) for matrix in matrices]).unflatten(0, (G, B))
    scale, shift = _norm(stage, W)
    posterior = directions = None
    if blocks and source.etas is None:
        posterior = _stage_posterior(source, blocks, layers[0], W, merge)
    elif blocks:
        directions = _stage_directions(source, blocks, W)
    return StageWeights(
        W=W.transpose(2, 3).contiguous(),
        scale=scale,
        shift=shift,
        activation=stage.activation,
        reach=stage.reach,
        has_bias=has_bias,
        n_extra=n_extra,
        parameters=tuple(source.posterior.restricted(blocks).parameters) if blocks else (),
        posterior=posterior,
        directions=directions,
    )


def padding_to_four(size: int, like: Tensor) -> int:
    """What is missing to a multiple of four on a GPU: its fast products need such sizes."""
    return -size % 4 if like.is_cuda else 0


def _bias(layer: nn.Conv2d) -> Tensor | None:
    return None if layer.bias is None else layer.bias.detach()


def _weight_matrix(weight: Tensor, bias: Tensor | None) -> Tensor:
    """Weights (..., n_out, channels, k, k) as (..., n_out, n_in), tap by tap, the bias last."""
    matrix = weight.flatten(-2).transpose(-1, -2).flatten(-2)
    return matrix if bias is None else torch.cat([matrix, bias.unsqueeze(-1)], -1)


def _pad_matrix(x: Tensor, rows: int, columns: int) -> Tensor:
    """Matrices (..., n, k) zero-padded to (..., rows, columns)."""
    return pad(x, (0, columns - x.shape[-1], 0, rows - x.shape[-2]))


def _norm(stage: Stage, W: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and shift (G, B, n_out) of the batch norms in eval mode, for W (G, B, n_out, n_in)."""
    if stage.norms is None:
        return W.new_ones(W.shape[:3]), W.new_zeros(W.shape[:3])
    scales, shifts = [], []
    for norm in (norm for row in stage.norms for norm in row):
        assert norm.running_mean is not None
        assert norm.running_var is not None
        scale = (norm.running_var + norm.eps).rsqrt()
        scale = scale if norm.weight is None else scale * norm.weight.detach()
        scales.append(scale)
        shifts.append((0 if norm.bias is None else norm.bias.detach()) - norm.running_mean * scale)
    return torch.stack(scales).view(W.shape[:3]), torch.stack(shifts).view(W.shape[:3])


def _stage_directions(source: _Source, blocks: list[str], W: Tensor) -> Tensor:
    """Directions (G, B, n_in, k, n_out) of a stage with weights W (G, B, n_out, n_in)."""
    assert source.etas is not None
    G, B, n_out, n_in = W.shape
    etas = []
    for name in blocks:
        layer = source.posterior.blocks[name].layer
        bias = None if layer.bias is None else source.etas[layer.bias]
        matrix = _weight_matrix(source.etas[layer.weight], bias)  # (k, n_out, n_in)
        etas.append(_pad_matrix(matrix, n_out, n_in).permute(2, 0, 1))
    return torch.stack(etas).unflatten(0, (G, B))


def _stage_posterior(
    source: _Source, names: list[str], layer: nn.Conv2d, W: Tensor, merge: bool
) -> StagePosterior:
    """The posterior of a stage with weights W (G, B, n_out, n_in); layer: any of its layers."""
    posterior, (G, B, n_out, n_in) = source.posterior, W.shape

    def stack(matrices: list[Tensor], rows: int, columns: int) -> Tensor:
        padded = [_pad_matrix(matrix, rows, columns) for matrix in matrices]
        return torch.stack(padded).view(G, B, rows, columns)

    blocks = [posterior.blocks[name] for name in names]
    order = _tap_order(layer)
    V = stack([block.H.vectors[0] for block in blocks], n_out, n_out)
    variances = stack([posterior.variances(name)[0] for name in names], n_out, n_in)
    if len({id(block.Q) for block in blocks}) > 1:
        U = stack([block.Q.vectors[0][order] for block in blocks], n_in, n_in)
        return StagePosterior(U, V, variances)
    U = _pad_matrix(blocks[0].Q.vectors[0][order], n_in, n_in).contiguous()
    is_float32 = U.dtype == torch.float32
    found = fit_separable(posterior, names, source.tolerance, merge) if is_float32 else None
    if found is None:
        return StagePosterior(U, V, variances)
    F = stack(list(found.F), n_out, found.F[0].shape[1])
    made = StagePosterior(U, V, variances, F, found.bands)
    if found.n_merged:
        first, kept = found.n_merged, len(order) - found.n_merged
        bands = [(slice(q.start - first, q.stop - first), h) for q, h in found.bands]
        remainder = slice(kept, kept + n_in), None
        energy = blocks[0].Q.values[0].double()
        share = float(energy[:first].sum() / energy.sum())
        U = U[:, first : len(order)].contiguous()
        made = StagePosterior(
            *(U, V, variances, F, (*bands, remainder)), has_remainder=True, remainder_share=share
        )
    if not has_kernels(U):
        return made
    # tensor cores read both factors of A U along the sum: columns of U side by side
    return replace(made.with_narrow_bands(), U=U.T.contiguous().T)


def _tap_order(layer: nn.Conv2d) -> Tensor:
    """Where the inputs in tap order stand among a block's inputs, which go channel by channel."""
    taps = layer.kernel_size[0] * layer.kernel_size[1]
    order = torch.arange(layer.in_channels * taps, device=layer.weight.device)
    order = order.view(-1, taps).T.flatten()
    return order if layer.bias is None else pad(order, (0, 1), value=len(order))
