"""ExactGLM: the covariance ``J Sigma J^T`` of every box, without sampling error."""

from __future__ import annotations

from typing import Any

from boxcov.detections import Detections
from boxcov.detector import Detector
from boxcov.posterior.posterior import Posterior
from boxcov.predict.exact_route import ExactRouter
from boxcov.predict.forward_mode.jvp import PosteriorSamples
from boxcov.predict.linearize import LinearizationPoint
from boxcov.predict.predictor import PosteriorPredictor, check_samples, logit_fields
from boxcov.predict.route import EngineOptions


class ExactGLM(PosteriorPredictor):
    """The full D x D covariance of every box, exact.

    samples: for a posterior that reaches below the head: estimate that part by Monte Carlo with so
        many samples, drawn with ``seed``. None: that part is exact too, at one backward pass per
        number. Covariance adds over layers, so both are one estimator.
    calibrated: also fill ``Detections.predictive``, by the posterior's calibration.
    with_logit: also return the variance of each score's logit and its covariance with the box.
    engine: speed against accuracy and memory.

    >>> import boxcov
    >>> from boxcov.data import shapes
    >>> from boxcov.detectors.tiny import TinyCenter
    >>> frames = shapes.frames(count=2)
    >>> detector = TinyCenter(threshold=0.05, most=3)
    >>> model = ExactGLM(detector, boxcov.fit(detector, frames))
    >>> detections = model(frames[0][0])
    >>> bool((detections.uncertainty > 0).all())
    True
    """

    method = "exact"
    router: ExactRouter

    def __init__(
        self,
        detector: Detector,
        posterior: Posterior,
        samples: int | None = None,
        seed: int = 0,
        *,
        calibrated: bool = False,
        with_logit: bool = False,
        engine: EngineOptions | None = None,
    ) -> None:
        if samples is not None:
            check_samples(samples)
        super().__init__(detector, posterior, calibrated, with_logit, engine)
        self.samples, self.seed = samples, seed
        self._samples = None if samples is None else PosteriorSamples(self.posterior, samples, seed)
        self.router = self.build_router()

    def build_router(self) -> ExactRouter:
        return ExactRouter(
            self.linearize(), self.posterior, self.engine, self._samples, self.with_logit
        )

    def settings(self) -> dict[str, Any]:
        own = {"samples": self.samples, "seed": self.seed}
        precision, tolerance = self.engine.precision, self.engine.tolerance
        return {**super().settings(), **own, "precision": precision, "tolerance": tolerance}

    def predict(self, point: LinearizationPoint) -> Detections:
        covariance, row = self.router.covariance(point)
        return point.detections(covariance=covariance, meta=self.settings(), **logit_fields(row))
