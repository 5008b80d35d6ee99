"""The sparse 3-D encoder in plain torch: gather the occupied neighbours of a site, one matrix product, done.

A site is an occupied cell. Which sites a kernel sees is told by an index table (sites, taps), made by looking the neighbours' cell numbers up
in the sorted cell numbers of the sites. A convolution is then ``F.linear`` on patches (sites, taps x channels): a plain matrix product, so
its curvature has Kronecker factors like any linear layer's. spconv may do the same for passes without derivatives, see ``by_spconv``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from boxcov.detectors.centerpoint import by_spconv
from boxcov.detectors.centerpoint.by_spconv import Backend, Rules, Triple
from boxcov.detectors.centerpoint.config import Config
from boxcov.detectors.centerpoint.settings import Voxels
from boxcov.detectors.centerpoint.voxels import voxelise

_NUMBERS = (
    2**22
)  # of a patch matrix at once on a CPU: 16 MiB stay in reach of its cache, and twice as fast as 256; a GPU takes 64 times as many
_ONE: Triple = (1, 1, 1)


@dataclass(frozen=True)
class Sites:
    """Occupied cells of a batch: frame, z, y, x (V, 4), sorted by their number in a grid of ``shape`` (z, y, x); spconv's are in its order."""

    where: Tensor
    shape: Triple

    @property
    def numbers(self) -> Tensor:
        """The sites' numbers (V,)."""
        frame, z, y, x = self.where.unbind(1)
        return number(frame, z, y, x, self.shape)


def number(frame: Tensor, z: Tensor, y: Tensor, x: Tensor, shape: Triple) -> Tensor:
    """The number of cells, frame by frame, in a grid of ``shape``.

    >>> number(*torch.tensor([1, 0, 0, 2]), (2, 3, 4))
    tensor(26)
    """
    return ((frame * shape[0] + z) * shape[1] + y) * shape[2] + x


def strided_sites(sites: Sites, kernel: Triple, stride: Triple, padding: Triple) -> Sites:
    """The sites of a strided convolution's output: every cell whose kernel touches a site.

    >>> sites = Sites(torch.tensor([[0, 0, 0, 3]]), (1, 1, 8))
    >>> strided_sites(sites, (1, 1, 3), (1, 1, 2), (0, 0, 1)).where[:, 3]
    tensor([1, 2])
    """
    depth, height, width = shape = _output_shape(sites.shape, kernel, stride, padding)
    cells, hits = [], []
    for axis, tap in enumerate(_taps(kernel, sites.where.device)):
        steps = (
            sites.where[:, axis + 1].reshape(-1, 1, 1, 1) + padding[axis] - tap
        )  # stride times the output cell, where that is whole
        cell = steps.div(stride[axis], rounding_mode="floor")
        cells.append(cell)
        hits.append((cell * stride[axis] == steps) & (cell >= 0) & (cell < shape[axis]))
    hit = hits[0] & hits[1] & hits[2]  # (V, kz, ky, kx)
    numbers = number(sites.where[:, 0].reshape(-1, 1, 1, 1), cells[0], cells[1], cells[2], shape)[
        hit
    ].unique()
    where = [
        numbers // (depth * height * width),
        numbers // (height * width) % depth,
        numbers // width % height,
        numbers % width,
    ]
    return Sites(torch.stack(where, 1), shape)


def index_table(
    sites: Sites, out: Sites, kernel: Triple, stride: Triple, padding: Triple
) -> Tensor:
    """Which input site (out, taps) lies under each tap of each output site; the number of sites where there is none.

    >>> sites = Sites(torch.tensor([[0, 0, 0, 3], [0, 0, 0, 4]]), (1, 1, 8))
    >>> index_table(sites, sites, (1, 1, 3), (1, 1, 1), (0, 0, 1))
    tensor([[2, 0, 1],
            [0, 1, 2]])
    """
    count = len(sites.where)
    if not count:
        return sites.where.new_zeros(len(out.where), prod(kernel))
    cells, insides = [], []
    for axis, tap in enumerate(_taps(kernel, sites.where.device)):
        cell = out.where[:, axis + 1].reshape(-1, 1, 1, 1) * stride[axis] - padding[axis] + tap
        cells.append(cell)
        insides.append((cell >= 0) & (cell < sites.shape[axis]))
    wanted = number(
        out.where[:, 0].reshape(-1, 1, 1, 1), cells[0], cells[1], cells[2], sites.shape
    ).flatten(1)  # (out, taps)
    inside = (insides[0] & insides[1] & insides[2]).flatten(1)
    known = sites.numbers
    at = torch.searchsorted(known, wanted).clamp(max=count - 1)
    return torch.where(inside & (known[at] == wanted), at, count)


def _taps(kernel: Triple, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The taps along z, y and x, each in a dimension of its own behind that of the sites."""
    z, y, x = (torch.arange(k, device=device) for k in kernel)
    return z.reshape(1, -1, 1, 1), y.reshape(1, 1, -1, 1), x.reshape(1, 1, 1, -1)


def _output_shape(shape: Triple, kernel: Triple, stride: Triple, padding: Triple) -> Triple:
    depth, height, width = (
        (n + 2 * p - k) // s + 1 for n, k, s, p in zip(shape, kernel, stride, padding)
    )
    return depth, height, width


class SparseConv(nn.Module):
    """A convolution over sites: features (V, n_in) and an index table to features (out, n_out). No bias: a norm follows.

    The weight is a matrix (n_out, taps x n_in), taps slowest.

    >>> sites = Sites(torch.tensor([[0, 0, 0, 3], [0, 0, 0, 4]]), (1, 1, 8))
    >>> table = index_table(sites, sites, (3, 3, 3), (1, 1, 1), (1, 1, 1))
    >>> SparseConv(5, 16, (3, 3, 3))(torch.randn(2, 5), table).shape
    torch.Size([2, 16])
    """

    def __init__(self, n_in: int, n_out: int, kernel: Triple) -> None:
        super().__init__()
        self.n_in, self.n_out, self.kernel = n_in, n_out, kernel
        self.weight = nn.Parameter(torch.empty(n_out, prod(kernel) * n_in))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)

    def forward(self, features: Tensor, table: Tensor | Rules) -> Tensor:
        if isinstance(table, Rules):
            return table.product(features, self.weight.reshape(self.n_out, *self.kernel, self.n_in))
        padded = F.pad(features, (0, 0, 0, 1))  # a row of zeros for "no site"
        numbers = _NUMBERS if features.device.type == "cpu" else 64 * _NUMBERS
        step = max(1, numbers // self.weight.shape[1])
        parts = []
        for rows in table.split(step):
            patches = padded.index_select(0, rows.flatten()).reshape(
                1, len(rows), self.weight.shape[1]
            )
            parts.append(
                F.linear(patches, self.weight)
            )  # one item of many locations: so the factors are sums over locations
        return torch.cat(parts, 1)[0]


class Residual(nn.Module):
    """Two submanifold convolutions and a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = SparseConv(width, width, (3, 3, 3)), _norm(width)
        self.conv2, self.norm2 = SparseConv(width, width, (3, 3, 3)), _norm(width)

    def forward(self, x: Tensor, table: Tensor | Rules) -> Tensor:
        out: Tensor = self.norm1(self.conv1(x, table)).relu()
        out = self.norm2(self.conv2(out, table)) + x
        return out.relu()


class Stage(nn.Module):
    """A convolution into the stage, then residual blocks on its sites."""

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

    def forward(self, x: Tensor, sites: Sites, frames: int, spconv: bool) -> tuple[Tensor, Sites]:
        look = _rules if spconv else _tables
        out, table = look(sites, frames, self.kernel, self.stride, self.padding)
        x = self.norm(self.conv(x, table)).relu()
        if self.blocks and self.stride != _ONE:
            _, table = look(out, frames, (3, 3, 3), _ONE, _ONE)
        for block in self.blocks:
            x = block(x, table)
        return x, out


def _tables(
    sites: Sites, frames: int, kernel: Triple, stride: Triple, padding: Triple
) -> tuple[Sites, Tensor]:
    """A convolution's sites, and where their inputs are."""
    out = sites if stride == _ONE else strided_sites(sites, kernel, stride, padding)
    return out, index_table(sites, out, kernel, stride, padding)


def _rules(
    sites: Sites, frames: int, kernel: Triple, stride: Triple, padding: Triple
) -> tuple[Sites, Rules]:
    """The same for spconv."""
    where, found = by_spconv.rules(sites.where, sites.shape, frames, kernel, stride, padding)
    return Sites(where, _output_shape(sites.shape, kernel, stride, padding)), found


class VoxelEncoder(nn.Module):
    """Clouds (N_i, 5) to maps (B, 2 C, ny / 8, nx / 8): the mean of each voxel's points through four sparse stages.

    backend: who multiplies where no derivative is asked for: "torch", "spconv", or "auto", which is spconv where it is installed, right and
    faster: on a CPU, in float32, with one thread. Where derivatives are asked for it is torch.

    >>> from dataclasses import replace
    >>> config = replace(Config.voxel(), point_range=(0, 0, -5, 6.4, 6.4, 3))
    >>> VoxelEncoder(config).eval()([torch.zeros(0, 5), torch.ones(2, 5)]).shape
    torch.Size([2, 256, 8, 8])
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        assert isinstance(config.encoder, Voxels)
        self.backend: Backend = "auto"
        self.config, self.voxels = config, config.encoder
        a, b, c, d = self.voxels.widths
        self.stages = nn.ModuleList(
            [
                Stage(5, a, _ONE, _ONE),
                Stage(a, b, (2, 2, 2), (1, 1, 1)),
                Stage(b, c, (2, 2, 2), (1, 1, 1)),
                Stage(c, d, (2, 2, 2), (0, 1, 1)),
                Stage(d, d, (2, 1, 1), (0, 0, 0), kernel=(3, 1, 1), blocks=0),
            ]
        )

    def forward(self, clouds: Sequence[Tensor]) -> Tensor:
        config, limits = self.config, self.voxels.max_cells
        most = limits and limits[0 if self.training else 1]
        cells = voxelise(
            clouds, config.point_range, config.voxel_size, config.grid, self.voxels.max_points, most
        )
        x = cells.means.to(next(self.parameters()).dtype)
        nx, ny, nz = config.grid
        sites = Sites(cells.where, (nz + 1, ny, nx))  # one layer more, as in the originals
        return self.maps(
            x,
            sites,
            len(clouds),
            by_spconv.chosen(self.backend, x, self.parameters(), len(clouds) * prod(sites.shape)),
        )

    def maps(self, x: Tensor, sites: Sites, frames: int, spconv: bool) -> Tensor:
        """The maps of means (V, 5) at sites, by torch or by spconv."""
        for stage in self.stages:
            x, sites = stage(x, sites, frames, spconv and len(x) > 0)
        return dense(x, sites, frames)


def dense(x: Tensor, sites: Sites, frames: int) -> Tensor:
    """Features (V, C) as maps (frames, C x depth, height, width), the depth fastest among the channels.

    >>> dense(torch.ones(1, 3), Sites(torch.tensor([[0, 1, 0, 0]]), (2, 1, 1)), 1).flatten()
    tensor([0., 1., 0., 1., 0., 1.])
    """
    depth, height, width = sites.shape
    grid = x.new_zeros(frames * depth * height * width, x.shape[1]).index_copy(0, sites.numbers, x)
    maps = grid.reshape(frames, depth, height, width, -1).permute(0, 4, 1, 2, 3)
    return maps.reshape(frames, -1, height, width)


def _norm(width: int) -> nn.Module:
    return nn.BatchNorm1d(width, eps=1e-3, momentum=0.01)
