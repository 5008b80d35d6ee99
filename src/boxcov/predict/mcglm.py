"""MC-GLM, algorithm 1 of the paper: the sample covariance of directional derivatives.

The paper's finite differences are here, too, with a check of their step.
"""

from __future__ import annotations

from typing import Any, Literal
from warnings import warn

import torch
from torch import Tensor

from boxcov._torch.layers import at_least_float32
from boxcov.detections import Detections
from boxcov.detector import Detector
from boxcov.errors import BoxcovError, BoxcovWarning, check_choice, check_whole
from boxcov.posterior.posterior import Posterior
from boxcov.predict.forward_mode.derivatives import (
    ForwardModeError,
    directional_derivatives,
    sample_covariance,
)
from boxcov.predict.linearize import LinearizationPoint, Weights
from boxcov.predict.predictor import Predictor
from boxcov.predict.route.mcglm import MCGLMRouter
from boxcov.predict.route.router import DEFAULT_ENGINE, EngineOptions, Router

Derivative = Literal["jvp", "fd"]
_STEP_TOLERANCE = 0.05


class MCGLM(Predictor):
    """The paper's method: derivatives along samples of the posterior, and their covariance.

    detector, posterior: the posterior must be one of this detector and its weights.
    samples: k, the number of directions, which are drawn once with ``seed``. The error of the
        covariance falls as 1 / sqrt(k), while ``ExactGLM`` has none.
    derivative: "jvp" is forward-mode differentiation, exact; "fd" is the paper's finite difference
        with the step ``epsilon``.
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
        self.samples, self.derivative, self.epsilon, self.seed = samples, derivative, epsilon, seed
        self._step_checked = False
        super().__init__(detector, posterior, with_logit=with_logit, engine=engine)

    def build_router(self) -> Router:
        if self.derivative == "fd":
            return Router(self.linearize(), self.engine, "finite differences")
        return MCGLMRouter(
            self.linearize(), self.posterior, self.engine, self.etas, self.with_logit
        )

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
        if isinstance(self.router, MCGLMRouter):
            boxes, A = self.router.derivatives(point)
        else:
            A = finite_differences(point, self.etas, self.epsilon)
            boxes = A[:, : point.boxes.shape[1]].contiguous()
            if not self._step_checked:
                self._step_checked = True
                check_step(point, self.etas, self.epsilon, A)
        row = sample_covariance(A)[:, -1] if self.with_logit else None
        return point.detections(row, covariance=sample_covariance(boxes))


def finite_differences(point: LinearizationPoint, etas: Weights, epsilon: float) -> Tensor:
    """(z(theta + epsilon eta) - z(theta)) / epsilon (m, D, k), one pass per direction."""
    columns = []
    for number in range(len(next(iter(etas.values())))):
        z = point.z_at(point.linearized.moved(etas, number, epsilon))
        columns.append(at_least_float32(point.difference(z)) / epsilon)
    return torch.stack(columns, 2)


def check_step(point: LinearizationPoint, etas: Weights, epsilon: float, A: Tensor) -> None:
    """Warn if finite differences ``A`` are not the derivatives, or torch does not know these."""
    method = f"MCGLM(derivative='fd', epsilon={epsilon:g})"
    try:
        exact = directional_derivatives(point, etas)
    except ForwardModeError as reason:
        message = f"{method}: the step could not be checked, as {reason}"
        warn(message, BoxcovWarning, stacklevel=3)
        return
    error = float((A - exact).norm() / exact.norm().clamp(min=1e-30))
    if not error <= _STEP_TOLERANCE:  # NaN included
        warn(
            f"{method}: the finite differences have a relative error of {error:.2g}, because the "
            "step is lost in rounding, or too long for boxes that are not linear: change epsilon "
            "by powers of ten, or use derivative='jvp', which needs none",
            BoxcovWarning,
            stacklevel=3,
        )
