"""MC-GLM, algorithm 1 of the paper: the sample covariance of directional derivatives."""

from __future__ import annotations

from typing import Any, Literal

from boxcov.detections import Detections
from boxcov.detector import Detector
from boxcov.errors import BoxcovError, check_choice, check_seed, check_whole
from boxcov.posterior.posterior import Posterior
from boxcov.predict.engine_options import DEFAULT_ENGINE, EngineOptions
from boxcov.predict.forward_mode.derivatives import sample_covariance
from boxcov.predict.linearize import LinearizationPoint, LinearizedDetector
from boxcov.predict.predictor import Predictor
from boxcov.predict.route.mcglm import FiniteDifferenceRouter, MCGLMRouter

Derivative = Literal["jvp", "fd"]


class MCGLM(Predictor):
    """The paper's method: derivatives along samples of the posterior, and their covariance.

    detector, posterior: the posterior must be one of this detector and its weights.
    samples: k, the number of directions, which are drawn once with ``seed``. The error of the
        covariance falls as 1 / sqrt(k), while ``ExactGLM`` has none.
    derivative: "jvp" is forward-mode differentiation, exact; "fd" is the paper's finite difference
        with the step ``epsilon``. The paper's step of 1e-7 is right for its own form of the
        posterior, which is far wider; for others a warning says how far off it is.
    with_logit: also return the variance of each score's logit and its covariance with the box.
    engine: numerical options, see ``EngineOptions``.

    >>> import boxcov
    >>> from boxcov.data import shapes
    >>> from boxcov.detectors.tiny import TinyCenter
    >>> frames = shapes.frames(count=2)
    >>> detector = TinyCenter(threshold=0.05, most=3)
    >>> model = MCGLM(detector, boxcov.fit(detector, frames), samples=10)
    >>> model(frames[0][0]).covariance.shape
    torch.Size([3, 5, 5])
    """

    method = "mcglm"
    posterior: Posterior
    router: MCGLMRouter | FiniteDifferenceRouter
    samples: int

    def __init__(
        self,
        detector: Detector,
        posterior: Posterior,
        samples: int = 10,
        derivative: Derivative = "jvp",
        epsilon: float = 1e-7,
        seed: int = 0,
        *,
        with_logit: bool = False,
        engine: EngineOptions = DEFAULT_ENGINE,
    ) -> None:
        check_whole("samples", samples, 2)
        check_choice("derivative", derivative, Derivative)
        if not epsilon > 0:
            raise BoxcovError(f"epsilon must be above 0, got {epsilon}")
        self.samples, self.seed = samples, check_seed(seed)
        self.derivative, self.epsilon = derivative, epsilon
        super().__init__(detector, posterior, with_logit=with_logit, engine=engine)

    def build_router(self, linearized: LinearizedDetector) -> MCGLMRouter | FiniteDifferenceRouter:
        if self.derivative == "fd":
            return FiniteDifferenceRouter(linearized, self.engine, self.etas, self.epsilon)
        return MCGLMRouter(linearized, self.posterior, self.engine, self.etas, self.with_logit)

    def settings(self) -> dict[str, Any]:
        own: dict[str, Any] = {
            "samples": self.samples,
            "derivative": self.derivative,
            "seed": self.seed,
        }
        if self.derivative == "fd":
            own["epsilon"] = self.epsilon
        return {**super().settings(), **own}

    def predict(self, point: LinearizationPoint) -> Detections:
        boxes, A = self.router.derivatives(point)
        row = sample_covariance(A)[:, -1] if self.with_logit else None
        return point.detections(row, covariance=sample_covariance(boxes))
