"""The pillar encoder: small linear layers on points, and the maximum over each pillar."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

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
        """Return the maps of cells that hold points."""
        x, pillar = self._point_features(cells)
        for layer in self.layers:
            x, pooled = layer(x, pillar, cells)
        return self._to_maps(pooled, cells.position, frames)

    def _point_features(self, cells: Cells) -> tuple[Tensor, Tensor]:
        """Return the features (n, 10 or 11) of each point, and its pillar (n,).

        The features are the point and its offsets from the mean and the centre of its pillar. The
        original frameworks pad every pillar with zeros to its full size, and the layers' output for
        a zero takes part in the maximum. One row of zeros per incomplete pillar does the same.
        """
        points, pillar = cells.points, cells.cell
        xyz = points[:, :3]
        low = numbers_like(points, self.config.point_range[:3])
        size = numbers_like(points, self.config.voxel_size)
        centre = (cells.position[:, 1:].flip(1) + 0.5) * size + low  # (V, 3)
        from_centre = xyz - centre[pillar]
        if not self.pillars.centre_z:
            from_centre = from_centre[:, :2]
        x = torch.cat([points, xyz - cells.means[pillar, :3], from_centre], 1)
        if self.pillars.padded:
            not_full = _not_full(cells, self.pillars.max_points or 0)
            x = torch.cat([x, x.new_zeros(len(not_full), x.shape[1])])
            pillar = torch.cat([pillar, not_full])
        return x.to(next(self.parameters()).dtype), pillar

    def _to_maps(self, features: Tensor, position: Tensor, frames: int) -> Tensor:
        nx, ny, _ = self.config.grid
        flat = (position[:, 0] * ny + position[:, 2]) * nx + position[:, 3]
        canvas = features.new_zeros(frames * ny * nx + 1, features.shape[1])
        canvas = canvas.index_copy(0, flat, features)[:-1]  # the last row receives padding
        return canvas.reshape(frames, ny, nx, -1).permute(0, 3, 1, 2)


def _not_full(cells: Cells, max_points: int) -> Tensor:
    """Return the cells with fewer points; with padding as many rows as there are cells."""
    is_full = cells.counts >= max_points
    if not cells.is_padded:
        return (~is_full).nonzero()[:, 0]
    last = len(is_full) - 1
    return torch.where(is_full, last, torch.arange(last + 1, device=is_full.device))


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

    def forward(self, x: Tensor, pillar: Tensor, cells: Cells) -> tuple[Tensor, Tensor]:
        # one item with n locations, not n items: the Kronecker factors sum over locations
        x = self.linear(x.unsqueeze(0)).squeeze(0)
        x = self.norm(x).relu_()
        pooled = _maximum(x, pillar, cells)
        return (x if self.last else torch.cat([x, pooled[pillar]], 1)), pooled


def _maximum(x: Tensor, pillar: Tensor, cells: Cells) -> Tensor:
    """Return the maximum (V, C) over the rows of x (n, C) of each pillar."""
    if not cells.is_padded:
        index, empty = pillar.unsqueeze(1).expand_as(x), x.new_zeros(len(cells.counts), x.shape[1])
        return empty.scatter_reduce(0, index, x, "amax", include_self=False)
    # points of a pillar lie side by side, and then comes a row of zeros for each pillar
    points, zeros = x[: len(cells.points)], x[len(cells.points) :]
    pooled = torch.segment_reduce(points, "max", lengths=cells.counts, axis=0, unsafe=True)
    if not len(zeros):
        return pooled
    is_own = pillar[len(cells.points) :] == torch.arange(len(zeros), device=x.device)
    return torch.where(is_own.unsqueeze(1), torch.maximum(pooled, zeros), pooled)
