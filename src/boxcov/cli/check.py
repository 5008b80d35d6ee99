"""``boxcov check``: whether a detector keeps the contract, on frames of a data set."""

from __future__ import annotations

import sys

import typer

from boxcov.cli.options import AsJson, DataWord, DetectorWord, Device, Seed, Split, Sweeps


def check(
    detector: DetectorWord = "centerpoint:small",
    data: DataWord = "simulated:clear",
    split: Split = None,
    sweeps: Sweeps = 10,
    seed: Seed = 0,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Look for what is wrong with a detector before anything is fitted: on the first frame of a split, with the second beside it.

    The exit code is 1 where a check fails.
    """
    from boxcov.checks import check as run
    from boxcov.pipeline.sources import Source, detector_named

    network = detector_named(detector, device)
    frames = Source(data, split, 2 if data.startswith("simulated") else None, seed, sweeps).frames(
        device, network.classes
    )
    report = run(network, frames[0], other=frames[1] if len(frames) > 1 else None)
    print(report.to_json() if as_json else report)
    if not report.ok:
        print(f"boxcov: {len(report.failed)} checks failed", file=sys.stderr)
        raise typer.Exit(1)
