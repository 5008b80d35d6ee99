"""Sort the points of a cloud into cells: pillars and voxels."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from boxcov.errors import BoxcovError, BoxcovWarning


@dataclass(frozen=True)
class VoxelGrid:
    """The cells that points are sorted into, and how many points and cells are kept."""

    point_range: tuple[float, ...]  # x y z, low then high
    voxel_size: tuple[float, ...]
    shape: tuple[int, int, int]  # cells along x, y and z
    max_points: int | None = None  # per cell
    max_cells: int | None = None  # per frame
    any_height: bool = False  # whether points above and below the range count too
    shuffled: bool = False  # whether the limits take points in a random, fixed order


@dataclass(frozen=True)
class Cells:
    """The occupied cells of a batch, sorted by frame, z, y and x, and the points in them."""

    points: Tensor  # (n, 5) the points within the range and the limits, cell by cell
    cell: Tensor  # (n,) the cell of each point
    counts: Tensor  # (V,) points in each cell
    position: Tensor  # (V, 4) frame, z, y, x of each cell

    @property
    def means(self) -> Tensor:
        """The mean of each cell's points (V, 5), deterministic also on a GPU."""
        return torch.segment_reduce(self.points, "mean", lengths=self.counts, axis=0, unsafe=True)


def voxelise(clouds: Sequence[Tensor], grid: VoxelGrid) -> Cells:
    """Sort the points of clouds (N_i, 5) into the cells of a grid.

    Points outside the range are dropped. As in the original frameworks, so are the points that come
    after ``max_points`` others of their cell, and the cells first touched after ``max_cells``
    others of their frame, with a warning. The order is that of the cloud, newest sweep first, or
    random with a fixed seed (``shuffled``), so that all sweeps lose points.
    """
    points, frame = concatenate(clouds, grid.shuffled)
    number, inside = _cell_numbers(points, frame, grid)
    order = inside.nonzero()[:, 0]
    if not len(order) and bool(_cell_numbers(points[:, :3], frame, grid)[1].any()):
        warnings.warn(
            "every point within the range has a NaN or infinite intensity or age, so that no box "
            "can be found: fill that column as in training, for example with 0",
            BoxcovWarning,
            stacklevel=2,
        )
    numbers, sorting = number[order].sort(stable=True)  # points of a cell keep their order
    order = order[sorting]
    numbers, cell, counts = torch.unique_consecutive(
        numbers, return_inverse=True, return_counts=True
    )
    kept = _within_limits(order, cell, counts, numbers // prod(grid.shape), grid)
    if kept is not None:
        order, cell = order[kept], cell[kept]
        counts = cell.new_zeros(len(numbers)).index_add(0, cell, torch.ones_like(cell))
        occupied = counts > 0
        cell = (occupied.cumsum(0) - 1)[cell]
        numbers, counts = numbers[occupied], counts[occupied]
    return Cells(points[order], cell, counts, _positions(numbers, grid))


def voxelise_padded(
    points: Tensor, frame: Tensor, grid: VoxelGrid, frames: int, most: int
) -> tuple[Cells, Tensor]:
    """Return what ``voxelise`` does in fixed shapes, and how many cells are beyond the limits ().

    No step waits for the device, or writes to one place from many threads. The cells of all frames
    are padded to ``most``, and one more for points that belong to none. The result is that of
    ``voxelise`` if no cell is beyond the limits.

    points, frame: those of ``concatenate``, possibly followed by points outside the range.
    """
    end, device = frames * prod(grid.shape), points.device
    number, inside = _cell_numbers(points, frame, grid)
    number = torch.where(inside, number, end)
    if end < 2**31:  # a sort of half the bits takes half the time
        number = number.int()
    numbers, order = number.sort(stable=True)
    place = torch.arange(len(points), device=device)
    is_first = torch.cat([place[:1] == 0, numbers[1:] != numbers[:-1]]) & (numbers < end)
    rank = is_first.cumsum(0, dtype=torch.int32)  # from 1 on
    n_cells = rank[-1].long()
    n_inside = torch.searchsorted(numbers, numbers.new_full((1,), end))
    # the first point of each cell, and behind the last cell the number of points
    wanted = torch.arange(1, most + 2, device=device, dtype=torch.int32)
    start = torch.searchsorted(rank, wanted)
    start = torch.minimum(start, n_inside)
    counts = start.diff()
    counts = counts if grid.max_points is None else counts.clamp(max=grid.max_points)
    stop = counts.cumsum(0)  # when the points beyond max_points are left out
    cell = torch.searchsorted(stop, place, right=True)  # (n,) ``most`` behind the last point
    skipped = F.pad(start[:-1] - stop + counts, (0, 1))
    kept = order[(place + skipped[cell]).clamp(max=len(points) - 1)]
    first = numbers[start[:-1].clamp(max=len(points) - 1)].long()
    own = F.pad(torch.where(counts > 0, first, end), (0, 1), value=end)
    excess = (n_cells - most).clamp(min=0)
    if grid.max_cells is not None:
        ends = torch.arange(1, frames + 1, device=device) * prod(grid.shape)
        in_frame = torch.searchsorted(own, ends).diff(prepend=ends.new_zeros(1))
        excess = excess + (in_frame - grid.max_cells).clamp(min=0).sum()
    return Cells(points[kept], cell, F.pad(counts, (0, 1)), _positions(own, grid)), excess


def _cell_numbers(points: Tensor, frame: Tensor, grid: VoxelGrid) -> tuple[Tensor, Tensor]:
    """Return the number (n,) of each point's cell, counted frame by frame, and if it has one."""
    low, size = (numbers_like(points, v) for v in (grid.point_range[:3], grid.voxel_size))
    nx, ny, nz = grid.shape
    at = ((points[:, :3] - low) / size).floor()  # (n, 3) x, y, z
    if grid.any_height:
        at[:, 2] = torch.where(at[:, 2].isfinite(), 0, at[:, 2])
    inside = ((at >= 0) & (at < numbers_like(points, grid.shape))).all(1)  # False for a NaN
    # one NaN would spread over the map; isfinite() takes twice the launches
    inside = inside & (points[:, 3:].abs() < torch.inf).all(1)
    return ((frame * nz + at[:, 2].long()) * ny + at[:, 1].long()) * nx + at[:, 0].long(), inside


def numbers_like(x: Tensor, values: Sequence[float]) -> Tensor:
    """Return a few numbers, filled on the device: ``new_tensor`` would copy from the host."""
    return torch.stack([x.new_full((), value) for value in values])


def _positions(numbers: Tensor, grid: VoxelGrid) -> Tensor:
    """Return frame, z, y and x (V, 4) of cells."""
    nx, ny, nz = grid.shape
    zyx = [numbers // (nx * ny) % nz, numbers // nx % ny, numbers % nx]
    return torch.stack([numbers // (nx * ny * nz), *zyx], 1)


def concatenate(clouds: Sequence[Tensor], shuffled: bool = False) -> tuple[Tensor, Tensor]:
    """Return the points (N, 5) of all clouds, and the frame (N,) of each."""
    clouds = shuffle(check_clouds(clouds)) if shuffled else check_clouds(clouds)
    frames = [torch.full((len(c),), i, device=c.device) for i, c in enumerate(clouds)]
    return torch.cat(list(clouds)), torch.cat(frames)


def check_clouds(clouds: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the clouds; raise unless they are a list of tensors (N, 5)."""
    if isinstance(clouds, Tensor) or not len(clouds):
        raise BoxcovError(
            "inputs must be a list with one tensor of points (N, 5) per frame, at least one frame"
        )
    for i, cloud in enumerate(clouds):
        if not isinstance(cloud, Tensor) or not cloud.is_floating_point():
            found = cloud.dtype if isinstance(cloud, Tensor) else type(cloud).__name__
            raise BoxcovError(f"frame {i}: points must be a tensor of floats (N, 5), got {found}")
        if cloud.dim() != 2 or cloud.shape[1] != 5:
            raise BoxcovError(
                f"frame {i}: points must have the shape (N, 5) for x y z intensity dt, "
                f"got {tuple(cloud.shape)}"
            )
    return clouds


def shuffle(clouds: Sequence[Tensor]) -> list[Tensor]:
    """Return the clouds with their points in a random order, the same on every call."""
    # numpy's random numbers: inside vmap torch allows none
    orders = [np.random.default_rng(0).permutation(len(cloud)) for cloud in clouds]
    return [cloud[torch.from_numpy(o).to(cloud.device)] for cloud, o in zip(clouds, orders)]


def _within_limits(
    order: Tensor, cell: Tensor, counts: Tensor, frame: Tensor, grid: VoxelGrid
) -> Tensor | None:
    """Return which points (n,) are within the grid's limits; None if no limit applies.

    Points are sorted by cell. order: (n,) the place of each point in its cloud. frame: (V,) the
    frame of each cell.
    """
    kept = None
    start = counts.cumsum(0) - counts
    if grid.max_points is not None:
        kept = torch.arange(len(cell), device=cell.device) - start[cell] < grid.max_points
    if grid.max_cells is not None and len(counts) > grid.max_cells:
        by_first_point = order[start].argsort()  # frame by frame, as the clouds are concatenated
        rank = torch.empty_like(by_first_point)
        rank[by_first_point] = rank_among_equals(frame[by_first_point])
        early = rank < grid.max_cells
        if not bool(early.all()):
            warnings.warn(
                f"a frame has more than {grid.max_cells:,} occupied cells, the limit of this "
                "CenterPoint: the others are left out, as in training",
                BoxcovWarning,
                stacklevel=2,
            )
        kept = early[cell] if kept is None else kept & early[cell]
    return kept


def rank_among_equals(key: Tensor) -> Tensor:
    """Return the number of equal keys before each key (n,).

    >>> rank_among_equals(torch.tensor([7, 3, 7, 7, 3]))
    tensor([0, 0, 1, 2, 1])
    """
    order = key.argsort(stable=True)
    position = torch.arange(len(key), device=key.device)
    ordered = key[order]
    start = torch.searchsorted(ordered, ordered)  # where the run of equal keys begins
    out = torch.empty_like(position)
    out[order] = position - start
    return out
