"""Frames per second of the simulated LiDAR, on the CPU and on a GPU if there is one.

python benchmarks/simulated.py [--seconds 5] [--batch 16]
"""

from __future__ import annotations

import argparse
import time

import torch

from boxcov.data import simulated
from boxcov.data.simulated.rng import make_rng
from boxcov.data.simulated.scenarios import SCENARIOS
from boxcov.data.simulated.scene import build


def rate(
    scenario: str, sweeps: int, batch: int, device: str, seconds: float
) -> tuple[float, float, float]:
    """Return frames per second, and points and labels per frame."""
    frames = simulated.frames(scenario, seed=1, count=1_000_000, sweeps=sweeps, device=device)
    frames.batch(range(999_000, 999_000 + batch))  # warm
    wait(device)
    made = points = labels = 0
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        clouds, targets = frames.batch(range(made, made + batch))
        wait(device)
        made += batch
        points += sum(len(cloud) for cloud in clouds)
        labels += sum(len(target["labels"]) for target in targets)
    return made / (time.perf_counter() - start), points / made, labels / made


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def streets(seconds: float) -> float:
    """Return street layouts per second; they use the CPU and bound a GPU's rate."""
    made, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        build(make_rng(1, made, "cpu"), SCENARIOS["clear"])
        made += 1
    return made / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="duration per line")
    parser.add_argument("--batch", type=int, default=16, help="frames made together on the GPU")
    arguments = parser.parse_args()
    print(f"threads {torch.get_num_threads()}, street layouts per second {streets(1.0):.0f}")
    print(
        f"{'device':8}{'scenario':10}{'sweeps':>8}{'batch':>8}{'frames/s':>12}{'points':>10}{'labels':>8}"
    )
    rows = [("cpu", "clear", 1, 1), ("cpu", "clear", 10, 1)]
    if torch.cuda.is_available():
        rows += [
            ("cuda", "clear", 1, arguments.batch),
            ("cuda", "clear", 10, 1),
            *(("cuda", name, 10, arguments.batch) for name in SCENARIOS),
        ]
    for device, scenario, sweeps, batch in rows:
        speed, points, labels = rate(scenario, sweeps, batch, device, arguments.seconds)
        print(
            f"{device:8}{scenario:10}{sweeps:8}{batch:8}{speed:12.1f}{points:10.0f}{labels:8.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
