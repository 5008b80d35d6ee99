"""Cost of the exact covariance of a full-size CenterPoint's head, on top of the plain detector.

python benchmarks/head.py [pillar | voxel | small] ...

Medians over alternating runs after a warm-up, with synchronization. "stages" is the covariance
alone, from features and selected boxes to 9 x 9 matrices. "on top" is the whole frame minus the
plain detector; ExactGLM runs the detector as a CUDA graph. "off" is relative to float32.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from deep import ROUNDS, detector_named, timed

import boxcov
from boxcov.data import simulated

KINDS = [(precision, tolerance) for tolerance in (1e-5, 1e-2) for precision in ("float32", "tf32")]


def main(name: str) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    detector = detector_named(name, device)
    points = [cloud.to(device) for cloud in simulated.frames("clear", seed=11, count=1)[0][0]]
    if name == "voxel":  # untrained: a threshold that lets about a hundred boxes through
        threshold = float(detector.detect(points).scores.sort(descending=True).values[97])
        detector.config = replace(
            detector.config, reporting=replace(detector.config.reporting, threshold=threshold)
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = boxcov.fit(
            detector, simulated.frames("clear", seed=3, count=4), n_data=3500, prior_precision=100.0
        )
    kinds = KINDS if device == "cuda" else [kind for kind in KINDS if kind[0] == "float32"]
    models = {
        kind: boxcov.ExactGLM(detector, posterior, engine=boxcov.EngineOptions(kind[0], kind[1]))
        for kind in kinds
    }
    found = {kind: [model(points) for _ in range(5)][-1] for kind, model in models.items()}
    runs: dict[Any, Callable[[], Any]] = {"plain": lambda: detector.detect(points)}
    for kind, model in models.items():
        at = model.linearized.at(points, cache_trunk=False)
        runs[kind] = lambda model=model: model(points)
        runs[kind, "stages"] = lambda model=model, at=at: model.router.staged_head.run(at)
    times: dict[Any, list[float]] = {key: [] for key in runs}
    with torch.no_grad():
        for turn in range(2 * ROUNDS + 3):
            for key, run in runs.items():
                spent = timed(run)
                if turn >= 3:
                    times[key].append(spent)
    plain, exact = median(times["plain"]), found[kinds[0]]
    what = (
        torch.cuda.get_device_name()
        if device == "cuda"
        else f"CPU, {torch.get_num_threads()} threads"
    )
    print(
        f"{name}, {len(exact)} boxes, {what}, torch {torch.__version__}; "
        f"medians of {2 * ROUNDS}, milliseconds; plain detector {plain:.2f}"
    )
    for kind in kinds:
        same = torch.equal(found[kind].boxes, detector.detect(points).boxes)
        off = float(((found[kind].uncertainty - exact.uncertainty).abs() / exact.uncertainty).max())
        whole, stages = median(times[kind]), median(times[kind, "stages"])
        print(
            f"{kind[0]:8s} tolerance {kind[1]:.0e}  whole {whole:7.2f}  "
            f"on top {whole - plain:6.2f}  stages {stages:5.2f}  "
            f"traces at most {100 * off:.3f} % off  boxes {'bit for bit' if same else 'DIFFER'}"
        )


if __name__ == "__main__":
    for which in sys.argv[1:] or ["pillar"]:
        main(which)
