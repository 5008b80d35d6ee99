"""``boxcov export``: write a detector with its covariances to one ONNX file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from boxcov.data import simulated
from boxcov.detectors.centerpoint import CenterPoint
from boxcov.detectors.transformers import QueryDetector
from boxcov.detectors.yolox import YOLOX
from boxcov.errors import BoxcovError
from boxcov.export import onnx
from boxcov.pipeline.detectors import load_detector, warn_if_implausible
from boxcov.pipeline.frame_files import FrameReader
from boxcov.pipeline.options import ExportCommand
from boxcov.pipeline.options.common import default_posterior
from boxcov.pipeline.paths import holds_output
from boxcov.posterior.posterior import Posterior


@holds_output
def run(options: ExportCommand, note: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Write the ONNX file, check it in onnxruntime and return a description of it.

    note: takes a line for the user before the work that takes long.
    """
    detector = load_detector(options)
    path = options.posterior or default_posterior(options.detector, "an ONNX file")
    posterior = Posterior.load(path, detector)
    limits = onnx.StaticLimits(options.boxes, options.candidates, options.pairs)
    samples = onnx.graph_samples(
        detector, posterior, "exact" if options.exact else options.samples, limits
    )
    input_name, inputs, signal_inputs = _example_input(detector, options)
    if note is not None:
        note("tracing, writing and checking the graph: a minute, or several for a large network")
    report = onnx.export(
        detector,
        posterior,
        options.out,
        inputs,
        samples,
        options.seed,
        limits,
        input_name=input_name,
        signal_inputs=signal_inputs,
    )
    return {"out": str(options.out), "bytes": options.out.stat().st_size, **report}


def _example_input(detector: Any, options: ExportCommand) -> tuple[str, Any, torch.Tensor | None]:
    """Return the name of the graph's input and an example of it, and of the signals' inputs."""
    if isinstance(detector, YOLOX):
        reader = FrameReader.of(detector, options)  # raises if the size is not known
        if options.example is not None:
            return "image", reader(options.example).inputs, None
        generator = torch.Generator().manual_seed(0)
        noise = torch.randint(0, 256, (3, 640, 640), generator=generator, dtype=torch.uint8)
        return "image", reader.image(noise).inputs, None
    path = options.example
    if options.reader is not None or not isinstance(detector, CenterPoint):
        if path is None:
            raise BoxcovError(
                f"boxcov cannot make an example input of a {type(detector).__name__}: give a frame "
                "as --example FILE, for a detector of your own with --reader "
                "python:FILE.py:FUNCTION"
            )
        inputs = FrameReader.of(detector, options)(path).inputs
        if isinstance(detector, QueryDetector):  # an image processor stays outside
            inputs = detector.prepare(inputs)
        return "image" if options.reader is None else "input", inputs, None
    if path is None:
        clouds = simulated.frames(count=1)[0][0]
    else:
        clouds = FrameReader.of(detector, options)(path).inputs
        warn_if_implausible(detector, [(clouds, ())])
    with torch.no_grad():
        return "map", detector.encoder(clouds).contiguous(), detector.signal_inputs(clouds)
