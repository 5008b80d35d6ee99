"""``boxcov check``: check that a detector keeps the contract, on frames of a data set."""

from __future__ import annotations

from dataclasses import replace

import torch

from boxcov._torch.modules import move
from boxcov.checks import Report, check
from boxcov.checks.plausibility import LABEL_FRAMES, label_convention, observe
from boxcov.detectors.centerpoint import CenterPoint
from boxcov.pipeline.detectors import load_detector, match_source
from boxcov.pipeline.frames import Progress, load_labelled_frames
from boxcov.pipeline.options import CheckCommand, DataOptions
from boxcov.pipeline.paths import holds_output
from boxcov.report.frame_plot import write_plot


@holds_output
def run(options: CheckCommand, progress: Progress | None = None) -> Report:
    """Check the detector on the first frame of the data, and the second if there is one.

    If it passes, its boxes in the first frames are compared with the labels. Of a CenterPoint
    checkpoint the report also says what was understood of it and what its boxes look like.
    ``options.out`` is a picture of the first frame.
    """
    detector = load_detector(options, options.device)
    count = LABEL_FRAMES if options.data.startswith("simulated") else None
    source = DataOptions(options.data, options.split, count, options.seed, options.sweeps)
    frames = load_labelled_frames(match_source(source, detector), options.device, detector.classes)
    first = [frames[i] for i in range(min(2, len(frames)))]
    other = first[1] if len(first) > 1 else None
    report = check(detector, first[0], other=other, progress=progress)
    if report.ok:
        compared = label_convention(detector, frames)
        report = replace(report, findings=(*report.findings, compared))
    if options.out is not None:
        inputs, targets = first[0]
        found = detector.detect(move(inputs, torch.device(options.device)))
        write_plot(options.out, found, inputs, targets)
    if not isinstance(detector, CenterPoint):
        return report
    looks = observe(detector, first) if detector.provenance else []
    facts = tuple((fact.name, fact.value, fact.evidence) for fact in detector.provenance)
    return replace(report, findings=(*report.findings, *looks), checkpoint=facts)
