"""``boxcov export``: a detector with its covariances as one ONNX file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from boxcov.cli.options import AsJson, DetectorWord, Seed


def export(
    out: Annotated[Path, typer.Option(metavar="FILE", help="The .onnx file.")],
    posterior: Annotated[Path, typer.Option(metavar="FILE", help="What boxcov fit wrote.")],
    detector: DetectorWord = "centerpoint:small",
    samples: Annotated[
        int, typer.Option(min=2, help="Directions of the posterior, as constants in the file.")
    ] = 10,
    exact: Annotated[
        bool,
        typer.Option("--exact", help="The exact covariance of the head in the place of samples."),
    ] = False,
    boxes: Annotated[
        int, typer.Option(min=1, help="Rows of the outputs: boxes that are reported at most.")
    ] = 100,
    candidates: Annotated[
        int, typer.Option(min=1, help="Boxes before NMS at most, of each task or of the image.")
    ] = 256,
    pairs: Annotated[
        int, typer.Option(min=1, help="Pairs of rotated boxes near each other at most.")
    ] = 8192,
    example: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A frame to check the file on, as boxcov stream reads it; a simulated one or noise if not given.",
        ),
    ] = None,
    size: Annotated[
        int | None, typer.Option(min=32, help="Pixels of the square images, a multiple of 32.")
    ] = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Write a detector together with its uncertainty to ONNX: fixed shapes; boxes, scores, labels and covariances come out.

    Of a CenterPoint everything behind the encoder; of a YOLOX everything. The file is checked in onnxruntime before it is written.
    """
    from boxcov.errors import BoxcovError
    from boxcov.export import onnx
    from boxcov.pipeline.sources import check_folder, detector_named
    from boxcov.posterior.posterior import Posterior

    check_folder(out)
    if size is not None and size % 32:
        raise BoxcovError(f"--size must be a multiple of 32 pixels, got {size}")
    network = detector_named(detector)
    fitted = Posterior.load(posterior, network)
    limits = onnx.StaticLimits(boxes, candidates, pairs)
    name, inputs = _example(network, example, size)
    report = onnx.export(
        network, fitted, out, inputs, "exact" if exact else samples, seed, limits, input_name=name
    )
    report = {"out": str(out), "bytes": out.stat().st_size, **report}
    print(json.dumps(report) if as_json else _shown(report))


def _example(network: Any, path: Path | None, size: int | None) -> tuple[str, Any]:
    """What the graph's input is called, and one."""
    import torch

    from boxcov.data import simulated
    from boxcov.detectors.yolox import YOLOX
    from boxcov.pipeline.stream import Reader

    if isinstance(network, YOLOX):
        side = size or network.config.size
        noise = 255 * torch.rand(1, 3, side, side, generator=torch.Generator().manual_seed(0))
        return "image", noise if path is None else Reader(network, size=side)(path)[0]
    clouds = simulated.frames(count=1)[0][0] if path is None else Reader(network)(path)[0]
    with torch.no_grad():
        return "map", network.encoder(clouds).contiguous()


def _shown(report: dict[str, Any]) -> str:
    how = "exact" if report["samples"] is None else f"{report['samples']} samples"
    shapes = [
        f"{name} {'x'.join(map(str, shape)) or 'one number'}"
        for part in ("inputs", "outputs")
        for name, shape in report[part].items()
    ]
    what = f"{report['detector']}, covariance by {how} of the {report['depth']}, {report['bytes'] / 2**20:.1f} MiB"
    return f"{what}\n{', '.join(shapes)}\nwritten to {report['out']}"
