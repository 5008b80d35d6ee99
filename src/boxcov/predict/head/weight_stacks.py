"""The layers and the posterior of a staged head, stacked by kind and branch.

This is done once; what is stacked, and in which order, says ``weights.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from boxcov.head_stages import HeadStages, Stage
from boxcov.posterior.posterior import Posterior
from boxcov.predict.cuda.head_kernels import has_kernels
from boxcov.predict.head.separable_variances import fit_separable
from boxcov.predict.head.weights import HeadWeights, StagePosterior, StageWeights, padding_to_four

# relative error of the separable variances in float32; float64 uses the variances as they are
TOLERANCE = 1e-5


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
    matrices = [_weight_matrix(layer.weight, layer.bias).detach() for layer in layers]
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
        uses_kernels=has_kernels(W),
    )


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
        scales.append(scale if norm.weight is None else scale * norm.weight.detach())
        bias = 0 if norm.bias is None else norm.bias.detach()
        shifts.append(bias - norm.running_mean * scales[-1])
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
        return StagePosterior(U, V, variances, uses_kernels=has_kernels(W))
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
        made = replace(
            made,
            U=U[:, first : len(order)].contiguous(),
            bands=(*bands, remainder),
            has_remainder=True,
        )
    return made.for_kernels() if has_kernels(W) else made


def _tap_order(layer: nn.Conv2d) -> Tensor:
    """Where the inputs in tap order stand among a block's inputs, which go channel by channel."""
    taps = layer.kernel_size[0] * layer.kernel_size[1]
    order = torch.arange(layer.in_channels * taps, device=layer.weight.device)
    order = order.view(-1, taps).T.flatten()
    return order if layer.bias is None else pad(order, (0, 1), value=len(order))
