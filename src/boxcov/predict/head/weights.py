"""The weights and the posterior of a staged head, stacked and turned once, so that every frame is matrix products alone.

Inputs of a layer are ordered tap by tap here, then by channel, as they are gathered; with a bias, a 1 comes last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from boxcov.head_stages import HeadStages, Stage
from boxcov.posterior.posterior import Posterior
from boxcov.predict.head.separable_variances import separable

TOLERANCE = 1e-5  # of the variances' separable form unless said otherwise, in float32; in float64 they are taken as they are


Bands = tuple[tuple[slice, Tensor | None], ...]


@dataclass(frozen=True)
class Turned:
    """The posterior of the layers of a stage; layers with fewer outputs are filled up with zeros."""

    U: Tensor  # (n_in, n_in) where all layers share one input factor, else (G, B, n_in, n_in); with a rest, (n_in, kept)
    V: Tensor  # (G, B, n_out, n_out)
    variances: Tensor  # (G, B, n_out, n_in)
    rows: Tensor | None  # (G, B, n_out, S): with ``bands``, the variances in separable form
    bands: Bands  # inputs q, and (S of the band, their number); None for ones
    rest: bool = False  # whether what the kept columns of U leave of an input comes behind them, as a vector of its own length

    def of(self, kinds: slice | Tensor) -> Turned:
        U = self.U if self.U.dim() == 2 else self.U[kinds]
        rows = None if self.rows is None else self.rows[kinds]
        return Turned(U, self.V[kinds], self.variances[kinds], rows, self.bands, self.rest)


@dataclass(frozen=True)
class Drawn:
    """Directions in the place of a posterior: k of them for every layer of a stage."""

    U: Tensor  # (n_in, k n_out) for a stem, else (G, B, n_in, k n_out)
    count: int

    def of(self, kinds: slice | Tensor) -> Drawn:
        return Drawn(self.U[kinds], self.count)


@dataclass(frozen=True)
class Layers:
    """The layers of a stage: G kinds of B branches. A stage of the stem has one of each."""

    W: Tensor  # (G, B, n_in, n_out)
    scale: Tensor  # (G, B, n_out) of the norm
    shift: Tensor
    activation: Callable[[Tensor], Tensor] | None
    has_bias: bool
    behind: (
        int  # columns of inputs behind those that are read: the 1 of a bias, and zeros that fill up
    )
    reach: int
    picked: Tensor  # (R,) which of the B n_out outputs are real
    branch_of: Tensor  # (R,) the branch of each
    turned: Turned | Drawn | None  # None: not in the posterior
    parameters: tuple[str, ...]  # of the posterior, among those of the layers
    joined: Tensor | None = None  # of a stem, on a CPU: U and W side by side, one product for both

    def of(self, kinds: slice | Tensor) -> Layers:
        """Those of some kinds."""
        turned = None if self.turned is None else self.turned.of(kinds)
        return replace(
            self, W=self.W[kinds], scale=self.scale[kinds], shift=self.shift[kinds], turned=turned
        )


@dataclass(frozen=True)
class HeadWeights:
    stem: tuple[Layers, ...]
    branches: tuple[Layers, ...]

    @property
    def radius(self) -> int:
        """Cells that a box sees to each side."""
        return sum(layers.reach for layers in (*self.stem, *self.branches))

    @property
    def parameters(self) -> set[str]:
        """Of the posterior, by name: those that it accounts for."""
        return {name for layers in (*self.stem, *self.branches) for name in layers.parameters}

    @property
    def has_directions(self) -> bool:
        """Whether it holds directions in the place of a posterior."""
        return any(isinstance(layers.turned, Drawn) for layers in (*self.stem, *self.branches))

    @property
    def n_kinds(self) -> int:
        return self.branches[0].W.shape[0]

    @property
    def reaches(self) -> list[int]:
        """Of the stages whose input does not depend on the kind of the box."""
        return [layers.reach for layers in (*self.stem, self.branches[0])]


def build_head_weights(
    staged: HeadStages,
    posterior: Posterior,
    names: Mapping[int, str],
    etas: Mapping[str, Tensor] | None = None,
    tolerance: float = TOLERANCE,
) -> HeadWeights | None:
    """None if the head, or what the posterior holds of it, is not of the form that can be stacked.

    names: of the parameters, by id. etas: directions (k, *shape) by parameter name; with them, derivatives along these are prepared
    instead of the posterior's covariance. tolerance: the relative error that the variances may have in float32.
    """
    stages = (*staged.stem, *staged.branches)
    if not staged.stem or not staged.branches or not all(stage.fits() for stage in stages):
        return None
    if any(len(stage.layers) > 1 or len(stage.layers[0]) > 1 for stage in staged.stem):
        return None
    made = [
        _layers(
            stage,
            posterior,
            names,
            etas,
            stage is stages[-1],
            tolerance,
            stage not in staged.branches[1:],
        )
        for stage in stages
    ]
    found = [layers for layers in made if layers is not None]
    if (
        len(found) < len(made)
        or len({tuple(layers.W.shape[:2]) for layers in found[len(staged.stem) :]}) > 1
    ):
        return None
    return HeadWeights(
        tuple(_joined(layers) for layers in found[: len(staged.stem)]),
        tuple(found[len(staged.stem) :]),
    )


def _joined(layers: Layers) -> Layers:
    """U in the form that the stem's product takes. On a CPU it becomes a part of the joined matrix, so that it is kept once."""
    if layers.turned is None:
        return layers
    U = layers.turned.U if layers.turned.U.dim() == 2 else layers.turned.U[0, 0]
    if U.is_cuda:
        return replace(layers, turned=replace(layers.turned, U=U))
    joined = torch.cat([U, layers.W[0, 0]], 1)
    return replace(layers, joined=joined, turned=replace(layers.turned, U=joined[:, : U.shape[1]]))


def _layers(
    stage: Stage,
    posterior: Posterior,
    names: Mapping[int, str],
    etas: Mapping[str, Tensor] | None,
    last: bool,
    tolerance: float,
    merge: bool,
) -> Layers | None:
    layers = [layer for row in stage.layers for layer in row]
    G, B = len(stage.layers), len(stage.layers[0])
    shapes = {tuple(layer.weight.shape[1:]) for layer in layers}
    biases = {layer.bias is not None for layer in layers}
    outputs = [tuple(layer.out_channels for layer in row) for row in stage.layers]
    if len(shapes) > 1 or len(biases) > 1 or len(set(outputs)) > 1:
        return None
    blocks = [names.get(id(layer.weight), "").removesuffix(".weight") for layer in layers]
    known = [name for name in blocks if name in posterior.blocks]
    if known and len(known) < len(layers):
        return None
    if any(
        posterior.blocks[name].full is not None for name in known
    ):  # no bases of inputs and outputs to turn into
        return None
    has_bias = biases == {True}
    if any((posterior.blocks[name].layer.bias is not None) != has_bias for name in known):
        return None
    most = max(outputs[0])
    most += missing(most, layers[0].weight) if last and stage.norms is None else 0
    weights = torch.stack([_filled(_by_taps(layer), most) for layer in layers]).unflatten(
        0, (G, B)
    )  # (G, B, n_out, n_in)
    extra = missing(weights.shape[3], weights)
    weights = _filled(weights, weights.shape[3] + extra, 3)
    scale, shift = _norm(stage, weights)
    turned: Turned | Drawn | None = None
    if known:
        turned = (
            _turned(posterior, known, layers[0], most, (G, B), tolerance, merge)
            if etas is None
            else _drawn(posterior, known, etas, most, (G, B))
        )
    matrices = [posterior.blocks[name].layer for name in known]
    parameters = tuple(
        name for layer in matrices for name in (layer.weight, layer.bias) if name is not None
    )
    real = torch.arange(most) < torch.tensor(outputs[0]).unsqueeze(1)  # (B, n_out)
    picked = real.flatten().nonzero()[:, 0].to(weights.device)
    W = weights.transpose(2, 3).contiguous()
    behind = has_bias + extra
    return Layers(
        W,
        scale,
        shift,
        stage.activation,
        has_bias,
        behind,
        stage.reach,
        picked,
        picked // most,
        turned,
        parameters,
    )


def missing(size: int, like: Tensor) -> int:
    """What fills a size up to a multiple of four on a GPU: its fast products take no other sizes."""
    return -size % 4 if like.is_cuda else 0


def _by_taps(layer: nn.Conv2d) -> Tensor:
    return _matrix(layer.weight.detach(), None if layer.bias is None else layer.bias.detach())


def _matrix(weight: Tensor, bias: Tensor | None) -> Tensor:
    """Weights (..., n_out, channels, k, k) as (..., n_out, n_in), tap by tap, the bias last."""
    matrix = weight.flatten(-2).transpose(-1, -2).flatten(-2)
    return matrix if bias is None else torch.cat([matrix, bias.unsqueeze(-1)], -1)


def _drawn(
    posterior: Posterior,
    names: list[str],
    etas: Mapping[str, Tensor],
    most: int,
    form: tuple[int, int],
) -> Drawn:
    layers = [posterior.blocks[name].layer for name in names]
    matrices = [
        _matrix(etas[layer.weight], None if layer.bias is None else etas[layer.bias])
        for layer in layers
    ]  # (k, n_out, n_in)
    matrices = [
        _filled(matrix, matrix.shape[2] + missing(matrix.shape[2], matrix), 2)
        for matrix in matrices
    ]
    U = torch.stack([_filled(matrix, most, 1).flatten(0, 1).T for matrix in matrices]).unflatten(
        0, form
    )
    return Drawn(U.contiguous(), len(matrices[0]))


def _filled(x: Tensor, most: int, dim: int = 0) -> Tensor:
    """Zeros behind, up to ``most``."""
    missing = most - x.shape[dim]
    if not missing:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim)


def _square(U: Tensor, size: int) -> Tensor:
    return _filled(_filled(U, size), size, 1)


def _norm(stage: Stage, like: Tensor) -> tuple[Tensor, Tensor]:
    G, B, n_out = like.shape[:3]
    if stage.norms is None:
        return like.new_ones(G, B, n_out), like.new_zeros(G, B, n_out)
    scales, shifts = [], []
    for norm in (norm for row in stage.norms for norm in row):
        assert norm.running_mean is not None
        assert norm.running_var is not None
        scale = (norm.running_var + norm.eps).rsqrt()
        scale = scale if norm.weight is None else scale * norm.weight.detach()
        scales.append(scale)
        shifts.append((0 if norm.bias is None else norm.bias.detach()) - norm.running_mean * scale)
    return torch.stack(scales).unflatten(0, (G, B)), torch.stack(shifts).unflatten(0, (G, B))


def _turned(
    posterior: Posterior,
    names: list[str],
    layer: nn.Conv2d,
    most: int,
    form: tuple[int, int],
    tolerance: float,
    merge: bool,
) -> Turned:
    blocks = [posterior.blocks[name] for name in names]
    taps = layer.kernel_size[0] * layer.kernel_size[1]
    order = (
        torch.arange(layer.in_channels * taps, device=layer.weight.device)
        .reshape(-1, taps)
        .T.flatten()
    )
    if layer.bias is not None:
        order = torch.cat([order, order.new_tensor([len(order)])])
    V = torch.stack(
        [_filled(_filled(block.H.vectors[0], most), most, 1) for block in blocks]
    ).unflatten(0, form)
    n_in = len(order) + missing(len(order), V)
    variances = torch.stack(
        [_filled(_filled(posterior.variances(name)[0], most), n_in, 1) for name in names]
    ).unflatten(0, form)
    shared = len({id(block.Q) for block in blocks}) == 1
    if not shared:
        U = torch.stack([_square(block.Q.vectors[0][order], n_in) for block in blocks]).unflatten(
            0, form
        )
        return Turned(U, V, variances, None, ())
    U = _square(blocks[0].Q.vectors[0][order], n_in).contiguous()
    found = separable(posterior, names, tolerance, merge) if U.dtype == torch.float32 else None
    if found is None:
        return Turned(U, V, variances, None, ())
    rows = torch.stack([_filled(row, most) for row in found.rows]).unflatten(0, form)
    if not found.rest:
        return Turned(U, V, variances, rows, found.bands)
    kept = len(order) - found.rest
    bands: Bands = tuple(
        (slice(q.start - found.rest, q.stop - found.rest), columns) for q, columns in found.bands
    )
    behind = slice(kept, kept + n_in), None
    return Turned(
        U[:, found.rest : len(order)].contiguous(), V, variances, rows, (*bands, behind), True
    )
