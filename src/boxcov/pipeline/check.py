"""``boxcov check``: check that a detector keeps the contract, on frames of a data set."""

from __future__ import annotations

from boxcov.checks import Report, check
from boxcov.pipeline.detectors import load_detector
from boxcov.pipeline.frames import load_frames
from boxcov.pipeline.options import CheckCommand, DataOptions


def run(options: CheckCommand) -> Report:
    """Check the detector on the first frame of the data, and the second if there is one."""
    detector = load_detector(options, options.device)
    count = 2 if options.data.startswith("simulated") else None
    source = DataOptions(options.data, options.split, count, options.seed, options.sweeps)
    frames = load_frames(source, options.device, detector.classes)
    return check(detector, frames[0], other=frames[1] if len(frames) > 1 else None)
