"""MC-GLM (algorithm 1 of the paper): directional derivatives of the boxes along samples of the posterior, and their sample covariance."""

from __future__ import annotations

from math import log10
from typing import Any, Literal, get_args
from warnings import warn

import torch
from torch import Tensor

from boxcov._torch.precision import at_least_float32
from boxcov.detections import Detections
from boxcov.detector import Detector
from boxcov.errors import BoxcovError, BoxcovWarning
from boxcov.posterior.posterior import Posterior
from boxcov.predict.forward_mode.directions import (
    Directions,
    ForwardModeError,
    directional_derivatives,
)
from boxcov.predict.forward_mode.tangents import Tangents
from boxcov.predict.linearize import LinearizationPoint, Weights
from boxcov.predict.predictor import (
    PosteriorPredictor,
    check_samples,
    sample_covariance,
    score_parts,
)
from boxcov.predict.route import EngineOptions

Derivative = Literal["jvp", "fd"]
_STEP_TOLERANCE = 0.05


class MCGLM(PosteriorPredictor):
    """The paper's method.

    samples: k, the number of directions; the error of the covariance falls as 1 / sqrt(k), see ``ExactGLM`` for none.
    derivative: "jvp" is forward-mode differentiation, exact; "fd" is the paper's finite difference with the step ``epsilon``.
    fresh: draw new directions for every frame; otherwise those of ``seed`` serve all frames, and equal frames get equal numbers.
    cross_box: also return the low-rank covariance of all boxes together, see ``Detections.cross_covariance``.
    calibrated: also fill ``Detections.predictive``, by the posterior's calibration.
    with_logit: also the variance of each score's logit, and its covariance with the box, from the same directions.
    engine: speed against accuracy and memory, see ``EngineOptions``.

    >>> import boxcov
    >>> from boxcov.data import shapes
    >>> from boxcov.detectors.tiny import TinyCenter
    >>> frames = shapes.frames(count=2)
    >>> detector = TinyCenter(threshold=0.05, most=3)
    >>> model = MCGLM(detector, boxcov.fit(detector, frames), samples=10)
    >>> found = model(frames[0][0])
    >>> found.covariance.shape[1:]
    torch.Size([5, 5])
    """

    method = "mcglm"

    def __init__(
        self,
        detector: Detector,
        posterior: Posterior,
        samples: int = 10,
        derivative: Derivative = "jvp",
        epsilon: float = 1e-7,
        seed: int = 0,
        *,
        fresh: bool = False,
        cross_box: bool = False,
        calibrated: bool = False,
        with_logit: bool = False,
        engine: EngineOptions | None = None,
    ) -> None:
        check_samples(samples)
        if derivative not in get_args(Derivative):
            raise BoxcovError(
                f"derivative must be one of {', '.join(get_args(Derivative))}, got {derivative!r}"
            )
        if not epsilon > 0:
            raise BoxcovError(f"epsilon must be above 0, got {epsilon}")
        super().__init__(detector, posterior, calibrated, with_logit, engine)
        self.samples, self.derivative, self.epsilon, self.seed = samples, derivative, epsilon, seed
        self.fresh, self.cross_box = fresh, cross_box
        self._generator = torch.Generator().manual_seed(seed)
        self._directions: Directions | None = None
        self._step_checked = derivative == "jvp"

    def settings(self) -> dict[str, Any]:
        own: dict[str, Any] = {
            "samples": self.samples,
            "derivative": self.derivative,
            "seed": self.seed,
            "fresh": self.fresh,
        }
        if self.derivative == "fd":
            own["epsilon"] = self.epsilon
        return {**super().settings(), **own}

    def predict(self, point: LinearizationPoint) -> Detections:
        directions = self._sampled_directions()
        if self.derivative == "jvp":
            boxes, A = directions.derivatives(point)
        else:
            A = finite_differences(point, directions.etas, self.epsilon)
            boxes = A[:, : point.boxes.shape[1]].contiguous()  # one layout, with or without logits
            if not self._step_checked:
                self._check_step(point, directions.etas, A)
        factor = (
            (boxes - boxes.mean(2, keepdim=True)) / (self.samples - 1) ** 0.5
            if self.cross_box
            else None
        )
        score = score_parts(sample_covariance(A)[:, -1] if self.with_logit else None)
        return point.detections(
            covariance=sample_covariance(boxes), factor=factor, meta=self.settings(), **score
        )

    def asks(self) -> bool:
        return self.derivative == "fd" or self._directions is None or not self._directions.suffice

    def along(self) -> Tangents | None:
        directions = self._sampled_directions(draw=self.fresh)
        return None if self.derivative == "fd" else directions.tangents(self.linearized)

    def _sampled_directions(self, draw: bool = False) -> Directions:
        """The directions of the seed, or new ones for this frame."""
        if self._directions is None:
            self._directions = Directions(
                self._detector,
                self.posterior,
                self.posterior.sample(self.samples, self._generator),
                self.engine,
                self.with_logit,
            )
        elif draw:
            self._directions.draw(self.posterior.sample(self.samples, self._generator))
        return self._directions

    def _check_step(self, point: LinearizationPoint, etas: dict[str, Tensor], A: Tensor) -> None:
        """On the first boxes: is the finite difference the derivative? If not, say so once and name a step that is better."""
        self._step_checked = True
        try:
            exact = directional_derivatives(point, etas, self.engine.chunk)
        except ForwardModeError as why_not:
            warn(
                f"MCGLM(derivative='fd', epsilon={self.epsilon:g}): the step could not be checked, as {why_not}",
                BoxcovWarning,
                stacklevel=4,
            )
            return
        off = _relative(A, exact)
        if off <= _STEP_TOLERANCE:
            return
        two = {name: eta[:2] for name, eta in etas.items()}
        steps = [10.0**power for power in range(-9, 1)]
        errors = [
            _relative(finite_differences(point, two, step), exact[:, :, :2]) for step in steps
        ]
        error, better = min(zip(errors, steps))
        why = (
            "lost in rounding"
            if better > self.epsilon
            else "too long: the boxes are not linear over it"
        )
        warn(
            f"MCGLM(derivative='fd', epsilon={self.epsilon:g}): the step is {why}. The finite differences are {_percent(off)} off the exact "
            f"derivatives; epsilon=1e{round(log10(better))} is {_percent(error)} off, derivative='jvp' needs no epsilon",
            BoxcovWarning,
            stacklevel=4,
        )


def finite_differences(point: LinearizationPoint, etas: Weights, epsilon: float) -> Tensor:
    """The paper's estimate of J eta (m, D, k): (z(theta + epsilon eta) - z(theta)) / epsilon, one pass for each direction.

    >>> import boxcov
    >>> from boxcov.data import shapes
    >>> from boxcov.detectors.tiny import TinyCenter
    >>> frames = shapes.frames(count=2)
    >>> detector = TinyCenter(threshold=0.05, most=3)
    >>> model = boxcov.MCGLM(detector, boxcov.fit(detector, frames))
    >>> point = model.linearized.at(frames[0][0])
    >>> finite_differences(point, model.posterior.sample(7), epsilon=1e-5).shape
    torch.Size([3, 5, 7])
    """
    theta = point.linearized.theta()
    count = len(next(iter(etas.values())))
    shifted = []
    for i in range(count):
        weights = {
            name: theta[name] + (epsilon * eta[i]).to(theta[name].dtype)
            for name, eta in etas.items()
        }
        shifted.append(at_least_float32(point.difference(point.z_at(weights))) / epsilon)
    return torch.stack(shifted, 2)


def _relative(A: Tensor, exact: Tensor) -> float:
    off = float((A - exact).norm() / exact.norm().clamp(min=1e-30))
    return off if off == off else float("inf")  # NaN: the step left the numbers


def _percent(ratio: float) -> str:
    return (
        f"{100 * ratio:.2g} %"
        if ratio < 10
        else f"a factor of {ratio:.2g}"
        if ratio < float("inf")
        else "infinitely far"
    )
