"""ExactGLM: the covariance ``J Sigma J^T`` of every box, without sampling error."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from boxcov.box_layout import log_variances
from boxcov.detections import PART_BELOW, Detections
from boxcov.detector import Detector, part_modules
from boxcov.errors import check_seed, check_whole
from boxcov.posterior.posterior import Posterior
from boxcov.predict.engine_options import DEFAULT_ENGINE, EngineOptions
from boxcov.predict.linearize import LinearizationPoint, LinearizedDetector
from boxcov.predict.predictor import Predictor
from boxcov.predict.route.exact import ExactRouter


class ExactGLM(Predictor):
    """The full D x D covariance of every box, exact.

    detector, posterior: the posterior must be one of this detector and its weights.
    samples: for a posterior that reaches below the head: estimate the part of the layers there by
        Monte Carlo with this many samples. None: that part is exact too, and takes one backward
        pass per field of each box. Covariance adds over layers, so the two parts are added.
    seed: random seed of these samples.
    with_logit: also return the variance of each score's logit and its covariance with the box.
    engine: numerical options, see ``EngineOptions``.

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
    posterior: Posterior
    router: ExactRouter

    def __init__(
        self,
        detector: Detector,
        posterior: Posterior,
        samples: int | None = None,
        seed: int = 0,
        *,
        with_logit: bool = False,
        engine: EngineOptions = DEFAULT_ENGINE,
    ) -> None:
        if samples is not None:
            check_whole("samples", samples, 2)
        self.samples, self.seed = samples, check_seed(seed)
        super().__init__(detector, posterior, with_logit=with_logit, engine=engine)
        head = next(iter(part_modules(detector).values()), ())
        own = {id(p) for module in head for p in module.parameters()}
        named = dict(detector.named_parameters(remove_duplicate=False))
        self._reaches_below = any(id(named[name]) not in own for name in posterior.parameters)

    def build_router(self, linearized: LinearizedDetector) -> ExactRouter:
        etas = {} if self.samples is None else self.etas
        return ExactRouter(linearized, self.posterior, self.engine, etas, self.with_logit)

    def settings(self) -> dict[str, Any]:
        own = {"samples": self.samples, "seed": self.seed}
        precision, tolerance = self.engine.precision, self.engine.tolerance
        return {**super().settings(), **own, "precision": precision, "tolerance": tolerance}

    def predict(self, point: LinearizationPoint) -> Detections:
        covariance, logit_row, part_below = self.router.covariance(point)
        found = point.detections(logit_row, covariance=covariance)
        return self._with_part_below(found, part_below) if self._reaches_below else found

    def _empty(self, point: LinearizationPoint) -> Detections:
        found = super()._empty(point)
        return self._with_part_below(found, None) if self._reaches_below else found

    def _with_part_below(self, found: Detections, part: Tensor | None) -> Detections:
        """Add the log variances of the layers that ``instances()`` does not run, as signals.

        These are the layers below the head, or all layers of a detector without ``instances()``.
        """
        assert found.covariance is not None
        part = torch.zeros_like(found.covariance) if part is None else part
        logs = log_variances(found.fields, part.diagonal(dim1=1, dim2=2), found.clipped)
        names = [f"{PART_BELOW} {name}" for name in found.fields]
        return replace(found, signals=logs, meta={**found.meta, "signals": names})
