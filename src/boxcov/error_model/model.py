"""The error model: risk, error distribution and regions of each box."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from boxcov._torch.layers import full_precision
from boxcov.detections import Detections
from boxcov.detector import configuration_differences
from boxcov.error_model.inputs import box_inputs, covariance_inputs, free_inputs, stack_inputs
from boxcov.error_model.network import Network, Outputs
from boxcov.error_model.regions import LEVELS, RANGES, Regions, class_range_index
from boxcov.error_model.student_t import MAX_DOF
from boxcov.error_model.unusual_frames import Widening
from boxcov.errors import BoxcovError, counted, join_names
from boxcov.files import to_json
from boxcov.input_file import conform, parse_metadata
from boxcov.result_check import properties

MAX_UNIT = 1e6  # and 1 / MAX_UNIT at least, so that float32 holds every variance
LIMIT = 4.0  # standardised inputs are clipped to this
_NAMES = (  # of what is not a tensor
    *("fields", "classes", "estimator", "fingerprint", "inputs", "thresholds", "threshold"),
)
_WIDENING = "widening."  # prefix of its tensors
_TENSORS = ("centre", "spread", "unit", "dof", "noise", "correlation")
_WIDER = (f"{_WIDENING}factors", f"{_WIDENING}joint")
_OPEN = ("quantiles", "joint", "unit", "groups", f"{_WIDENING}bound", *_WIDER)  # may be infinite


class FreeInputs(NamedTuple):
    """What the error model needs of m boxes that does not depend on their covariance."""

    columns: dict[str, Tensor]  # (m,) each, inputs of the network
    group: Tensor  # (m,) of the regions
    noise: Tensor  # (m, D) variance beyond the error distributions


@dataclass(frozen=True, repr=False)
class ErrorModel:
    """A fitted error model. Made by ``boxcov.calibrate``, stored with the posterior."""

    fields: tuple[str, ...]  # D names
    classes: tuple[str, ...]
    estimator: str  # what computed the covariances, see ``boxcov.predict.predictor.estimator``
    fingerprint: str  # of the detector's weights
    inputs: tuple[str, ...]  # P names
    thresholds: tuple[float, ...]  # T of the IoU, rising
    threshold: float  # the default one: a box below it is misplaced
    centre: Tensor  # (P,) of the inputs
    spread: Tensor  # (P,)
    network: Network
    unit: Tensor  # (D,) of the errors
    dof: Tensor  # (D,) degrees of freedom of the Student-t distributions
    noise: Tensor  # (C, D) standard deviation that ``predictive`` holds beyond the distributions
    correlation: Tensor  # (D, D) of the errors' normal scores
    regions: Regions
    widening: Widening | None = None  # of unusual frames
    provenance: Mapping[str, Any] = field(default_factory=dict)  # boxes, frames, loss ...
    configuration: Mapping[str, str] = field(default_factory=dict)  # of the detector

    def __repr__(self) -> str:
        about = self.provenance
        kind = "MLP" if self.network.hidden else "linear"
        return (
            f"ErrorModel({counted(len(self.network.linear), 'member')}, {kind}, "
            f"{counted(len(self.inputs), 'input')})\n"
            f"  for {self.estimator}; boxes {' '.join(self.fields)}; "
            f"{counted(len(self.classes), 'class')}\n"
            f"  fitted on {about.get('boxes', '?')} boxes of {about.get('frames', '?')} frames, "
            f"{about.get('paired', '?')} with an object\n"
            f"  misplaced: IoU below {self.threshold:g}; "
            f"{int(self.regions.group_of.max()) + 1} groups of regions"
        )

    @property
    def outputs(self) -> Outputs:
        return Outputs(len(self.thresholds), len(self.fields), "yaw" in self.fields)

    def free_inputs(self, found: Detections) -> FreeInputs:
        """Return what can be computed beside the covariance."""
        labels, ranges = class_range_index(found)
        group, noise = self.regions.group_of[labels, ranges], self._noise_variance[labels]
        return FreeInputs(free_inputs(found), group, noise)

    def standardise(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the inputs of the network (m, P)."""
        x = stack_inputs(dict(inputs), self.inputs)
        return ((x - self.centre) / self.spread).clamp(-LIMIT, LIMIT)

    @full_precision()
    def apply(
        self, found: Detections, check: bool = True, free: FreeInputs | None = None
    ) -> Detections:
        """Return the detections with risk, error distribution and regions filled.

        ``scale``, ``predictive`` and regions of a field are NaN if its errors were unknown in the
        calibration frames. check: raise if an input is NaN; a traced graph cannot read values.
        free: the detections' ``free_inputs``, where they are known already.
        """
        free = self.free_inputs(found) if free is None else free
        inputs = {**free.columns, **covariance_inputs(found)}
        missing = [name for name in self.inputs if name not in inputs]
        if missing:
            raise BoxcovError(
                f"the error model needs {join_names(missing)}, which these detections lack: "
                "fit another one with `boxcov calibrate`"
            )
        outputs = self.outputs
        x = self.standardise(inputs)
        if check and bool(x.isnan().any()):
            raise not_finite(name for name, column in zip(self.inputs, x.T) if column.isnan().any())
        y = self.network(x)  # (K, m, O)
        log_scales = outputs.log_scale(y) + self._log_unit
        scale = log_scales.mean(0).exp()
        single, joint = self.regions.widths(log_scales, free.group)
        deviation = torch.addcmul(free.noise, scale.square(), self._variance_factor).sqrt()
        found = replace(
            found,
            no_object=outputs.no_object(y).mean(0),
            iou_below=outputs.iou_below(y).mean(0),
            flipped=outputs.flipped(y).mean(0) if outputs.has_heading else None,
            scale=scale,
            predictive=deviation[:, :, None] * self.correlation * deviation[:, None, :],
            region_widths=single,
            joint_widths=joint,
            meta={**found.meta, "error_model": self.summary()},
        )
        return found if self.widening is None else self.widening(found)

    @property
    def method(self) -> tuple[str, int | None]:
        """The method that computed the covariances, and its number of samples."""
        return _method(self.estimator)

    def summary(self) -> dict[str, Any]:
        """Return what a reader of the detections needs: thresholds, levels, dof."""
        return dict(self._summary)

    @cached_property
    def _summary(self) -> dict[str, Any]:  # once: dof is copied from the device
        return {
            "estimator": self.estimator,
            "thresholds": list(self.thresholds),
            "threshold": self.threshold,
            "levels": list(LEVELS),
            "dof": self.dof.tolist(),
            "frames": self.provenance.get("frames"),
        }

    @cached_property
    def unknown(self) -> Tensor:
        """The fields (D,) whose errors were unknown in the calibration frames."""
        return self.unit.isnan()

    @cached_property
    def _log_unit(self) -> Tensor:
        return self.unit.log()

    @cached_property
    def _variance_factor(self) -> Tensor:  # of a Student-t distribution over its squared scale
        return self.dof / (self.dof - 2)

    @cached_property
    def _noise_variance(self) -> Tensor:
        return self.noise.square()

    def check(self, estimator: str, fingerprint: str, detector: Any, fits: str = "") -> None:
        """Raise if the model was fitted for another estimator or another detector.

        fits: what the user gives for the estimator of the model; options of a command by default.
        """
        pairs = {
            "covariances of": (self.estimator, estimator),
            "weights": (self.fingerprint[:12], fingerprint[:12]),
            "box fields": (" ".join(self.fields), " ".join(detector.box_fields)),
            "classes": (", ".join(self.classes), ", ".join(detector.classes)),
        }
        advice = (
            f"fit one with `boxcov calibrate {_options(estimator)}` (in Python boxcov.calibrate), "
            "or take a posterior of `boxcov fit`, which has none (in Python "
            "posterior.with_error_model(None))"
        )
        for what, (own, other) in pairs.items():
            if own != other:
                if own == self.estimator:
                    advice = f"give {fits or _options(own)}, or {advice}"
                raise BoxcovError(f"this error model is for {what} {own}, not {other}: {advice}")
        differences = configuration_differences(self.configuration, detector.configuration())
        if self.configuration and differences:
            raise BoxcovError(
                f"this error model is for another configuration ({differences}): {advice}"
            )

    # files and devices

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name."""
        named = {
            **{name: getattr(self, name) for name in _TENSORS},
            "quantiles": self.regions.quantiles,
            "joint": self.regions.joint,
            "groups": self.regions.group_of,
        }
        parameters = {f"network.{i}": p for i, p in enumerate(self.network.parameters())}
        widening = {} if self.widening is None else self.widening.tensors()
        return {**named, **parameters, **{f"{_WIDENING}{n}": t for n, t in widening.items()}}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> ErrorModel:
        """Return the model with other tensors, as ``tensors`` names them."""
        count = sum(name.startswith("network.") for name in tensors)
        network = self.network.with_parameters([tensors[f"network.{i}"] for i in range(count)])
        own: dict[str, Any] = {name: tensors[name] for name in _TENSORS}
        start = len(_WIDENING)
        widening = {n[start:]: t for n, t in tensors.items() if n.startswith(_WIDENING)}
        return replace(
            self,
            **own,
            network=network,
            regions=Regions(tensors["quantiles"], tensors["joint"], tensors["groups"]),
            widening=Widening(**widening) if widening else None,
        )

    def to(self, device: torch.device | str) -> ErrorModel:
        return self.with_tensors({name: t.to(device) for name, t in self.tensors().items()})

    def to_json(self) -> str:
        """Return everything but the tensors as JSON."""
        about = {name: getattr(self, name) for name in _NAMES}
        more = {"provenance": dict(self.provenance), "configuration": dict(self.configuration)}
        return to_json({**about, **more})

    @staticmethod
    def from_file(text: str, tensors: Mapping[str, Tensor]) -> ErrorModel:
        """Return the model that ``to_json`` and ``tensors`` describe; ValueError if damaged."""
        about = parse_metadata(text)
        values = {name: about[name] for name in (*_NAMES, "provenance")}
        values |= {name: conform(about[name], str, name) for name in ("estimator", "fingerprint")}
        saved = about.get("configuration", {})
        values["configuration"] = conform(saved, dict[str, str], "configuration")
        lists = ("fields", "classes", "inputs", "thresholds")
        values |= {name: tuple(about[name]) for name in lists}
        if not isinstance(values["provenance"], dict) or values["threshold"] not in tuple(
            values["thresholds"]
        ):
            raise ValueError(f"the error model has the threshold {values['threshold']!r}")
        empty: dict[str, Any] = dict.fromkeys(_TENSORS, torch.zeros(0))
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


def _method(estimator: str) -> tuple[str, int | None]:
    """Return the method and the number of samples that a name of an estimator states.

    >>> _method("mcglm, 10 samples"), _method("exact")
    (('mcglm', 10), ('exact', None))
    """
    found = re.fullmatch(r"(\w+), (\d{1,9}) samples", estimator)
    return (found[1], int(found[2])) if found else (estimator, None)


def _options(estimator: str) -> str:
    """Return the options of a command that chooses the estimator."""
    method, samples = _method(estimator)
    return f"--method {method}" + ("" if samples is None else f" --samples {samples}")


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
        shapes = {"bound": (), "factors": (L, D), "joint": (L,), "no_object": (2,)}
        shapes |= {"iou_below": (2,)}
        expected |= {f"{_WIDENING}{name}": shape for name, shape in shapes.items()}
    tensors = model.tensors()
    for name in tensors.keys() | expected.keys():
        shape = tuple(tensors[name].shape) if name in tensors else None
        if shape != expected.get(name):
            raise ValueError(
                f"{name} of the error model has shape {shape}, expected {expected.get(name)}"
            )


def _check_numbers(model: ErrorModel) -> None:
    """Raise ValueError if numbers of a file are out of range."""
    groups, tensors = model.regions.group_of, model.tensors()
    if groups.dtype != torch.long or not bool(
        ((groups >= 0) & (groups < model.regions.quantiles.shape[1])).all()
    ):
        raise ValueError("the groups of the error model's regions are out of range")
    for name, tensor in tensors.items():
        if name != "groups" and tensor.dtype != torch.float32:
            raise ValueError(f"{name} of the error model is {tensor.dtype}, expected float32")
        may_be_open = name in _OPEN
        if not may_be_open and not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} of the error model holds a NaN or an infinity")
    unit, dof, R = model.unit, model.dof, model.correlation
    is_in_range = {
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
    thresholds = model.thresholds
    if not all(isinstance(t, float) and 0 < t < 1 for t in thresholds) or list(
        thresholds
    ) != sorted(set(thresholds)):
        raise ValueError(f"the thresholds {thresholds} of the error model do not rise from 0 to 1")


def _check_inputs(model: ErrorModel) -> None:
    """Raise ValueError if an input is none that boxes of these fields and classes can have."""
    D, none = len(model.fields), torch.zeros(0)
    labels, C = none.long(), none.reshape(0, D, D)
    empty = Detections(none.reshape(0, D), none, labels, labels, model.fields, model.classes, C)
    known = box_inputs(replace(empty, score_variance=none))
    unknown = [n for n in model.inputs if n not in known and not str(n).startswith("signal ")]
    if unknown or len(set(model.inputs)) < len(model.inputs):
        raise ValueError(f"inputs {join_names(map(str, unknown))} of the error model are unknown")


def not_finite(names: Iterable[str]) -> BoxcovError:
    """Return the error for inputs that are NaN or infinite."""
    return BoxcovError(
        f"the error model cannot use {join_names(names)}: NaN or infinite for some box. Correct "
        "Detector.signals(), or the inputs of the frame"
    )


def describe_error_model(model: ErrorModel | None) -> str:
    """Return one line for the repr of a model or posterior."""
    if model is None:
        return "none, uncalibrated"
    about = model.provenance
    return f"fitted on {about.get('paired', '?')} boxes of {about.get('frames', '?')} frames"
