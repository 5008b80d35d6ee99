"""The error model: risk, error distribution and regions of each box."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from boxcov._torch.process_state import full_precision
from boxcov.detections import Detections
from boxcov.detector import configuration_differences
from boxcov.error_model.inputs import covariance_inputs, report_inputs, signal_inputs, stack_inputs
from boxcov.error_model.network import Network, Outputs
from boxcov.error_model.regions import LEVELS, Regions, class_range_index
from boxcov.error_model.unusual_frames import Widening
from boxcov.errors import BoxcovError, counted, join_names

MAX_UNIT = 1e6  # and 1 / MAX_UNIT at least, so that float32 holds every variance
LIMIT = 4.0  # standardised inputs are clipped to this
WIDENING = "widening."  # prefix of its tensors
TENSORS = ("centre", "spread", "unit", "dof", "noise", "correlation")
_REGIONS = ("quantiles", "joint", "groups")


class ReportInputs(NamedTuple):
    """What the error model needs of m boxes beside their covariance and signals."""

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

    def report_inputs(self, found: Detections) -> ReportInputs:
        """Return what can be computed beside the covariance and the signals."""
        labels, ranges = class_range_index(found)
        group = self.regions.group_of[labels, ranges]
        return ReportInputs(report_inputs(found), group, self._noise_variance[labels])

    def standardise(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the inputs of the network (m, P)."""
        x = stack_inputs(inputs, self.inputs)
        return ((x - self.centre) / self.spread).clamp(-LIMIT, LIMIT)

    @full_precision()
    def apply(
        self, found: Detections, check: bool = True, report: ReportInputs | None = None
    ) -> Detections:
        """Return the detections with risk, error distribution and regions filled.

        ``scale``, ``predictive`` and regions of a field are NaN if its errors were unknown in the
        calibration frames. check: raise if an input is NaN; a traced graph cannot read values.
        report: the detections' ``report_inputs``, where they are known already.
        """
        report = self.report_inputs(found) if report is None else report
        inputs = {**report.columns, **covariance_inputs(found), **signal_inputs(found)}
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
        single, joint = self.regions.widths(log_scales, report.group)
        deviation = torch.addcmul(report.noise, scale.square(), self._variance_factor).sqrt()
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
        named: dict[str, Tensor] = {name: getattr(self, name) for name in TENSORS}
        regions = self.regions
        named |= dict(zip(_REGIONS, (regions.quantiles, regions.joint, regions.group_of)))
        named |= {f"network.{i}": p for i, p in enumerate(self.network.parameters())}
        if self.widening is not None:
            named |= {f"{WIDENING}{name}": t for name, t in vars(self.widening).items()}
        return named

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> ErrorModel:
        """Return the model with other tensors, as ``tensors`` names them."""
        own: dict[str, Any] = {name: tensors[name] for name in TENSORS}
        count = sum(name.startswith("network.") for name in tensors)
        wider = [name for name in tensors if name.startswith(WIDENING)]
        widening = {name.removeprefix(WIDENING): tensors[name] for name in wider}
        return replace(
            self,
            **own,
            network=self.network.with_parameters([tensors[f"network.{i}"] for i in range(count)]),
            regions=Regions(*(tensors[name] for name in _REGIONS)),
            widening=Widening(**widening) if widening else None,
        )

    def to(self, device: torch.device | str) -> ErrorModel:
        return self.with_tensors({name: t.to(device) for name, t in self.tensors().items()})


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
    return f"--method {method}" + (f" --samples {samples}" if samples else "")


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
