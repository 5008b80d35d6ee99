"""A fit step against a training step of the same CenterPoint: time, ratio, frames per second.

    python benchmarks/fit_step.py [pillar | voxel | small] ... [--batch 1 4] [--depth head]
        [--device cuda]

A fit step is a forward pass, the gradients at the outputs of the layers of ``--depth`` and their
factors. A training step is a forward pass, the loss and the gradients of all parameters, without
an optimizer. Inputs and targets are on the device. Medians over alternating runs after a warm-up,
with synchronization.
"""

from __future__ import annotations

import argparse
from statistics import median

import torch
from deep import detector_named, timed

from boxcov._torch.modules import move, ready
from boxcov.data import batched, simulated
from boxcov.kfac.accumulate import Accumulator
from boxcov.kfac.losses import FrameLosses, select_parameters

WARM_UP = 3


def steps(name: str, batch: int, options: argparse.Namespace) -> tuple[float, float, int]:
    """Return the milliseconds of a fit step and of a training step, and the layers."""
    device = torch.device(options.device)
    detector = detector_named(name, options.device)
    inputs, targets = batched(simulated.frames("clear", seed=11, count=batch), batch)[0]
    inputs, targets = ready(inputs, device), move(targets, device)
    accumulator = Accumulator(FrameLosses(detector, select_parameters(detector, options.depth)))
    # the first batch is checked, the others are not
    accumulator.add(accumulator.terms(inputs, targets, 0))
    for parameter in detector.parameters():
        parameter.requires_grad_(True)

    def fit() -> None:
        accumulator.add(accumulator.terms(ready(inputs, device), move(targets, device), 1))

    def train() -> None:
        detector.zero_grad()
        detector.loss(detector(inputs), targets).mean().backward()

    times = [(timed(fit), timed(train)) for _ in range(WARM_UP + options.rounds)][WARM_UP:]
    fits, trains = zip(*times)
    return median(fits), median(trains), len(accumulator.sums)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="pillar | voxel | small")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--depth", default="head")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    names = options.names or ["pillar"]
    if set(names) - {"pillar", "voxel", "small"}:
        parser.error(f"detectors are pillar, voxel and small, got {' '.join(names)}")
    what = (
        torch.cuda.get_device_name()
        if options.device.startswith("cuda")
        else f"CPU, {torch.get_num_threads()} threads"
    )
    print(
        f"{what}, torch {torch.__version__}, depth {options.depth}; medians of {options.rounds}\n"
    )
    print(
        f"{'':10}{'batch':>6}{'layers':>8}{'fit step':>12}{'training step':>16}{'ratio':>8}"
        f"{'frames / s':>12}"
    )
    for name in names:
        for batch in options.batch:
            fit, train, layers = steps(name, batch, options)
            print(
                f"{name:10}{batch:6}{layers:8}{fit:9.1f} ms{train:13.1f} ms{fit / train:8.2f}"
                f"{1e3 * batch / fit:12.1f}"
            )


if __name__ == "__main__":
    main()
