"""The sparse encoder of the voxel networks, by torch and by spconv: ratios within one run, and how far they lie apart.

    python benchmarks/sparse.py [--threads 1] [--repeats 5]

spconv must be installed (the extra ``spconv``). Untrained weights, one simulated frame; both are measured alternately. With more than one thread
the last column shows spconv's sums race: boxcov does not use it then.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch
from torch import Tensor

from boxcov.data import simulated
from boxcov.detectors.centerpoint import Config, by_spconv
from boxcov.detectors.centerpoint.sparse import Sites, VoxelEncoder
from boxcov.detectors.centerpoint.voxels import voxelise


def sites_of(encoder: VoxelEncoder, cloud: Tensor) -> tuple[Tensor, Sites]:
    config, voxels = encoder.config, encoder.voxels
    cells = voxelise(
        [cloud],
        config.point_range,
        config.voxel_size,
        config.grid,
        voxels.max_points,
        voxels.max_cells[1],
    )
    nx, ny, nz = config.grid
    return cells.means, Sites(cells.where, (nz + 1, ny, nx))


def compared(size: float, sweeps: int, repeats: int) -> tuple[int, float, float, float]:
    """Voxels, seconds by torch, seconds by spconv, and the largest difference relative to the largest value."""
    torch.manual_seed(0)
    encoder = VoxelEncoder(Config.voxel(size)).eval()
    x, sites = sites_of(encoder, simulated.frames(count=1, sweeps=sweeps)[0][0][0])
    expected = encoder.maps(x, sites, 1, spconv=False)
    off = max(
        float(
            (encoder.maps(x, sites, 1, spconv=True) - expected).abs().max() / expected.abs().max()
        )
        for _ in range(2)
    )
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(repeats):
        for spconv, spent in times.items():
            start = time.perf_counter()
            encoder.maps(x, sites, 1, spconv)
            spent.append(time.perf_counter() - start)
    return len(x), statistics.median(times[False]), statistics.median(times[True]), off


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    if isinstance(by_spconv.installed(), str):
        sys.exit(f"spconv cannot be imported: {by_spconv.installed()}")
    torch.set_num_threads(options.threads)
    print(
        f"torch {torch.__version__}, CPU, {options.threads} threads, medians of {options.repeats}"
    )
    print(
        f"{'voxel':>8}{'sweeps':>8}{'voxels':>10}{'torch ms':>12}{'spconv ms':>12}{'ratio':>8}{'off':>10}"
    )
    with torch.no_grad():
        for size in (0.1, 0.075):
            for sweeps in (1, 10):
                voxels, ours, theirs, off = compared(size, sweeps, options.repeats)
                print(
                    f"{size:8}{sweeps:8}{voxels:10}{1e3 * ours:12.0f}{1e3 * theirs:12.0f}{ours / theirs:8.2f}{off:10.1e}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
