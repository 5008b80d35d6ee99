"""What all methods share: the checks, the plain pass, and that the detector stays as it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from threading import Lock
from typing import Any, ClassVar
from warnings import warn

import torch
from torch import Tensor

from boxcov._torch.fingerprint import (
    WeightSnapshot,
    check_fingerprint,
    check_finite_weights,
    fingerprint,
)
from boxcov._torch.inputs import ready
from boxcov._torch.precision import at_least_float32, full_precision
from boxcov.detections import Detections
from boxcov.detector import Detector
from boxcov.errors import BoxcovError, BoxcovWarning, NotFiniteError
from boxcov.posterior.calibration import Calibration, CalibrationTables
from boxcov.posterior.posterior import Posterior
from boxcov.predict.forward_mode.tangents import NoRule, Tangents
from boxcov.predict.linearize import LinearizationPoint, LinearizedDetector
from boxcov.predict.psd_check import check_covariance
from boxcov.predict.route import EngineOptions


class Predictor(ABC):
    """A method at work: ``model(inputs)`` gives ``Detections`` with a covariance."""

    method: ClassVar[str]

    def __init__(
        self,
        detector: Detector,
        parameters: list[str],
        calibration: Calibration | None = None,
        with_logit: bool = False,
        engine: EngineOptions | None = None,
    ) -> None:
        check_finite_weights(detector)
        if with_logit and type(detector).logits is Detector.logits:
            raise BoxcovError(
                f"with_logit=True, but {type(detector).__name__} does not say what its scores are made from: it has no logits()"
            )
        self.with_logit = with_logit
        self._calibration = calibration
        self._tables: CalibrationTables | None = (
            None  # the calibration on the device, known after the first boxes
        )
        self._detector = detector
        self._fingerprint = fingerprint(detector)
        self._held = WeightSnapshot(detector)
        self.device = next(detector.parameters()).device
        self.engine = engine or EngineOptions()
        self.linearized = LinearizedDetector(detector, parameters, self.engine.cuda_graphs)
        self._lock = Lock()  # the shadow remembers one frame at a time

    def __call__(self, inputs: Any) -> Detections:
        """The detector's boxes, scores and labels, and what it does not know of each box."""
        with self._lock, torch.inference_mode(False), torch.no_grad():
            self._check_weights()
            inputs = ready(inputs, self.device)
            try:
                point = self._at(inputs)
                point = point.scored() if self.with_logit else point
                result = self.predict(point) if len(point.selection) else self._empty(point)
            finally:
                self.linearized.trunk.forget()
            self._check(result)
            return (
                result if self._calibration is None else self._calibrated(result, self._calibration)
            )

    def _at(self, inputs: Any) -> LinearizationPoint:
        along = self.along()
        try:
            return self.linearized.at(inputs, self.asks(), along)
        except NoRule:  # this frame takes a way that the frames before did not
            return self.linearized.at(inputs)

    def along(self) -> Tangents | None:
        """Derivatives to carry beside the plain pass of the coming frame."""
        return None

    def asks(self) -> bool:
        """Whether it will ask what other weights would give, for which the trunk must be remembered."""
        return True

    @abstractmethod
    def predict(self, point: LinearizationPoint) -> Detections:
        """For at least one box."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What a reader of the result should know of how it was made."""

    def _check_weights(self) -> None:
        """The detector must still be the one that this was made for."""
        if not self._held.is_unchanged():
            check_fingerprint(self._fingerprint, self._detector, self.method)
            self._held = WeightSnapshot(self._detector)
            own = self.linearized  # the tensors may be others, if equal ones
            self.linearized = LinearizedDetector(self._detector, list(own.weights), own.graphs)

    def _empty(self, point: LinearizationPoint) -> Detections:
        D = point.boxes.shape[1]
        zeros = at_least_float32(point.boxes).new_zeros
        row = zeros(0, D + 1) if self.with_logit else None
        return point.detections(covariance=zeros(0, D, D), meta=self.settings(), **score_parts(row))

    def _calibrated(self, result: Detections, calibration: Calibration) -> Detections:
        """The same detections with ``predictive`` filled."""
        covariance = result.covariance
        assert covariance is not None
        if self._tables is None:
            own = estimator(self.settings())
            if own != calibration.estimator:
                warn(
                    f"the calibration was fitted to covariances of {calibration.estimator}, these are of {own}, with other noise: "
                    "fit one for them with `boxcov calibrate`",
                    BoxcovWarning,
                    stacklevel=4,
                )
            self._tables = calibration.tables(covariance)
        predictive = self._tables(
            covariance,
            result.boxes.to(covariance.dtype),
            result.scores.to(covariance.dtype),
            result.labels,
        )
        return replace(result, predictive=predictive)

    def _score_settings(self) -> dict[str, Any]:
        return {"with_logit": True} if self.with_logit else {}

    def _calibration_settings(self) -> dict[str, Any]:
        known = self._calibration
        return (
            {}
            if known is None
            else {"calibration": {"kind": known.kind, "estimator": known.estimator}}
        )

    def _check(self, result: Detections) -> None:
        check_covariance(result, self.method, self.settings())
        for name, part in (
            ("variance", result.score_variance),
            ("covariance with the box", result.score_covariance),
        ):
            if part is not None and not bool(part.isfinite().all()):
                raise NotFiniteError(
                    f"{self.method}: the {name} of a score's logit is not finite under {self.settings()}"
                )


class PosteriorPredictor(Predictor):
    """A method that needs a posterior: it must belong to the detector, and so must its calibration, if asked for."""

    def __init__(
        self,
        detector: Detector,
        posterior: Posterior,
        calibrated: bool = False,
        with_logit: bool = False,
        engine: EngineOptions | None = None,
    ) -> None:
        check_finite_weights(detector)
        check_fingerprint(posterior.fingerprint, detector, "posterior")
        super().__init__(
            detector,
            posterior.parameters,
            calibration_of(posterior, detector) if calibrated else None,
            with_logit,
            engine,
        )
        self.posterior = posterior.to(self.device)

    def settings(self) -> dict[str, Any]:
        posterior = self.posterior
        return {
            "method": self.method,
            "depth": posterior.depth,
            "form": posterior.form,
            "n_data": posterior.n_data,
            "prior_precision": posterior.prior_precision,
            "fisher": posterior.fisher,
            "weights_sha256": posterior.fingerprint,
            **self._score_settings(),
            **self._calibration_settings(),
        }


def calibration_of(posterior: Posterior, detector: Detector) -> Calibration:
    """The posterior's calibration, if it has one and it is for such boxes and classes.

    >>> import boxcov
    >>> from boxcov.data import shapes
    >>> from boxcov.detectors.tiny import TinyCenter
    >>> detector = TinyCenter()
    >>> calibration_of(boxcov.fit(detector, shapes.frames(count=2)), detector)
    Traceback (most recent call last):
    ...
    boxcov.errors.BoxcovError: calibrated=True, but the posterior has no calibration: fit one with `boxcov calibrate`
    """
    if posterior.calibration is None:
        raise BoxcovError(
            "calibrated=True, but the posterior has no calibration: fit one with `boxcov calibrate`"
        )
    posterior.calibration.check(detector.box_fields, detector.classes, "the detector")
    return posterior.calibration


def estimator(settings: Mapping[str, Any]) -> str:
    """In a few words what computed a covariance, as far as its noise goes: the method and the samples. GLM and ExactGLM give the same.

    >>> estimator({"method": "mcglm", "samples": 10}), estimator({"method": "glm"}), estimator({"method": "exact", "samples": None})
    ('mcglm, 10 samples', 'exact', 'exact')
    """
    method = "exact" if settings["method"] == "glm" else settings["method"]
    return method if settings.get("samples") is None else f"{method}, {settings['samples']} samples"


@full_precision
def sample_covariance(A: Tensor) -> Tensor:
    """The centred sample covariance (m, D, D) of k columns (m, D, k): equations (16) and (17) of the paper.

    >>> sample_covariance(torch.tensor([[[1.0, 2.0, 3.0]]]))
    tensor([[[1.]]])
    """
    A = A.contiguous()  # in one layout: some rows of a larger array come out the same
    A = A - A.mean(2, keepdim=True)
    return A @ A.transpose(1, 2) / (A.shape[2] - 1)


def score_parts(row: Tensor | None) -> dict[str, Any]:
    """What ``Detections`` says of the scores, from each logit's covariance with the box and with itself (m, D + 1); nothing for None.

    >>> score_parts(torch.tensor([[0.1, 0.2, 4.0]]))
    {'score_variance': tensor([4.]), 'score_covariance': tensor([[0.1000, 0.2000]])}
    """
    if row is None:
        return {}
    return {"score_variance": row[:, -1].contiguous(), "score_covariance": row[:, :-1].contiguous()}


def check_samples(samples: int) -> None:
    """A covariance takes two samples at least.

    >>> check_samples(1)
    Traceback (most recent call last):
    ...
    boxcov.errors.BoxcovError: samples must be at least 2 for a covariance, got 1
    """
    if not isinstance(samples, int):
        raise BoxcovError(f"samples must be a whole number, got {samples!r}")
    if samples < 2:
        raise BoxcovError(f"samples must be at least 2 for a covariance, got {samples}")
