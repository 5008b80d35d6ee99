"""Cost of directional derivatives through the whole of a full-size CenterPoint.

python benchmarks/deep.py [pillar | voxel | small] ...

Medians over alternating runs after a warm-up, with synchronization. "off" is the largest relative
error of a trace against float32 along the same directions.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import torch

import boxcov
from boxcov.data import simulated
from boxcov.detectors import centerpoint
from boxcov.detectors.centerpoint import CenterPoint, Config

ROUNDS = 9


def detector_named(name: str, device: str) -> CenterPoint:
    if name == "voxel":
        return CenterPoint(Config.voxel()).eval().to(device)
    return centerpoint.load("small" if name == "small" else "weights/pillar.safetensors").to(device)


def timed(run: Callable[[], Any]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def main(name: str) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    detector = detector_named(name, device)
    (inputs, _), (other, targets) = simulated.frames("clear", seed=11, count=2)
    points = [cloud.to(device) for cloud in inputs]
    if name == "voxel":  # untrained: a threshold that lets about a hundred boxes through
        threshold = float(detector.detect(points).scores.sort(descending=True).values[97])
        detector.config = replace(
            detector.config, reporting=replace(detector.config.reporting, threshold=threshold)
        )
    fitted = boxcov.fit(
        detector,
        [(other, targets)],
        fisher="identity",
        depth="backbone",
        n_data=3500,
        prior_precision=100.0,
    )
    models: dict[str, Callable[[Any], Any]] = {}
    for samples in (10, 32):
        for precision in ("float32", "tf32") if device == "cuda" else ("float32",):
            models[f"MCGLM, k = {samples}, {precision}"] = boxcov.MCGLM(
                detector, fitted, samples=samples, engine=boxcov.EngineOptions(precision)
            )
    models["ExactGLM, head exact, k = 10 below"] = boxcov.ExactGLM(detector, fitted, samples=10)
    models["MCGLM, k = 10, fd, as published"] = boxcov.MCGLM(
        detector, fitted, samples=10, derivative="fd", epsilon=1e-3
    )
    found = {key: model(points) for key, model in models.items()}
    times: dict[str, list[float]] = {key: [] for key in ("plain", *models)}
    for turn in range(ROUNDS + 3):
        for key, run in {"plain": detector.detect, **models}.items():
            spent = timed(lambda run=run: run(points))
            if turn >= 3:
                times[key].append(spent)
    show(name, device, found, times)


def show(name: str, device: str, found: dict[str, Any], times: dict[str, list[float]]) -> None:
    plain = median(times["plain"])
    what = (
        torch.cuda.get_device_name()
        if device == "cuda"
        else f"CPU, {torch.get_num_threads()} threads"
    )
    boxes = len(next(iter(found.values())))
    print(
        f"{name}, all but the encoder, {boxes} boxes, {what}, torch {torch.__version__}; "
        f"medians of {ROUNDS}"
    )
    print(f"{'plain detector':44s} {plain:8.2f} ms")
    for key, result in found.items():
        spent = median(times[key])
        same = next(v for k, v in found.items() if k.split(",")[:2] == key.split(",")[:2])
        off = float(((result.uncertainty - same.uncertainty).abs() / same.uncertainty).max())
        note = (
            ""
            if "float32" in key or "fd" in key or "Exact" in key
            else f", traces at most {100 * off:.2f} % off float32"
        )
        print(
            f"{key:44s} {spent:8.2f} ms, {spent - plain:7.2f} on top "
            f"({(spent - plain) / plain:.2f} plain){note}"
        )


if __name__ == "__main__":
    for which in sys.argv[1:] or ["pillar"]:
        main(which)
