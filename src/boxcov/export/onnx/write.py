"""Write a detector with its covariances to an ONNX file, after a comparison with PyTorch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from boxcov._torch.modules import check_fingerprint, fingerprint, shadow
from boxcov.detector import Detector
from boxcov.errors import BoxcovError, join_names
from boxcov.export.onnx.frame import OUTPUTS, FrameFunction
from boxcov.export.onnx.model import build_model
from boxcov.export.onnx.trace import trace
from boxcov.files import atomic_write, reading
from boxcov.posterior.posterior import Posterior
from boxcov.predict.predictor import check_samples
from boxcov.static_selection import StaticLimits
from boxcov.version import __version__

_TOLERANCE = 1e-3  # relative difference between the graph and PyTorch
_KEY = "boxcov"  # of the file's metadata
_METRES = {
    **dict.fromkeys(("x", "y", "z", "w", "l", "h"), "m"),
    **dict.fromkeys(("vx", "vy"), "m/s"),
    "yaw": "rad",
}
_PIXELS = {**dict.fromkeys(("x1", "y1", "x2", "y2"), "px"), "logit": "1"}


def export(
    detector: Detector,
    posterior: Posterior,
    path: str | Path,
    inputs: Tensor,
    samples: int | Literal["exact"] = 10,
    seed: int = 0,
    limits: StaticLimits | None = None,
    *,
    input_name: str = "inputs",
    check: bool = True,
) -> dict[str, Any]:
    """Write ``detector.static_part()`` with its covariances to one ONNX file; return its metadata.

    inputs: an example of the graph's input, with a batch of 1; all shapes are fixed. The input is
    the output of the encoder for a CenterPoint, an image for a YOLOX. samples: number of posterior
    samples, stored as constants equal to those of ``MCGLM(samples=, seed=)``; or "exact" for the
    covariance of ``ExactGLM``. check: run the graph in onnxruntime on the example, and refuse to
    write it if it differs from PyTorch by more than 1e-3.

    >>> import boxcov, tempfile
    >>> from boxcov.data import shapes
    >>> from boxcov.detectors.tiny import TinyCenter
    >>> frames = shapes.frames(count=2)
    >>> detector = TinyCenter(threshold=0.05, most=3).eval()
    >>> posterior = boxcov.fit(detector, frames)
    >>> limits = StaticLimits(boxes=3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = f"{folder}/tiny.onnx"
    ...     metadata = export(detector, posterior, path, frames[0][0], samples=2, limits=limits)
    ...     metadata == about(path), metadata["fields"], metadata["outputs"]["covariance"]
    (True, ['x', 'y', 'w', 'l', 'yaw'], [3, 5, 5])
    """
    for package in ("onnx", "onnxscript", *(["onnxruntime"] if check else [])):
        _import(package)
    limits = limits or StaticLimits()
    if samples != "exact":
        check_samples(samples)
    static_part = _static_part(detector, posterior, inputs)
    function = FrameFunction(
        static_part,
        replace(posterior, fingerprint=fingerprint(static_part)),
        inputs,
        None if samples == "exact" else samples,
        seed,
        limits,
    )
    with torch.no_grad():
        expected = function(inputs)
    metadata = {
        **_describe(detector, posterior, limits),
        "method": "exact" if samples == "exact" else "mcglm",
        "samples": None if samples == "exact" else samples,
        "seed": None if samples == "exact" else seed,
        "inputs": {input_name: list(inputs.shape)},
        "outputs": {name: list(value.shape) for name, value in zip(OUTPUTS, expected)},
    }
    content = build_model(
        trace(function, inputs), inputs, (input_name, OUTPUTS), {_KEY: json.dumps(metadata)}
    )
    if check:
        _compare(content, input_name, inputs, expected)
    with atomic_write(path) as temporary:
        temporary.write_bytes(content)
    return metadata


def about(path: str | Path) -> dict[str, Any]:
    """Return the metadata of a file written by ``export``: version, method, weights, shapes, ..."""
    onnx = _import("onnx")
    from google.protobuf.message import DecodeError

    with reading(path, "an ONNX file of boxcov's"):
        try:
            model = onnx.load(str(path), load_external_data=False)
        except DecodeError as error:
            raise ValueError(str(error)) from None
        properties = {entry.key: entry.value for entry in model.metadata_props}
        metadata: dict[str, Any] = json.loads(properties[_KEY])
        return metadata


def _import(name: str) -> Any:
    """Import an optional package."""
    try:
        return import_module(name)
    except ImportError:
        raise BoxcovError(
            f"ONNX files need the package {name}, which is not installed: "
            "pip install 'boxcov[onnx]'"
        ) from None


def _static_part(detector: Detector, posterior: Posterior, inputs: Tensor) -> Detector:
    """Return the part of the detector that goes into the graph; raise if anything does not fit."""
    check_fingerprint(posterior.fingerprint, detector, "posterior")
    wrong = {
        str(t.dtype) for t in (*detector.parameters(), *detector.buffers()) if t.is_floating_point()
    } - {"torch.float32"}
    device = next(detector.parameters()).device.type
    if wrong or device != "cpu" or inputs.dtype != torch.float32 or inputs.device.type != "cpu":
        raise BoxcovError(
            "an export needs a detector and inputs in float32 on the CPU, got "
            f"{', '.join(sorted(wrong)) or 'float32'} on {device} and inputs of {inputs.dtype} on "
            f"{inputs.device.type}: take detector.float().cpu()"
        )
    part = shadow(detector.static_part())
    names = {name for name, _ in part.named_parameters()}
    outside = [name for name in posterior.parameters if name not in names]
    if outside:
        raise BoxcovError(
            f"the posterior contains {join_names(outside)}, which is not in the graph: "
            "fit a posterior of the head, the neck or the backbone"
        )
    return part


def _describe(detector: Detector, posterior: Posterior, limits: StaticLimits) -> dict[str, Any]:
    """Return the metadata that does not depend on the method."""
    fields = list(detector.box_fields)
    units = _METRES if "yaw" in fields else _PIXELS if "x1" in fields else {}
    tau = posterior.prior_precision
    return {
        "boxcov": __version__,
        "detector": type(detector).__name__,
        "weights_sha256": posterior.fingerprint,
        "fields": fields,
        "units": [units.get(name, "unknown") for name in fields],
        "classes": list(detector.classes),
        "depth": posterior.depth,
        "form": posterior.form,
        "n_data": posterior.n_data,
        "prior_precision": dict(tau) if isinstance(tau, Mapping) else tau,
        "limits": asdict(limits),
    }


def _compare(content: bytes, input_name: str, inputs: Tensor, expected: tuple[Tensor, ...]) -> None:
    """Raise if the graph in onnxruntime differs from PyTorch on the example."""
    onnxruntime = _import("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        outputs = session.run(None, {input_name: inputs.numpy()})
    except Exception as error:  # onnxruntime's errors have no common base class
        raise BoxcovError(
            f"onnxruntime cannot run the graph, it was not written: {error}"
        ) from error
    for name, reference, output in zip(OUTPUTS, expected, outputs):
        distance = (torch.from_numpy(output).double() - reference.double()).norm()
        difference = float(distance / reference.double().norm().clamp(min=1e-30))
        if not difference <= _TOLERANCE:
            raise BoxcovError(
                f"the graph gives other {name} than PyTorch on the example (relative difference "
                f"{difference:.1e}): it was not written"
            )
