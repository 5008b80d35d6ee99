"""Write a detector with its covariances to an ONNX file, after a comparison with PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path, tree_map_only

from boxcov._files.input_file import parse_metadata, read_bytes, reading
from boxcov._files.output_file import atomic_write, to_json
from boxcov._torch.modules import differentiable_shadow, shadow
from boxcov.checks.selections import check_variants, wide_limits
from boxcov.checks.subject import named_floats
from boxcov.detector import Detector
from boxcov.error_model.model import ErrorModel
from boxcov.errors import BoxcovError, check_whole, import_package, join_names
from boxcov.export.onnx.graph import FrameGraph, build_graph
from boxcov.export.onnx.torch_onnx import build_model
from boxcov.posterior.posterior import Posterior
from boxcov.predict.predictor import estimator
from boxcov.predict.static_frame import MAX_ROWS, WithSignals
from boxcov.static_selection import StaticLimits, box_rows, check_static_selection, tie_hint
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
    inputs: Any,
    samples: int | Literal["exact"] | None = None,
    seed: int = 0,
    limits: StaticLimits | None = None,
    *,
    input_name: str = "inputs",
    signal_inputs: Tensor | None = None,
) -> dict[str, Any]:
    """Write ``detector.static_part()`` with its covariances to one ONNX file; return its metadata.

    inputs: an example of the graph's input, a batch of 1: a tensor, or a pytree of tensors such as
    a dict, whose keys name the inputs; all shapes are fixed. It is the output of the encoder for a
    CenterPoint, an image for a YOLOX. samples: number of posterior samples, stored as constants
    equal to those of ``MCGLM(samples=, seed=)``; or "exact" for the covariance of ``ExactGLM``; by
    default as the error model was calibrated, 10 samples without one. The graph runs in onnxruntime
    on the example, and is not written if it differs from PyTorch by more than 1e-3.

    An error model that the posterior holds is part of the graph. It must be one for this method and
    number of samples; ``posterior.with_error_model(None)`` leaves it out. signal_inputs: of
    ``detector.signal_inputs``, a second input of the graph if the error model uses it. What keeps
    a detector from being written is raised as one ``BoxcovError`` that lists all of it.

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
    limits = limits or StaticLimits()
    samples = graph_samples(detector, posterior, samples, limits)
    method = {**_method(samples), "seed": None if samples == "exact" else seed}
    named = _named_inputs(inputs, input_name)
    if signal_inputs is not None:
        named["signal_inputs"], inputs = signal_inputs, WithSignals(inputs, signal_inputs)
    generator = torch.Generator().manual_seed(seed)
    etas = None if samples == "exact" else posterior.sample(samples, generator)
    part = _static_part(detector, posterior, named)
    graph = build_graph(part, posterior, inputs, named, limits=limits, etas=etas)
    _check_selection(part, inputs, limits)
    metadata = {
        **_describe(detector, posterior, limits),
        **method,
        "inputs": {name: list(value.shape) for name, value in graph.inputs.items()},
        "outputs": {name: list(value.shape) for name, value in graph.expected.items()},
    }
    properties = {_KEY: to_json(metadata)}
    content = build_model(graph.module, graph.inputs, list(graph.expected), properties)
    _compare(content, graph)
    with atomic_write(path) as temporary:
        temporary.write_bytes(content)
    return metadata


def graph_samples(
    detector: Detector,
    posterior: Posterior,
    samples: int | Literal["exact"] | None,
    limits: StaticLimits,
) -> int | Literal["exact"]:
    """Return ``samples`` of a graph; raise if a package is missing or the error model does not fit.

    This takes no time: call it before reading an example input.
    """
    for package in ("onnx", "onnxscript", "onnxruntime"):
        import_package(package)
    if samples is None:
        samples = _calibrated_samples(posterior.error_model) or 10
    if samples != "exact":
        check_whole("samples", samples, 2)
    _check_error_model(detector, posterior, estimator(_method(samples)), limits)
    return samples


def about(path: str | Path) -> dict[str, Any]:
    """Return the metadata of a file written by ``export``: version, method, weights, shapes, ..."""
    onnx = import_package("onnx")
    from google.protobuf.message import DecodeError

    with reading(path, "an ONNX file of boxcov's"):
        try:
            model = onnx.load_model_from_string(read_bytes(path, 1 << 31))
        except DecodeError as error:
            raise ValueError(str(error)) from None
        properties = {entry.key: entry.value for entry in model.metadata_props}
        return parse_metadata(properties[_KEY])


def _named_inputs(inputs: Any, input_name: str) -> dict[str, Tensor]:
    """Return the tensors of a pytree by their keys; a single one is called ``input_name``."""
    first, named = [] if isinstance(inputs, Mapping) else [input_name], {}
    for path, leaf in tree_flatten_with_path(inputs)[0]:
        if isinstance(leaf, Tensor):
            keys = [str(getattr(step, "key", getattr(step, "idx", step))) for step in path]
            named["_".join([*first, *keys])] = leaf
    if not named:
        raise BoxcovError(f"inputs of type {type(inputs).__name__} hold no tensor")
    return named


def _static_part(
    detector: Detector, posterior: Posterior, inputs: Mapping[str, Tensor]
) -> Detector:
    """Return the part of the detector that goes into the graph; raise if anything does not fit."""
    posterior.check_detector(detector)
    tensors = (*detector.parameters(), *detector.buffers(), *inputs.values())
    found = {
        f"{str(t.dtype).removeprefix('torch.')} on {t.device.type}"
        for t in tensors
        if t.is_floating_point() or t.device.type != "cpu"
    }
    if found - {"float32 on cpu"}:
        raise BoxcovError(
            "an export needs a detector and inputs in float32 on the CPU, got "
            f"{join_names(sorted(found))}: take detector.float().cpu()"
        )
    part = shadow(detector.static_part())
    names = dict(part.named_parameters())
    if outside := [name for name in posterior.parameters if name not in names]:
        raise BoxcovError(
            f"the posterior contains {join_names(outside)}, which is not in the graph: "
            "fit a posterior of the head, the neck or the backbone"
        )
    return part


def _method(samples: int | Literal["exact"]) -> dict[str, Any]:
    if samples == "exact":
        return {"method": "exact", "samples": None}
    return {"method": "mcglm", "samples": samples}


def _calibrated_samples(error_model: ErrorModel | None) -> int | Literal["exact"] | None:
    """Return ``samples`` of the graph that an error model is for; None if there is none."""
    method, samples = ("", None) if error_model is None else error_model.method
    if method == "exact" and samples is None:
        return "exact"
    return samples if method == "mcglm" else None


def _check_error_model(
    detector: Detector, posterior: Posterior, method: str, limits: StaticLimits
) -> None:
    """Raise if the posterior's error model is for something else, or too many rows."""
    if posterior.error_model is None:
        return
    samples = _calibrated_samples(posterior.error_model)
    option = "--exact" if samples == "exact" else f"--samples {samples}"
    fits = f"samples={to_json(samples)} or none (`boxcov export {option}`)" if samples else ""
    posterior.error_model.check(method, posterior.fingerprint, detector, fits)
    if limits.boxes > MAX_ROWS:
        raise BoxcovError(
            f"the graph of an error model has at most {MAX_ROWS} boxes, got {limits.boxes}: lower "
            "the limit, or take a posterior without an error model"
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
        "configuration": detector.configuration(),
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


def _check_selection(part: Detector, inputs: Any, limits: StaticLimits) -> None:
    """Raise if ``select_static`` reports other boxes than ``select``, as ``boxcov check`` does."""
    given = inputs.inputs if isinstance(inputs, WithSignals) else inputs
    raw = differentiable_shadow(part)(given)
    depends = [leaf.requires_grad for _, leaf in named_floats(raw)]  # on the weights
    raw = tree_map_only(Tensor, Tensor.detach, raw)
    with torch.no_grad():
        static = part.select_static(raw, limits)
        assert static is not None  # a graph was built from it
        check_static_selection(part, raw, static)
        check_variants(part, raw, wide_limits(int(static.count)), depends)


def _compare(content: bytes, graph: FrameGraph) -> None:
    """Raise if the graph in onnxruntime differs from PyTorch on the example."""
    onnxruntime = import_package("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        outputs = session.run(None, {name: value.numpy() for name, value in graph.inputs.items()})
    except Exception as error:  # onnxruntime's errors have no common base class
        said = f"onnxruntime cannot run the graph, it was not written: {error}"
        raise BoxcovError(said) from error
    check_agreement(dict(zip(graph.expected, map(torch.from_numpy, outputs))), graph.expected)


def check_agreement(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise if outputs of the graph differ from those of PyTorch by more than the tolerance."""
    rows = _matching_rows(found, expected)
    hint = tie_hint(expected["scores"][: int(expected["count"])])
    for name, reference in expected.items():
        wanted = reference.double()
        output = (found[name] if wanted.dim() == 0 else found[name][rows]).double()
        # half widths may be infinite, and fields unknown to the error model NaN: in both, or none
        known = wanted.isfinite()
        difference = float((wanted - output)[known].norm() / wanted[known].norm().clamp(min=1e-30))
        if not torch.equal(wanted[~known].nan_to_num(), output[~known].nan_to_num()):
            difference = torch.inf
        if not difference <= _TOLERANCE:
            raise BoxcovError(
                f"the graph gives other {name} than PyTorch on the example (relative difference "
                f"{difference:.1e}): it was not written{hint}"
            )


def _matching_rows(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Tensor:
    """Return the row of ``found`` for each expected one: the order of equal scores is undefined."""
    rows, n = torch.arange(len(expected["scores"])), int(expected["count"])
    own, other = (
        box_rows(*(part[name] for name in ("boxes", "scores", "labels")))[:n]
        for part in (expected, found)
    )
    nearest = torch.cdist(own, other).argmin(1) if n else rows[:0]
    is_permutation = torch.equal(nearest.sort().values, rows[:n])
    return torch.cat([nearest, rows[n:]]) if is_permutation else rows
