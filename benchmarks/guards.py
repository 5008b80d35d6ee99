"""Cost of the checks of weights and results, as a share of a whole frame of the shipped detector.

    python benchmarks/guards.py [--pairs 40] [--write]

Frames with and without the checks alternate in one run, in random order within each pair, and
seconds are those of the processor: a busy machine slows both alike. --write replaces
docs/results/data/reliability-guards.json.
"""

from __future__ import annotations

import argparse
import json
import random
from datetime import date
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import torch

from boxcov import EngineOptions, ExactGLM, Posterior
from boxcov.data import simulated
from boxcov.detectors import centerpoint
from boxcov.pipeline.options.option import SHIPPED_POSTERIOR
from boxcov.predict.predictor import Predictor

RESULT = Path(__file__).parents[1] / "docs/results/data/reliability-guards.json"
_FLAG = torch.tensor(True)


class Unguarded(ExactGLM):
    """As ExactGLM, without the checks of weights and results."""

    def check_weights(self) -> torch.Tensor:
        return _FLAG

    def check(self, found: Any, is_current: torch.Tensor) -> Any:
        return found


def share(guarded: Predictor, plain: Predictor, frames: list[Any], pairs: int) -> dict[str, float]:
    """Return the seconds of a frame and the share that the checks add, with quartiles."""
    draw, ratios, seconds = random.Random(0), [], []
    for number in range(pairs + 2):
        inputs = frames[number % len(frames)]
        taken = {}
        for model in draw.sample([guarded, plain], 2):
            began = process_time()
            model(inputs)
            taken[model] = process_time() - began
        if number >= 2:  # the first frames verify the engines
            ratios.append(100 * (taken[guarded] / taken[plain] - 1))
            seconds.append(taken[plain])
    ratios.sort()
    low, high = ratios[pairs // 4], ratios[3 * pairs // 4]
    return {"ms": 1000 * median(seconds), "share": median(ratios), "low": low, "high": high}


def direct(model: Predictor, inputs: Any, repeats: int = 200) -> float:
    """Return the milliseconds of the checks alone."""
    found = model(inputs)
    began = process_time()
    for _ in range(repeats):
        model.check(found, model.check_weights())
    return 1000 * (process_time() - began) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    detector = centerpoint.load("small")
    posterior = Posterior.load(SHIPPED_POSTERIOR, detector)  # with its error model
    frames = [inputs for inputs, _ in simulated.frames(seed=7, count=4)]
    rows = []
    for name, verify in (("16 calls (default)", 16), ("always", "always")):
        engine = EngineOptions(verify=verify)
        models = [kind(detector, posterior, engine=engine) for kind in (ExactGLM, Unguarded)]
        cost = share(*models, frames, options.pairs)
        alone = direct(models[0], frames[0])
        ms, *rest = cost.values()
        rows.append([name, ms, alone, 100 * alone / ms, *rest])
        print(*rows[-1], sep="\t", flush=True)
    if options.write:
        result = {
            "title": "Cost of the checks per frame, centerpoint:small with its error model",
            "command": "python benchmarks/guards.py --write",
            "date": str(date.today()),
            "machine": "one core of a shared CPU",
            "columns": [
                "weights within",
                "frame, ms",
                "checks, ms",
                "checks, %",
                "with / without - 1, %",
                "quartile",
                "other quartile",
            ],
            "digits": [None, 0, 2, 2, 2, 2, 2],
            "rows": rows,
            "notes": [
                f"{options.pairs} pairs of frames with and without the checks, in random order, in "
                "one run. Milliseconds of the processor. Checks: the checks alone, 200 times in a "
                "row. With / without - 1: the median of the pairs, with its quartiles: on a busy "
                "machine whole frames differ by more than the checks."
            ],
        }
        RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
