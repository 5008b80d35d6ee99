"""The pillar encoder: small linear layers on points, and the maximum over each pillar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_linear_bn_eval

from boxcov.detectors.centerpoint.config import Config, Pillars
from boxcov.detectors.centerpoint.voxels import Cells, numbers_like, voxelise


class PillarEncoder(nn.Module):
    """Point clouds (N_i, 5) to maps (B, C, ny, nx)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        assert isinstance(config.encoder, Pillars)
        self.config, self.pillars = config, config.encoder
        widths = self.pillars.widths
        inputs = (self.pillars.point_features, *widths[:-1])
        self.layers = nn.ModuleList(
            PillarLayer(n_in, width, last=i == len(widths) - 1)
            for i, (n_in, width) in enumerate(zip(inputs, widths))
        )

    def forward(self, clouds: Sequence[Tensor]) -> Tensor:
        cells = voxelise(clouds, self.config.voxel_grid(self.training))
        return self.encode(cells, len(clouds))

    def encode(self, cells: Cells, frames: int) -> Tensor:
        """Return the maps of cells that hold points.

        The original frameworks pad every pillar with zeros to its full size, and the layers' output
        for a zero takes part in the maximum. One row of zeros per incomplete pillar does the same.
        """
        x, pillar = self.point_features(cells), cells.cell
        if self.pillars.padded:
            not_full = (~self.is_full(cells)).nonzero()[:, 0]
            x = torch.cat([x, x.new_zeros(len(not_full), x.shape[1])])
            pillar = torch.cat([pillar, not_full])
        for layer in self.layers:
            x, pooled = layer(x, pillar, len(cells.counts))
        return self.to_maps(pooled, cells, frames)

    def point_features(self, cells: Cells) -> Tensor:
        """Return each point (n, 10 or 11) with its offsets from its pillar's mean and centre."""
        points, pillar, n = cells.points, cells.cell, self.pillars.point_features
        xyz = points[:, :3]
        low = numbers_like(points, self.config.point_range[:3])
        size = numbers_like(points, self.config.voxel_size)
        centre = (cells.position[:, 1:].flip(1) + 0.5) * size + low  # (V, 3)
        x = points.new_empty(len(points), n)
        x[:, :5], x[:, 5:8] = points, xyz - cells.means[pillar, :3]
        x[:, 8:] = (xyz - centre[pillar])[:, : n - 8]  # without z where the height is no input
        return x.to(next(self.parameters()).dtype)

    def is_full(self, cells: Cells) -> Tensor:
        """Return which cells (V,) hold as many points as a pillar can."""
        return cells.counts >= (self.pillars.max_points or 0)

    def to_maps(self, features: Tensor, cells: Cells, frames: int) -> Tensor:
        nx, ny, _ = self.config.grid
        frame, _, y, x = cells.position.unbind(1)
        canvas = features.new_zeros(frames * ny * nx + 1, features.shape[1])
        canvas.index_copy_(0, (frame * ny + y) * nx + x, features)
        # the last row receives padding
        return canvas[:-1].reshape(frames, ny, nx, -1).permute(0, 3, 1, 2)


class PillarLayer(nn.Module):
    """Linear, BatchNorm, ReLU and the maximum over each pillar.

    All layers but the last append the maximum to the features of the points.
    """

    def __init__(self, n_in: int, width: int, last: bool) -> None:
        super().__init__()
        self.last = last
        out = width if last else width // 2
        self.linear = nn.Linear(n_in, out, bias=False)
        self.norm = nn.BatchNorm1d(out, eps=1e-3, momentum=0.01)

    def forward(self, x: Tensor, pillar: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the features of the points, and the maximum (count, C) of each pillar."""
        # one item with n locations, not n items: the Kronecker factors sum over locations
        x = self.linear(x.unsqueeze(0)).squeeze(0)
        x = self.norm(x).relu_()
        index, empty = pillar.unsqueeze(1).expand_as(x), x.new_zeros(count, x.shape[1])
        pooled = empty.scatter_reduce(0, index, x, "amax", include_self=False)
        return (x if self.last else torch.cat([x, pooled[pillar]], 1)), pooled


class FusedPillars:
    """The maps of a PillarEncoder for padded cells, up to rounding, in few launches.

    Norms are folded into the linear layers. Bias and ReLU of the last layer follow its maximum over
    each pillar, which is the same, since they keep the order of numbers.
    """

    def __init__(self, encoder: PillarEncoder) -> None:
        self._encoder = encoder
        layers = cast(Sequence[PillarLayer], encoder.layers)
        fused = [fuse_linear_bn_eval(layer.linear, layer.norm) for layer in layers]
        self._layers = [(layer.weight.detach().T, layer.bias.detach()) for layer in fused]

    def __call__(self, cells: Cells, frames: int) -> Tensor:
        x = self._encoder.point_features(cells)
        empty = x.new_zeros(1, x.shape[1])  # what fills up a pillar
        is_full = self._encoder.is_full(cells)[:, None]
        *earlier, (last_W, last_b) = self._layers
        for W, b in earlier:
            x, empty = torch.addmm(b, x, W).relu_(), torch.addmm(b, empty, W).relu_()
            pooled = self._maximum(x, empty, is_full, cells)
            x = torch.cat([x, pooled[cells.cell]], 1)
            empty = torch.cat([empty.expand_as(pooled), pooled], 1)
        pooled = self._maximum(x @ last_W, empty @ last_W, is_full, cells)
        return self._encoder.to_maps(pooled.add_(last_b).relu_(), cells, frames)

    def _maximum(self, x: Tensor, empty: Tensor, is_full: Tensor, cells: Cells) -> Tensor:
        """Return the maximum (V, C) of each pillar; points (n, C) of a pillar lie side by side."""
        pooled = torch.segment_reduce(x, "max", lengths=cells.counts, axis=0, unsafe=True)
        if not self._encoder.pillars.padded:
            return pooled
        return torch.where(is_full, pooled, torch.maximum(pooled, empty))
