"""Writing the file, saying what it is, and checking it against PyTorch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from boxcov._torch.fingerprint import check_fingerprint, fingerprint
from boxcov._torch.shadow import shadow
from boxcov.detector import Detector
from boxcov.errors import BoxcovError, join_names
from boxcov.export.onnx.builder import OPSET, TYPES, Builder
from boxcov.export.onnx.frame import OUTPUTS, Frame
from boxcov.export.onnx.operators import OPERATORS
from boxcov.export.onnx.trace import traced
from boxcov.files import atomic_write, reading
from boxcov.posterior.posterior import Posterior
from boxcov.predict.predictor import check_samples
from boxcov.static_selection import StaticLimits
from boxcov.version import __version__

_SLACK = 1e-3  # relative: what the file may differ from PyTorch by
_KEY = "boxcov"  # of the metadata
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
    """Write ``detector.static_part()`` and its covariances to one ONNX file; gives what the file says of itself.

    inputs: an example of what the graph takes, with a batch of 1: every shape in it is fixed. For a CenterPoint what its encoder gives,
    for a YOLOX an image. samples: the directions that ``MCGLM(samples=, seed=)`` draws, as constants; or "exact" as ``ExactGLM``.
    check: run the file in onnxruntime on the example and refuse it where it differs from PyTorch by more than 1e-3.

    >>> import boxcov, tempfile
    >>> from boxcov.data import shapes
    >>> from boxcov.detectors.tiny import TinyCenter
    >>> frames = shapes.frames(count=2)
    >>> detector = TinyCenter(threshold=0.05, most=3).eval()
    >>> posterior = boxcov.fit(detector, frames)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     said = export(detector, posterior, f"{folder}/tiny.onnx", frames[0][0], samples=2, limits=StaticLimits(boxes=3))
    ...     said == about(f"{folder}/tiny.onnx"), said["fields"], said["outputs"]["covariance"]
    (True, ['x', 'y', 'w', 'l', 'yaw'], [3, 5, 5])
    """
    _onnx()
    limits = limits or StaticLimits()
    if samples != "exact":
        check_samples(samples)
    dense = _dense(detector, posterior, inputs)
    own = replace(posterior, fingerprint=fingerprint(dense))
    frame = Frame(dense, own, inputs, None if samples == "exact" else samples, seed, limits)
    with torch.no_grad():
        expected = frame(inputs)
    said = {
        **_says(detector, posterior, limits),
        "method": "exact" if samples == "exact" else "mcglm",
        "samples": None if samples == "exact" else samples,
        "seed": None if samples == "exact" else seed,
        "inputs": {input_name: list(inputs.shape)},
        "outputs": {name: list(value.shape) for name, value in zip(OUTPUTS, expected)},
    }
    content = _model(frame, inputs, input_name, expected, said)
    if check:
        _check(content, input_name, inputs, expected)
    with atomic_write(path) as temporary:
        temporary.write_bytes(content)
    return said


def about(path: str | Path) -> dict[str, Any]:
    """What a file that ``export`` wrote says of itself: version, method, seed, weights, fields, classes, units, limits, shapes."""
    onnx = _onnx()
    from google.protobuf.message import DecodeError

    with reading(path, "an ONNX file of boxcov's"):
        try:
            model = onnx.load(str(path), load_external_data=False)
        except DecodeError as error:
            raise ValueError(str(error)) from None
        found: dict[str, Any] = json.loads(
            {entry.key: entry.value for entry in model.metadata_props}[_KEY]
        )
        return found


def _onnx() -> Any:
    try:
        import onnx
    except ImportError:
        raise BoxcovError(
            "ONNX files are written with the package onnx, which is not installed: pip install 'boxcov[onnx]'"
        ) from None
    return onnx


def _dense(detector: Detector, posterior: Posterior, inputs: Tensor) -> Detector:
    """The part of the detector that goes into the graph, in eval mode, if all fits together."""
    check_fingerprint(posterior.fingerprint, detector, "posterior")
    wrong = {
        str(t.dtype) for t in (*detector.parameters(), *detector.buffers()) if t.is_floating_point()
    } - {"torch.float32"}
    device = next(detector.parameters()).device.type
    if wrong or device != "cpu" or inputs.dtype != torch.float32 or inputs.device.type != "cpu":
        raise BoxcovError(
            f"a graph is written from a detector and inputs in float32 on the CPU, got {', '.join(sorted(wrong)) or 'float32'} on {device} "
            f"and inputs of {inputs.dtype} on {inputs.device.type}: take detector.float().cpu()"
        )
    dense = shadow(detector.static_part())
    known = {name for name, _ in dense.named_parameters()}
    outside = [name for name in posterior.parameters if name not in known]
    if outside:
        raise BoxcovError(
            f"the posterior is about {join_names(outside)}, which is not in the graph: fit one of the head, the neck or the backbone"
        )
    return dense


def _says(detector: Detector, posterior: Posterior, limits: StaticLimits) -> dict[str, Any]:
    fields = list(detector.box_fields)
    table = _METRES if "yaw" in fields else _PIXELS if "x1" in fields else {}
    return {
        "boxcov": __version__,
        "detector": type(detector).__name__,
        "weights_sha256": posterior.fingerprint,
        "fields": fields,
        "units": [table.get(name, "unknown") for name in fields],
        "classes": list(detector.classes),
        "depth": posterior.depth,
        "form": posterior.form,
        "n_data": posterior.n_data,
        "prior_precision": dict(posterior.prior_precision)
        if isinstance(posterior.prior_precision, Mapping)
        else posterior.prior_precision,
        "limits": asdict(limits),
    }


def _model(
    frame: Frame,
    inputs: Tensor,
    input_name: str,
    expected: tuple[Tensor, ...],
    said: dict[str, Any],
) -> bytes:
    """The file's content."""
    from onnx import checker, helper

    builder = Builder()
    names = builder.add(traced(frame, inputs), OPERATORS, [input_name])
    nodes, constants = builder.used(names)
    nodes += [helper.make_node("Identity", [name], [out]) for name, out in zip(names, OUTPUTS)]
    graph = helper.make_graph(
        nodes,
        "boxcov",
        [helper.make_tensor_value_info(input_name, TYPES[inputs.dtype], list(inputs.shape))],
        [
            helper.make_tensor_value_info(out, TYPES[value.dtype], list(value.shape))
            for out, value in zip(OUTPUTS, expected)
        ],
        constants,
    )
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", OPSET)],
        producer_name="boxcov",
        producer_version=__version__,
    )
    model.ir_version = 8  # of that opset: a newer one is refused by older runtimes
    helper.set_model_props(model, {_KEY: json.dumps(said)})
    checker.check_model(model)
    content: bytes = model.SerializeToString()
    return content


def _check(content: bytes, input_name: str, inputs: Tensor, expected: tuple[Tensor, ...]) -> None:
    try:
        import onnxruntime
    except ImportError:
        raise BoxcovError(
            "a file is checked with onnxruntime, which is not installed: pip install 'boxcov[onnx]', or check=False"
        ) from None
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    found = [torch.from_numpy(value) for value in session.run(None, {input_name: inputs.numpy()})]
    for name, own, theirs in zip(OUTPUTS, expected, found):
        off = (
            float((own.double() - theirs.double()).norm() / own.double().norm().clamp(min=1e-30))
            if own.numel()
            else 0.0
        )
        if not off <= _SLACK:
            raise BoxcovError(
                f"the graph gives other {name} than PyTorch on the example (relative difference {off:.1e}): it was not written"
            )
