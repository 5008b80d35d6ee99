"""The error model: risk, error distribution and regions of each box."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from boxcov.detections import Detections
from boxcov.error_model.inputs import box_inputs, stack_inputs
from boxcov.error_model.network import Network, Outputs
from boxcov.error_model.regions import LEVELS, Regions, class_range_index
from boxcov.errors import BoxcovError, join_names

LIMIT = 4.0  # standardised inputs are clipped to this
_NAMES = (  # of what is not a tensor
    *("fields", "classes", "estimator", "fingerprint", "inputs", "thresholds", "threshold"),
)


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
    correlation: Tensor  # (D, D) of the errors' normal scores
    regions: Regions
    provenance: Mapping[str, Any] = field(default_factory=dict)  # boxes, frames, loss ...

    def __repr__(self) -> str:
        about = self.provenance
        kind = "MLP" if self.network.hidden else "linear"
        return (
            f"ErrorModel({len(self.network.linear)} members, {kind}, {len(self.inputs)} inputs)\n"
            f"  for {self.estimator}; boxes {' '.join(self.fields)}; {len(self.classes)} classes\n"
            f"  fitted on {about.get('boxes', '?')} boxes of {about.get('frames', '?')} frames, "
            f"{about.get('paired', '?')} with an object\n"
            f"  misplaced: IoU below {self.threshold:g}; "
            f"{int(self.regions.group_of.max()) + 1} groups of regions"
        )

    def describe(self) -> str:
        """Return one line about what the model was fitted on."""
        about = self.provenance
        return f"fitted on {about.get('paired', '?')} boxes of {about.get('frames', '?')} frames"

    @property
    def outputs(self) -> Outputs:
        return Outputs(len(self.thresholds), len(self.fields), "yaw" in self.fields)

    def standardise(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the inputs of the network (m, P)."""
        x = stack_inputs(dict(inputs), self.inputs)
        return ((x - self.centre) / self.spread).clamp(-LIMIT, LIMIT)

    def apply(self, found: Detections) -> Detections:
        """Return the detections with risk, error distribution and regions filled."""
        inputs = box_inputs(found)
        missing = [name for name in self.inputs if name not in inputs]
        if missing:
            raise BoxcovError(
                f"the error model needs {join_names(missing)}, which these detections lack: "
                "fit another one with `boxcov calibrate`"
            )
        outputs = self.outputs
        y = self.network(self.standardise(inputs))  # (K, m, O)
        log_scales = outputs.log_scale(y) + self.unit.log()
        scale = log_scales.mean(0).exp()
        labels, ranges = class_range_index(found)
        single, joint = self.regions.widths(log_scales, self.regions.group_of[labels, ranges])
        deviation = scale * (self.dof / (self.dof - 2)).sqrt()
        return replace(
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

    def summary(self) -> dict[str, Any]:
        """Return what a reader of the detections needs: thresholds, levels, dof."""
        return {
            "estimator": self.estimator,
            "thresholds": list(self.thresholds),
            "threshold": self.threshold,
            "levels": list(LEVELS),
            "dof": [round(value, 4) for value in self.dof.tolist()],
            "frames": self.provenance.get("frames"),
        }

    def check(self, estimator: str, fingerprint: str, found: Any) -> None:
        """Raise if the model was fitted for another estimator, other weights, fields or classes."""
        pairs = {
            "covariances of": (self.estimator, estimator),
            "weights": (self.fingerprint[:12], fingerprint[:12]),
            "box fields": (" ".join(self.fields), " ".join(found.box_fields)),
            "classes": (", ".join(self.classes), ", ".join(found.classes)),
        }
        for what, (own, other) in pairs.items():
            if own != other:
                raise BoxcovError(
                    f"this error model is for {what} {own}, not {other}: fit one with "
                    "boxcov.calibrate, or take posterior.with_error_model(None)"
                )

    # files and devices

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name."""
        named = {
            "centre": self.centre,
            "spread": self.spread,
            "unit": self.unit,
            "dof": self.dof,
            "correlation": self.correlation,
            "quantiles": self.regions.quantiles,
            "joint": self.regions.joint,
            "groups": self.regions.group_of,
        }
        parameters = {f"network.{i}": p for i, p in enumerate(self.network.parameters())}
        return {**named, **parameters}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> ErrorModel:
        """Return the model with other tensors, as ``tensors`` names them."""
        count = sum(name.startswith("network.") for name in tensors)
        network = self.network.with_parameters([tensors[f"network.{i}"] for i in range(count)])
        return replace(
            self,
            centre=tensors["centre"],
            spread=tensors["spread"],
            network=network,
            unit=tensors["unit"],
            dof=tensors["dof"],
            correlation=tensors["correlation"],
            regions=Regions(tensors["quantiles"], tensors["joint"], tensors["groups"]),
        )

    def to(self, device: torch.device | str) -> ErrorModel:
        return self.with_tensors({name: t.to(device) for name, t in self.tensors().items()})

    def to_json(self) -> str:
        """Return everything but the tensors as JSON."""
        about = {name: getattr(self, name) for name in _NAMES}
        return json.dumps({**about, "provenance": dict(self.provenance)})

    @staticmethod
    def from_file(text: str, tensors: Mapping[str, Tensor]) -> ErrorModel:
        """Return the model that ``to_json`` and ``tensors`` describe; ValueError if damaged."""
        about = json.loads(text)
        lists = ("fields", "classes", "inputs", "thresholds")
        values = {**about, **{name: tuple(about[name]) for name in lists}}
        P, D, C, T = (len(values[n]) for n in ("inputs", "fields", "classes", "thresholds"))
        shapes = {"centre": (P,), "spread": (P,), "unit": (D,), "dof": (D,), "correlation": (D, D)}
        for name, shape in shapes.items():
            if tuple(tensors[name].shape) != shape:
                raise ValueError(
                    f"{name} of the error model has shape {tuple(tensors[name].shape)}, "
                    f"expected {shape}"
                )
        groups, quantiles = tensors["groups"], tensors["quantiles"]
        if groups.shape[0] != C or not 0 <= int(groups.min()) <= int(groups.max()) < len(
            quantiles[0]
        ):
            raise ValueError("the groups of the error model's regions are out of range")
        finite = [n for n, t in tensors.items() if n not in ("quantiles", "joint", "groups")]
        if not all(bool(tensors[name].isfinite().all()) for name in finite):
            raise ValueError("the error model holds a NaN or an infinity")
        empty = torch.zeros(0)
        bare = ErrorModel(
            fields=values["fields"],
            classes=values["classes"],
            estimator=values["estimator"],
            fingerprint=values["fingerprint"],
            inputs=values["inputs"],
            thresholds=values["thresholds"],
            threshold=values["threshold"],
            centre=empty,
            spread=empty,
            network=Network(empty, empty),
            unit=empty,
            dof=empty,
            correlation=empty,
            regions=Regions(empty, empty, empty),
            provenance=values["provenance"],
        )
        model = bare.with_tensors(tensors)
        if tuple(model.network.linear.shape[1:]) != (P, Outputs(T, D, "yaw" in bare.fields).size):
            raise ValueError("the network of the error model does not fit its inputs and outputs")
        return model


def describe_error_model(model: ErrorModel | None) -> str:
    """Return one line for the repr of a model or posterior."""
    return "none, uncalibrated" if model is None else model.describe()
