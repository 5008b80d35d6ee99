"""Whole frames of compiled models on a GPU, beside the same models without ``boxcov.compile``.

python benchmarks/deployment.py [pillar | small] ...

Medians of 30 after a warm-up, with synchronization, in milliseconds. "graph" is what follows the
encoder. Limits: 160 boxes, 192 candidates per task, 8192 pairs.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from deep import detector_named, timed

import boxcov
from boxcov import EngineOptions, ExactGLM
from boxcov.data import simulated
from boxcov.static_selection import StaticLimits

LIMITS = StaticLimits(160, 192, 8192)
ROUNDS = 30


def main(name: str) -> None:
    detector = detector_named(name, "cuda")
    points = simulated.frames("clear", seed=11, count=1, device="cuda")[0][0]
    training = simulated.frames("clear", seed=3, count=4, device="cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = boxcov.fit(detector, training, n_data=3500, prior_precision=100.0)
    for precision in ("float32", "tf32"):
        set_tf32(precision == "tf32")
        models: dict[str, Any] = {
            "plain": detector,
            "exact": ExactGLM(detector, posterior, engine=EngineOptions(precision)),  # type: ignore[arg-type]
        }
        if name == "small":
            calibrated = boxcov.Posterior.load("small", detector)
            models["with the error model"] = ExactGLM(detector, calibrated)
        for what, model in models.items():
            fast = boxcov.compile(model, points, LIMITS)
            plain = detector.detect if what == "plain" else model
            given = fast._static_inputs(points)
            times = [middle(plain, points), middle(fast, points), middle(fast._run, given)]
            print(
                f"{name:7s} {precision:8s} {what:22s} {times[0]:6.2f}  compiled {times[1]:6.2f}  "
                f"graph {times[2]:6.2f}  boxes {len(fast(points))}"
            )


def set_tf32(is_allowed: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = is_allowed


def middle(run: Callable[[Any], Any], given: Any) -> float:
    for _ in range(5):
        run(given)
    return median(timed(lambda: run(given)) for _ in range(ROUNDS))


if __name__ == "__main__":
    for which in sys.argv[1:] or ["pillar", "small"]:
        main(which)
