"""The sparse 3-D encoder of the voxel networks, in plain torch.

A site is an occupied cell. An index table (sites, taps) lists the input site under each tap of each
output site, found by binary search of the neighbours' cell numbers among those of the sites. A
convolution is then ``F.linear`` on patches (sites, taps x channels), so its curvature has
Kronecker factors like that of any linear layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from boxcov.detectors.centerpoint.config import Config, Voxels
from boxcov.detectors.centerpoint.sparse_kernel import can_gather, gather_linear
from boxcov.detectors.centerpoint.voxels import Cells, voxelise

Triple = tuple[int, int, int]
_ONE: Triple = (1, 1, 1)
# Elements of a patch matrix that a CPU multiplies at once: 16 MiB fit its cache and are twice as
# fast as 256 MiB. A GPU takes 64 times as many.
_PATCH_ELEMENTS = 2**22


@dataclass(frozen=True)
class Sites:
    """The occupied cells of a batch: their numbers in the grids of all frames, ascending.

    Sites with the number ``end`` are padding.
    """

    numbers: Tensor  # (V,)
    shape: Triple  # of a frame's grid: z, y, x
    frames: int

    @property
    def end(self) -> int:
        return self.frames * prod(self.shape)

    @property
    def cells(self) -> Tensor:
        """Frame, z, y and x of each site (V, 4)."""
        depth, height, width = self.shape
        row = self.numbers // width
        layer = row // height
        return torch.stack([layer // depth, layer % depth, row % height, self.numbers % width], 1)


def cell_number(frame: Tensor, z: Tensor, y: Tensor, x: Tensor, shape: Triple) -> Tensor:
    """Return the number of each cell in a grid of ``shape``, counted frame by frame."""
    return ((frame * shape[0] + z) * shape[1] + y) * shape[2] + x


def strided_sites(
    sites: Sites, kernel: Triple, stride: Triple, padding: Triple, most: int | None = None
) -> tuple[Sites, Tensor]:
    """Return the output sites of a strided convolution: cells whose kernel covers a site.

    most: return so many sites, padded or cut off, without a synchronisation; the second result is
    the number of sites there are.
    """
    shape = _output_shape(sites.shape, kernel, stride, padding)
    end, cells = sites.frames * prod(shape), sites.cells
    outputs, hits = [], []
    for axis, tap in enumerate(_taps(kernel, cells.device)):
        # stride times the output cell, if that is a whole number
        steps = cells[:, axis + 1].reshape(-1, 1, 1, 1) + padding[axis] - tap
        cell = steps.div(stride[axis], rounding_mode="floor")
        outputs.append(cell)
        hits.append((cell * stride[axis] == steps) & (cell >= 0) & (cell < shape[axis]))
    hit = hits[0] & hits[1] & hits[2]  # (V, kz, ky, kx)
    frame = cells[:, 0].reshape(-1, 1, 1, 1)
    covered = torch.where(hit, cell_number(frame, outputs[0], outputs[1], outputs[2], shape), end)
    is_site = torch.zeros(end + 1, dtype=torch.bool, device=cells.device)
    is_site.index_fill_(0, covered.clamp(max=end).flatten(), True)
    rank = is_site[:-1].cumsum(0, dtype=torch.int32)  # of each cell's site, from 1 on
    count = rank[-1]
    wanted = torch.arange(1, 1 + (int(count) if most is None else most), device=cells.device)
    return Sites(torch.searchsorted(rank, wanted.int()), shape, sites.frames), count


def index_table(
    sites: Sites, out: Sites, kernel: Triple, stride: Triple, padding: Triple
) -> Tensor:
    """Return the input site (out, taps) under each tap of each output site.

    ``len(sites.numbers)`` stands for "no site".
    """
    known, at = sites.numbers, out.cells
    count = len(known)
    if not count:
        return known.new_zeros(len(at), prod(kernel))
    cells, insides = [], []
    for axis, tap in enumerate(_taps(kernel, known.device)):
        cell = at[:, axis + 1].reshape(-1, 1, 1, 1) * stride[axis] - padding[axis] + tap
        cells.append(cell)
        insides.append((cell >= 0) & (cell < sites.shape[axis]))
    frame = at[:, 0].reshape(-1, 1, 1, 1)
    wanted = cell_number(frame, cells[0], cells[1], cells[2], sites.shape).flatten(1)  # (out, taps)
    inside = (insides[0] & insides[1] & insides[2]).flatten(1)
    found = torch.searchsorted(known, wanted).clamp(max=count - 1)
    return torch.where(inside & (known[found] == wanted), found, count)


def _taps(kernel: Triple, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the taps along z, y and x, shaped to broadcast to (sites, kz, ky, kx)."""
    z, y, x = (torch.arange(k, device=device) for k in kernel)
    return z.reshape(1, -1, 1, 1), y.reshape(1, 1, -1, 1), x.reshape(1, 1, 1, -1)


def _output_shape(shape: Triple, kernel: Triple, stride: Triple, padding: Triple) -> Triple:
    depth, height, width = (
        (n + 2 * p - k) // s + 1 for n, k, s, p in zip(shape, kernel, stride, padding)
    )
    return depth, height, width


class SparseConv(nn.Module):
    """A convolution over sites, without bias: features (V, n_in) to (out, n_out).

    The weight is a matrix (n_out, taps x n_in), with the taps as the slower index.
    """

    def __init__(self, n_in: int, n_out: int, kernel: Triple) -> None:
        super().__init__()
        self.n_in, self.n_out, self.kernel = n_in, n_out, kernel
        self.weight = nn.Parameter(torch.empty(n_out, prod(kernel) * n_in))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)

    @property
    def kernel_shape(self) -> tuple[int, ...]:
        """The shape of the weight as a kernel: (n_out, kz, ky, kx, n_in)."""
        return self.n_out, *self.kernel, self.n_in

    def forward(self, features: Tensor, table: Tensor, fast: bool = False) -> Tensor:
        """fast: without derivatives, and faster on a GPU."""
        if fast and can_gather(features):
            return gather_linear(features, table, self.weight)
        padded = F.pad(features, (0, 0, 0, 1))  # a row of zeros for "no site"
        elements = _PATCH_ELEMENTS if features.device.type == "cpu" else 64 * _PATCH_ELEMENTS
        step = max(1, elements // self.weight.shape[1])
        parts = []
        for rows in table.split(step):
            patches = padded.index_select(0, rows.flatten())
            # one item with many locations, not many items: the Kronecker factors sum over locations
            patches = patches.reshape(1, len(rows), self.weight.shape[1])
            parts.append(F.linear(patches, self.weight))
        return torch.cat(parts, 1)[0]


class Residual(nn.Module):
    """Two submanifold convolutions and a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = SparseConv(width, width, (3, 3, 3)), _norm(width)
        self.conv2, self.norm2 = SparseConv(width, width, (3, 3, 3)), _norm(width)

    def forward(self, x: Tensor, table: Tensor, fast: bool = False) -> Tensor:
        out: Tensor = self.norm1(self.conv1(x, table, fast)).relu()
        out = self.norm2(self.conv2(out, table, fast)) + x
        return out.relu()


class SparseStage(nn.Module):
    """A convolution, strided or not, then residual blocks on its output sites."""

    def __init__(
        self,
        n_in: int,
        width: int,
        stride: Triple,
        padding: Triple,
        kernel: Triple = (3, 3, 3),
        blocks: int = 2,
    ) -> None:
        super().__init__()
        self.kernel, self.stride, self.padding = kernel, stride, padding
        self.conv, self.norm = SparseConv(n_in, width, kernel), _norm(width)
        self.blocks = nn.ModuleList(Residual(width) for _ in range(blocks))

    def forward(
        self, x: Tensor, sites: Sites, most: int | None = None
    ) -> tuple[Tensor, Sites, Tensor | None]:
        """Return features, sites and, for a strided stage, the number of sites that there are.

        most: see ``strided_sites``.
        """
        out, count = sites, None
        if self.stride != _ONE:
            out, count = strided_sites(sites, self.kernel, self.stride, self.padding, most)
        table = index_table(sites, out, self.kernel, self.stride, self.padding)
        fast = most is not None
        x = self.norm(self.conv(x, table, fast)).relu()
        if self.blocks and self.stride != _ONE:
            table = index_table(out, out, (3, 3, 3), _ONE, _ONE)
        for block in self.blocks:
            x = block(x, table, fast)
        return x, out, count


class VoxelEncoder(nn.Module):
    """Point clouds (N_i, 5) to maps (B, 2 C, ny / 8, nx / 8), through five sparse stages."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        assert isinstance(config.encoder, Voxels)
        self.config = config
        a, b, c, d = config.encoder.widths
        self.stages = nn.ModuleList(
            [
                SparseStage(5, a, _ONE, _ONE),
                SparseStage(a, b, (2, 2, 2), (1, 1, 1)),
                SparseStage(b, c, (2, 2, 2), (1, 1, 1)),
                SparseStage(c, d, (2, 2, 2), (0, 1, 1)),
                SparseStage(d, d, (2, 1, 1), (0, 0, 0), kernel=(3, 1, 1), blocks=0),
            ]
        )

    def forward(self, clouds: Sequence[Tensor]) -> Tensor:
        cells = voxelise(clouds, self.config.voxel_grid(self.training))
        return self.encode(cells, len(clouds))[0]

    def encode(
        self, cells: Cells, frames: int, most: Sequence[int] | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the maps, and the number of sites of each strided stage.

        most: how many sites each strided stage has at most, for fixed shapes.
        """
        nx, ny, nz = self.config.grid
        shape = (nz + 1, ny, nx)  # one more layer, as in the original frameworks
        frame, z, y, x = cells.position.unbind(1)
        sites = Sites(cell_number(frame, z, y, x, shape), shape, frames)
        x = cells.means.to(next(self.parameters()).dtype)
        counts: list[Tensor] = []
        for stage in self.stages:
            x, sites, count = stage(x, sites, None if most is None else most[len(counts)])
            counts += [] if count is None else [count]
        return to_maps(x, sites), counts


def to_maps(x: Tensor, sites: Sites) -> Tensor:
    """Return features (V, C) as maps (frames, C x depth, height, width), depth varying fastest."""
    depth, height, width = sites.shape
    grid = x.new_zeros(sites.end + 1, x.shape[1]).index_copy(0, sites.numbers, x)[:-1]
    maps = grid.reshape(sites.frames, depth, height, width, -1).permute(0, 4, 1, 2, 3)
    return maps.reshape(sites.frames, -1, height, width)


def _norm(width: int) -> nn.Module:
    return nn.BatchNorm1d(width, eps=1e-3, momentum=0.01)
