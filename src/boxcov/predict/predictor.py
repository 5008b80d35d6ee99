"""Base classes of the methods: checks, calibration, and the call that runs a frame."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from boxcov._torch.modules import (
    check_device,
    check_fingerprint,
    check_finite_weights,
    fingerprint,
    ready,
)
from boxcov._torch.process_state import ProcessLock, at_least_float32
from boxcov._torch.snapshot import ModuleSnapshot, WeightChecksum
from boxcov.detections import Detections
from boxcov.detector import SIGNAL_INPUTS, Detector, check_type
from boxcov.error_model.model import ErrorModel, describe_error_model
from boxcov.errors import BoxcovError, NotFiniteError, check_instance, counted
from boxcov.posterior.posterior import Posterior
from boxcov.predict.engine_options import DEFAULT_ENGINE, EngineOptions
from boxcov.predict.linearize import LinearizationPoint, LinearizedDetector
from boxcov.predict.route.base import Router
from boxcov.result_check import check_result, rows_in_range


class Predictor(ABC):
    """A method: ``model(inputs)`` returns ``Detections`` with a covariance for each box.

    A subclass sets its own arguments before it calls ``__init__``, which builds the router.
    parameters: those whose uses are observed; by default the posterior's.
    """

    method: ClassVar[str]
    needs_posterior: ClassVar[bool] = True
    router: Router
    posterior: Posterior | None  # MC dropout and NMS spread have none
    error_model: ErrorModel | None
    samples: int | None  # k
    seed: int

    def __init__(
        self,
        detector: Detector,
        posterior: Posterior | None,
        parameters: list[str] | None = None,
        *,
        with_logit: bool = False,
        engine: EngineOptions = DEFAULT_ENGINE,
    ) -> None:
        check_type(detector)
        check_instance("engine", engine, EngineOptions)
        check_finite_weights(detector)
        is_given = posterior is not None or self.needs_posterior
        if is_given and not isinstance(posterior, Posterior):
            raise BoxcovError(
                f"expected a boxcov.Posterior, got a {type(posterior).__name__}: "
                "boxcov.Posterior.load(path, detector) reads one"
            )
        if posterior is not None:
            posterior.check_detector(detector)
            parameters = posterior.parameters
        if with_logit and type(detector).logits is Detector.logits:
            raise BoxcovError(
                f"with_logit=True needs the logits of the scores: {type(detector).__name__} has no "
                "logits()"
            )
        self.with_logit = with_logit
        self.engine = engine
        self.device = next(detector.parameters()).device
        self.posterior = None if posterior is None else posterior.to(self.device)
        self._detector, self._parameters = detector, parameters or []
        self._fingerprint = fingerprint(detector) if posterior is None else posterior.fingerprint
        self._configuration = detector.configuration()
        self._lock = ProcessLock()  # the trunk cache holds one frame at a time
        self._use_weights()
        self._set_error_model(None if posterior is None else posterior.error_model)

    def __call__(self, inputs: Any) -> Detections:
        """The detector's boxes, scores and labels, with a covariance for each box.

        With an error model also risk, error distribution and regions, see ``Detections``.
        """
        return self._run(inputs, self.error_model, with_signals=self.error_model is not None)

    def with_signals(self, inputs: Any) -> Detections:
        """The detections with the signals that an error model needs, but without its results."""
        return self._run(inputs, None, with_signals=True)

    def _run(self, inputs: Any, error_model: ErrorModel | None, with_signals: bool) -> Detections:
        with self._lock:
            try:
                return self._frame(inputs, error_model, with_signals)
            except NotFiniteError as error:
                with self.router.without_half(f"{error}; tangents in float16 overflow") as changes:
                    if not changes:
                        raise
                    return self._frame(inputs, error_model, with_signals)

    def _frame(self, inputs: Any, error_model: ErrorModel | None, with_signals: bool) -> Detections:
        with torch.inference_mode(False), torch.no_grad():
            is_current = self.check_weights()
            inputs = ready(inputs, self.device)
            try:
                point = self.router.plain_pass(inputs)
                point = point.with_logits() if self.with_logit else point
                result = self.predict(point) if len(point.selection) else self._empty(point)
            finally:
                self.linearized.trunk.memory.clear()
            result = replace(result, meta={**self.settings(), **result.meta})
            result = add_signals(result, detector_signals(point)) if with_signals else result
            if error_model is None:
                return self.check(result, is_current)
            try:
                return self.check(error_model.apply(result, check=False), is_current)
            except NotFiniteError:
                self.check(result, is_current)
                error_model.apply(result)  # names the inputs that are not finite
                raise

    def rows_in_range(self, found: Detections) -> Tensor:
        """Which rows (n,) ``check`` would accept, without a synchronisation."""
        return rows_in_range(found, self._unknown(found))

    def _unknown(self, found: Detections) -> Tensor | None:
        """The fields whose errors the error model does not know."""
        model = None if found.scale is None else self.error_model
        return None if model is None else model.unknown

    def check(self, found: Detections, is_current: Tensor) -> Detections:
        """The detections, if all numbers are in range and the weights unchanged; raise otherwise.

        is_current: the flag that ``check_weights`` returned for this frame.
        """
        is_unchanged = check_result(
            found,
            self.method,
            f"the weights, or a step of {self.settings()}, are out of range",
            unknown=self._unknown(found),
            also=is_current,
            strict=False,
        )
        if not is_unchanged:
            check_fingerprint(self._fingerprint, self._detector, self.method)
            raise BoxcovError(
                f"{self.method}: a buffer of the detector that is not part of its weights was "
                "changed in place: build the model again"
            )
        assert found.covariance is not None
        found.covariance.diagonal(dim1=1, dim2=2).clamp_(min=0)  # -1e-16 by rounding
        return found

    def with_error_model(self, error_model: ErrorModel | None) -> Predictor:
        """The same model with another error model; they share all else, also what is verified."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        if self.posterior is not None:
            twin.posterior = self.posterior.with_error_model(error_model)
        twin._set_error_model(error_model)
        return twin

    def _set_error_model(self, error_model: ErrorModel | None) -> None:
        """Use an error model; raise if it was fitted for something else."""
        if error_model is not None:
            error_model.check(estimator(self.settings()), self._fingerprint, self._detector)
            error_model = error_model.to(self.device)
        self.error_model = error_model

    def __repr__(self) -> str:
        detector = self._detector
        shown = ("samples", "derivative", "epsilon", "seed", "dropout", "max_boxes")
        arguments = [f"{name}={getattr(self, name)!r}" for name in shown if hasattr(self, name)]
        posterior = self.posterior
        lines = [
            f"{type(self).__name__}({', '.join(arguments)})",
            f"  detector: {type(detector).__name__}, {len(detector.box_fields)} box fields, "
            f"{counted(len(detector.classes), 'class')}, on {self.device}",
        ]
        if posterior is not None:
            lines.append(
                f"  posterior: depth {posterior.depth!r}, {len(posterior.blocks)} layers, "
                f"n_data {posterior.n_data:g}"
            )
        lines.append(f"  error model: {describe_error_model(self.error_model)}")
        return "\n".join([*lines, f"  route: {self.router.route or 'not chosen: no boxes yet'}"])

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise BoxcovError(
            f"{type(self).__name__} cannot be copied or pickled: it shares the detector's "
            "weights and holds what this process verified. Save the posterior, and build another: "
            f"{type(self).__name__}(detector, Posterior.load(path, detector))"
        )

    @cached_property
    def etas(self) -> dict[str, Tensor]:
        """``samples`` directions (k, *shape) by parameter name, drawn with ``seed``."""
        assert self.posterior is not None
        assert self.samples is not None
        return self.posterior.sample(self.samples, torch.Generator().manual_seed(self.seed))

    @property
    def linearized(self) -> LinearizedDetector:
        """The detector as a function of the weights."""
        return self.router.linearized

    def build_router(self, linearized: LinearizedDetector) -> Router:
        """A router that has verified nothing yet."""
        return Router(linearized, self.engine)

    @abstractmethod
    def predict(self, point: LinearizationPoint) -> Detections:
        """The detections of a frame with at least one box; ``settings`` are added to their meta."""

    def settings(self) -> dict[str, Any]:
        """Settings that a reader of the result needs; they become ``Detections.meta``."""
        about: dict[str, Any] = {"method": self.method}
        posterior = self.posterior
        if posterior is not None:
            own = {name: getattr(posterior, name) for name in ("depth", "form", "n_data", "fisher")}
            about |= {**own, "prior_precision": posterior.prior_summary}
        if self.with_logit:
            about["with_logit"] = True
        about |= {"weights_sha256": self._fingerprint, "configuration": self._configuration}
        return {**about, "error_model": None}  # until one is applied: uncalibrated

    def check_weights(self) -> Tensor:
        """Raise if the detector's weights are not those that the model was built for.

        Changed hooks and settings, such as a threshold, are followed if posterior and error model
        allow it. Returns a flag on the device: whether the next share of the values is unchanged.
        """
        if not self._snapshot.is_unchanged():
            check_fingerprint(self._fingerprint, self._detector, self.method)
            check_device(self._detector, self.device, self.method)
            if self.posterior is not None:
                self.posterior.check_detector(self._detector)
            self._set_error_model(self.error_model)
            self._configuration = self._detector.configuration()
            self._use_weights()  # equal weights, but other tensors or settings
        return self._checksum.next_share()

    def _use_weights(self) -> None:
        """Build the router, and notice from now on if the weights change."""
        verify = self.engine.verify
        linearized = LinearizedDetector(self._detector, self._parameters)
        self._snapshot = ModuleSnapshot(self._detector, twin=linearized.shadow)
        self._checksum = WeightChecksum(self._detector, 1 if verify == "always" else verify)
        self.router = self.build_router(linearized)

    def _empty(self, point: LinearizationPoint) -> Detections:
        D = point.boxes.shape[1]
        zeros = at_least_float32(point.boxes).new_zeros
        row = zeros(0, D + 1) if self.with_logit else None
        return point.detections(row, covariance=zeros(0, D, D))


def detector_signals(point: LinearizationPoint) -> dict[str, Tensor]:
    """The detector's signals of the selected boxes, by name."""
    detector, raw = point.shadow, point.raw
    if not (isinstance(raw, dict) and SIGNAL_INPUTS in raw):
        extra = detector.signal_inputs(point.inputs)
        raw = raw if extra is None else {**raw, SIGNAL_INPUTS: extra}
    return detector.signals(raw, point.selection)


def add_signals(found: Detections, named: Mapping[str, Tensor]) -> Detections:
    """The detections with the detector's signals after those of the estimator."""
    if not named:
        return found
    names = [*found.meta.get("signals", ()), *named]
    signals = torch.stack(list(named.values())).T[: len(found)].to(found.scores)
    if found.signals is not None:
        signals = torch.cat([found.signals, signals], 1)
    return replace(found, signals=signals, meta={**found.meta, "signals": names})


def estimator(settings: Mapping[str, Any]) -> str:
    """Name of what computed a covariance, by its noise: the method and the number of samples.

    GLM and ExactGLM give the same covariance and share a name.

    >>> estimator({"method": "mcglm", "samples": 10}), estimator({"method": "glm"})
    ('mcglm, 10 samples', 'exact')
    """
    method = "exact" if settings["method"] == "glm" else settings["method"]
    return method if settings.get("samples") is None else f"{method}, {settings['samples']} samples"
