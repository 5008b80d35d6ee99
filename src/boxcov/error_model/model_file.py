"""The error model in a posterior's file: as JSON and tensors, checked when they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from boxcov._files.input_file import conform, parse_metadata
from boxcov._files.output_file import to_json
from boxcov.detections import Detections
from boxcov.error_model.inputs import box_inputs
from boxcov.error_model.model import MAX_UNIT, TENSORS, WIDENING, ErrorModel
from boxcov.error_model.network import Network
from boxcov.error_model.regions import LEVELS, RANGES, Regions
from boxcov.error_model.student_t import MAX_DOF
from boxcov.errors import join_names
from boxcov.result_check import properties

_SCHEMA: dict[str, Any] = {  # of what is not a tensor
    **dict.fromkeys(("fields", "classes"), tuple[str, ...]),
    **dict.fromkeys(("estimator", "fingerprint"), str),
    "inputs": tuple[str, ...],
    "thresholds": tuple[float, ...],
    "threshold": float,
    "provenance": dict[str, Any],
    "configuration": dict[str, str],
}
_WIDER = (f"{WIDENING}factors", f"{WIDENING}joint")
_OPEN = ("quantiles", "joint", "unit", "groups", f"{WIDENING}bound", *_WIDER)  # may be infinite


def error_model_text(model: ErrorModel) -> str:
    """Return everything but the tensors as JSON."""
    return to_json({name: getattr(model, name) for name in _SCHEMA})


def read_error_model(text: str, tensors: Mapping[str, Tensor]) -> ErrorModel:
    """Return the model of a text and its tensors; ValueError if they are damaged."""
    about = {"configuration": {}, **parse_metadata(text)}  # absent in old files
    values = {name: conform(about[name], kind, name) for name, kind in _SCHEMA.items()}
    if values["threshold"] not in values["thresholds"]:
        raise ValueError(f"the error model has the threshold {values['threshold']!r}")
    empty: dict[str, Any] = dict.fromkeys(TENSORS, torch.zeros(0))
    bare = ErrorModel(
        **values,
        **empty,
        network=Network(torch.zeros(0), torch.zeros(0)),
        regions=Regions(torch.zeros(0), torch.zeros(0), torch.zeros(0)),
    )
    model = bare.with_tensors(tensors)
    if model.noise.dim() == 1:  # of all classes, in files before 0.2
        model = replace(model, noise=model.noise.expand(len(model.classes), -1))
    _check_shapes(model)
    _check_numbers(model)
    _check_inputs(model)
    return model


def _check_shapes(model: ErrorModel) -> None:
    """Raise ValueError if the tensors of a file do not fit each other."""
    P, D, C = len(model.inputs), len(model.fields), len(model.classes)
    K, O, L = len(model.network.linear), model.outputs.size, len(LEVELS)
    G = model.regions.quantiles.shape[1]
    expected: dict[str, tuple[int, ...]] = {"centre": (P,), "spread": (P,), "correlation": (D, D)}
    expected |= {"unit": (D,), "dof": (D,), "noise": (C, D)}
    expected |= {"quantiles": (K, G, L, D), "joint": (K, G, L), "groups": (C, len(RANGES) + 1)}
    network = [(K, P, O), (K, 1, O)]
    if model.network.hidden:
        W = model.network.hidden[0].shape[-1]
        network += [(K, P, W), (K, 1, W), (K, W, W), (K, 1, W), (K, W, O)]
    expected |= {f"network.{i}": shape for i, shape in enumerate(network)}
    if model.widening is not None:
        wide = {"bound": (), "factors": (L, D), "joint": (L,), "no_object": (2,), "iou_below": (2,)}
        expected |= {f"{WIDENING}{name}": shape for name, shape in wide.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in model.tensors().items()}
    for name in shapes.keys() | expected.keys():
        own, right = shapes.get(name), expected.get(name)
        if own != right:
            raise ValueError(f"{name} of the error model has shape {own}, expected {right}")


def _check_numbers(model: ErrorModel) -> None:
    """Raise ValueError if numbers of a file are out of range."""
    tensors = model.tensors()
    for name, tensor in tensors.items():
        expected = torch.long if name == "groups" else torch.float32
        if tensor.dtype != expected:
            raise ValueError(f"{name} of the error model is {tensor.dtype}, expected {expected}")
        if name not in _OPEN and not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} of the error model holds a NaN or an infinity")
    unit, dof, R, groups = model.unit, model.dof, model.correlation, model.regions.group_of
    is_in_range = {
        "groups": (groups >= 0) & (groups < model.regions.quantiles.shape[1]),
        "spread": model.spread > 0,
        "dof": (dof > 2.01) & (dof < 1.001 * MAX_DOF),
        "noise": (model.noise >= 0) & (model.noise <= MAX_UNIT),
        "unit": (unit >= 1 / MAX_UNIT) & (unit <= MAX_UNIT) | unit.isnan(),
        "quantiles": model.regions.quantiles >= 0,
        "joint": model.regions.joint >= 0,
        **{name: tensors[name] >= 1 for name in _WIDER if name in tensors},
        "correlation": torch.stack(list(properties(R[None]).values()))[:, 0],
        "diagonal of the correlation": (R.diagonal() - 1).abs() <= 1e-3,
    }
    for name, holds in is_in_range.items():
        if not bool(holds.all()):
            raise ValueError(f"{name} of the error model is out of range")
    bounds = (0.0, *model.thresholds, 1.0)
    if not all(low < high for low, high in pairwise(bounds)):
        raise ValueError(
            f"the thresholds {bounds[1:-1]} of the error model do not rise from 0 to 1"
        )


def _check_inputs(model: ErrorModel) -> None:
    """Raise ValueError if an input is none that boxes of these fields and classes can have."""
    D, none = len(model.fields), torch.zeros(0)
    labels, C = none.long(), none.reshape(0, D, D)
    empty = Detections(none.reshape(0, D), none, labels, labels, model.fields, model.classes, C)
    known = box_inputs(replace(empty, score_variance=none))
    unknown = [n for n in model.inputs if n not in known and not n.startswith("signal ")]
    if unknown or len(set(model.inputs)) < len(model.inputs):
        raise ValueError(f"inputs {join_names(unknown)} of the error model are unknown")
