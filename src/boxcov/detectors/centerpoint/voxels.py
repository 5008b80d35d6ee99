"""Points into cells: pillars and voxels, first come, first served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from boxcov.errors import BoxcovError


@dataclass(frozen=True)
class Cells:
    """The occupied cells of a batch, sorted by frame, z, y and x, and the points in them."""

    points: Tensor  # (n, 5) the points that lie in a cell and within its limits, cell by cell
    of: Tensor  # (n,) which cell each of them is in
    counts: Tensor  # (V,) points in each cell
    where: Tensor  # (V, 4) frame, z, y, x

    @property
    def means(self) -> Tensor:
        """The mean of each cell's points (V, 5), the same bit for bit every time: index_add on a GPU is not."""
        return torch.segment_reduce(self.points, "mean", lengths=self.counts, axis=0, unsafe=True)


def voxelise(
    clouds: Sequence[Tensor],
    point_range: Sequence[float],
    voxel_size: Sequence[float],
    grid: Sequence[int],
    max_points: int | None,
    max_cells: int | None,
) -> Cells:
    """Sort the points of clouds (N_i, 5) into a grid of (nx, ny, nz) cells.

    Points outside the range fall away; so do, as in the originals, those that come after ``max_points`` others of their cell, and the cells that
    are first touched after ``max_cells`` others of their frame.

    >>> cloud = torch.tensor([[0.1, 0.1, 0, 0, 0], [1.5, 0.1, 0, 0, 0], [0.2, 0.1, 0, 0, 0], [9.0, 0, 0, 0, 0]])
    >>> cells = voxelise([cloud], (0, 0, -1, 2, 2, 1), (1, 1, 2), (2, 2, 1), max_points=None, max_cells=None)
    >>> cells.counts, cells.where[:, 3]
    (tensor([2, 1]), tensor([0, 1]))
    """
    points, frame = _joined(clouds)
    low, size = (points.new_tensor(list(values)) for values in (point_range[:3], voxel_size))
    nx, ny, nz = grid
    cell = ((points[:, :3] - low) / size).floor()  # (N, 3) x, y, z
    inside = ((cell >= 0) & (cell < points.new_tensor([nx, ny, nz]))).all(1)  # a NaN is nowhere
    linear = ((frame * nz + cell[:, 2].long()) * ny + cell[:, 1].long()) * nx + cell[:, 0].long()
    order = inside.nonzero()[:, 0]
    cells, sorting = linear[order].sort(
        stable=True
    )  # equal cells stay in the order in which their points came
    order = order[sorting]
    cells, of, counts = torch.unique_consecutive(cells, return_inverse=True, return_counts=True)
    kept = _within(order, of, counts, cells // (nx * ny * nz), max_points, max_cells)
    if kept is not None:
        order, of = order[kept], of[kept]
        present = of.new_zeros(len(cells)).index_add(0, of, torch.ones_like(of))
        staying = present > 0
        cells, counts, of = cells[staying], present[staying], (staying.cumsum(0) - 1)[of]
    where = torch.stack(
        [cells // (nx * ny * nz), cells // (nx * ny) % nz, cells // nx % ny, cells % nx], 1
    )
    return Cells(points[order], of, counts, where)


def _joined(clouds: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    if isinstance(clouds, Tensor) or not len(clouds):
        raise BoxcovError(
            "inputs must be a list with one tensor of points (N, 5) a frame, and at least one frame"
        )
    for i, cloud in enumerate(clouds):
        if cloud.dim() != 2 or cloud.shape[1] != 5:
            raise BoxcovError(
                f"frame {i}: points must have the shape (N, 5) for x y z intensity dt, got {tuple(cloud.shape)}"
            )
    counts = torch.tensor([len(cloud) for cloud in clouds], device=clouds[0].device)
    points = torch.cat(list(clouds))
    return points, torch.repeat_interleave(
        torch.arange(len(clouds), device=counts.device), counts, output_size=len(points)
    )


def _within(
    order: Tensor,
    of: Tensor,
    counts: Tensor,
    frame: Tensor,
    max_points: int | None,
    max_cells: int | None,
) -> Tensor | None:
    """Which of the points (n,), sorted by cell, are within the limits; None where no limit can be met."""
    kept = None
    start = counts.cumsum(0) - counts
    if max_points is not None:
        kept = torch.arange(len(of), device=of.device) - start[of] < max_points
    if max_cells is not None and len(counts) > max_cells:
        coming = order[
            start
        ].argsort()  # cells in the order of their first points; frames lie one behind the other
        early = torch.empty_like(coming)
        early[coming] = rank(frame[coming])
        kept = (early < max_cells)[of] if kept is None else kept & (early < max_cells)[of]
    return kept


def rank(key: Tensor) -> Tensor:
    """How many equal keys came before each (n,).

    >>> rank(torch.tensor([7, 3, 7, 7, 3]))
    tensor([0, 0, 1, 2, 1])
    """
    order = key.argsort(stable=True)
    position = torch.arange(len(key), device=key.device)
    ordered = key[order]
    start = torch.searchsorted(ordered, ordered)  # where the run of equal keys begins
    out = torch.empty_like(position)
    out[order] = position - start
    return out
