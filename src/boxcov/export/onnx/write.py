"""Write a detector with its covariances to an ONNX file, after a comparison with PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from boxcov._torch.modules import check_fingerprint, shadow
from boxcov.detector import Detector
from boxcov.errors import BoxcovError, join_names
from boxcov.export.onnx.model import build_model
from boxcov.export.onnx.trace import trace
from boxcov.files import atomic_write, to_json
from boxcov.input_file import parse_metadata, read_bytes, reading
from boxcov.posterior.posterior import Posterior
from boxcov.predict.predictor import check_samples, estimator
from boxcov.predict.static_frame import MAX_ROWS, FrameFunction
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

    An error model that the posterior holds is part of the graph. It must be one for this method and
    number of samples; ``posterior.with_error_model(None)`` leaves it out.

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
    method = {
        "method": "exact" if samples == "exact" else "mcglm",
        "samples": None if samples == "exact" else samples,
        "seed": None if samples == "exact" else seed,
    }
    _check_error_model(detector, posterior, estimator(method), limits)
    static_part = _static_part(detector, posterior, inputs)
    function = FrameFunction(
        static_part,
        posterior,
        inputs,
        limits,
        None
        if samples == "exact"
        else posterior.sample(samples, torch.Generator().manual_seed(seed)),
    )
    with torch.no_grad():
        expected = function(inputs)
    metadata = {
        **_describe(detector, posterior, limits),
        **method,
        "inputs": {input_name: list(inputs.shape)},
        "outputs": {name: list(value.shape) for name, value in zip(function.names, expected)},
    }
    content = build_model(
        trace(function, inputs), inputs, (input_name, function.names), {_KEY: to_json(metadata)}
    )
    if check:
        _compare(content, {input_name: inputs.numpy()}, dict(zip(function.names, expected)))
    with atomic_write(path) as temporary:
        temporary.write_bytes(content)
    return metadata


def about(path: str | Path) -> dict[str, Any]:
    """Return the metadata of a file written by ``export``: version, method, weights, shapes, ..."""
    onnx = _import("onnx")
    from google.protobuf.message import DecodeError

    with reading(path, "an ONNX file of boxcov's"):
        try:
            model = onnx.load_model_from_string(read_bytes(path, 1 << 31))
        except DecodeError as error:
            raise ValueError(str(error)) from None
        properties = {entry.key: entry.value for entry in model.metadata_props}
        metadata: dict[str, Any] = parse_metadata(properties[_KEY])
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


def _check_error_model(
    detector: Detector, posterior: Posterior, method: str, limits: StaticLimits
) -> None:
    """Raise if the posterior's error model is for something else, or too many rows."""
    if posterior.error_model is None:
        return
    posterior.error_model.check(method, posterior.fingerprint, detector)
    if limits.boxes > MAX_ROWS:
        raise BoxcovError(
            f"the graph of an error model has at most {MAX_ROWS} boxes, got {limits.boxes}: lower "
            "the limit, or take posterior.with_error_model(None)"
        )


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
        "error_model": None if posterior.error_model is None else posterior.error_model.summary(),
    }


def _compare(content: bytes, inputs: dict[str, Any], expected: dict[str, Tensor]) -> None:
    """Raise if the graph in onnxruntime differs from PyTorch on the example."""
    onnxruntime = _import("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        outputs = session.run(None, inputs)
    except Exception as error:  # onnxruntime's errors have no common base class
        raise BoxcovError(
            f"onnxruntime cannot run the graph, it was not written: {error}"
        ) from error
    for (name, reference), output in zip(expected.items(), outputs):
        wanted = reference.double()
        # an infinite half width must be infinite; its difference, NaN, counts as 0
        off = torch.where(wanted.isinf(), 0, wanted - torch.from_numpy(output).double())
        difference = float(off.norm() / wanted[~wanted.isinf()].norm().clamp(min=1e-30))
        if not bool((torch.from_numpy(output).isinf() == wanted.isinf()).all()):
            difference = torch.inf
        if not difference <= _TOLERANCE:
            raise BoxcovError(
                f"the graph gives other {name} than PyTorch on the example (relative difference "
                f"{difference:.1e}): it was not written"
            )
