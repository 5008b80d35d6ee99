"""Time and memory of a fit over N processes: ``python benchmarks/spread.py [--device cuda]``.

One line of JSON per run: seconds, frames per second and processor time of the fit, peak memory of a
rank, sizes of checkpoint and posterior.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def rank(words: argparse.Namespace) -> None:
    """Run one process, alone or under torchrun."""
    import torch

    import boxcov
    from boxcov._torch.distributed import join_process_group
    from boxcov.data import loaded, simulated
    from boxcov.detectors import centerpoint

    with (
        join_process_group(words.device) as (ranks, device),
        tempfile.TemporaryDirectory() as folder,
    ):
        detector = (
            centerpoint.load("small")
            if words.config == "small"
            else centerpoint.CenterPoint(getattr(centerpoint.Config, words.config)())
        )
        detector = detector.eval().to(device)
        data = simulated.frames(count=words.frames, sweeps=words.sweeps, device=device)
        items = (
            [data[number] for number in range(words.frames)]
            if words.held
            else loaded(data, words.workers)
        )
        common = {"depth": words.depth, "distributed": not ranks.is_single}
        boxcov.fit(detector, items[: 2 * ranks.size], prior_precision=1.0, **common)  # warm
        ranks.barrier()
        began, worked = time.perf_counter(), time.process_time()
        kept = Path(folder, "c")
        posterior = boxcov.fit(
            detector,
            items,
            prior_precision=1.0,
            checkpoint=boxcov.Checkpoint(kept, every_seconds=1e9),
            **common,
        )
        seconds, worked = time.perf_counter() - began, time.process_time() - worked
        worked = ranks.all_reduce([], [worked])[0]
        posterior.save(Path(folder, "p"))
        boxcov.fit(
            detector,
            items[:1],
            prior_precision=1.0,
            checkpoint=boxcov.Checkpoint(Path(folder, "one"), every_seconds=0.0),
            depth=words.depth,
        )
        if ranks.rank == 0:
            row = {
                "processes": ranks.size,
                "config": words.config,
                "depth": words.depth,
                "device": device,
                "frames": words.frames,
            }
            row |= {
                "workers": words.workers,
                "held": words.held,
                "seconds": round(seconds, 2),
                "frames_a_second": round(words.frames / seconds, 2),
            }
            row |= {
                "processor_seconds_a_frame": round(worked / words.frames, 3)
            }  # of all ranks: what a busy machine does not change
            row |= {"peak_rss_MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}
            if device.startswith("cuda"):
                row |= {"peak_gpu_MiB": torch.cuda.max_memory_allocated() // 2**20}
            row |= {"checkpoint_MiB": round(Path(folder, "one").stat().st_size / 2**20, 1)}
            row |= {
                "posterior_MiB": round(Path(folder, "p").stat().st_size / 2**20, 1),
                "storage": str(posterior.storage()),
            }
            print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--config", default="small", help="small, or pillar or voxel, untrained")
    parser.add_argument("--depth", default="head")
    parser.add_argument("--frames", type=int, default=24)
    parser.add_argument("--sweeps", type=int, default=10)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--held", action="store_true", help="frames made before the clock runs")
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.rank:
        rank(words)
        return
    names = ("device", "config", "depth", "frames", "sweeps", "workers")
    given = [part for name in names for part in (f"--{name}", str(getattr(words, name)))] + [
        "--held"
    ] * words.held
    env = {"OMP_NUM_THREADS": "1", **os.environ}
    for count in words.processes:
        several = (
            ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
            if count > 1
            else []
        )
        subprocess.run([sys.executable, *several, __file__, *given, "--rank"], check=True, env=env)


if __name__ == "__main__":
    main()
