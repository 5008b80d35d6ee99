"""MC-GLM (algorithm 1 of the paper): directional derivatives of the boxes along samples of the posterior, and their sample covariance."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from math import log10
from typing import Any, Literal, get_args
from warnings import warn

import torch
from torch import Tensor

from boxcov.curvature.fisher import at_least_float32
from boxcov.curvature.posterior import Posterior
from boxcov.detections import Detections
from boxcov.detector import Detector
from boxcov.errors import BoxcovError, BoxcovWarning
from boxcov.predict.graphs import matrix_precision
from boxcov.predict.linearise import Point, Weights
from boxcov.predict.predictor import PosteriorPredictor, check_samples, sample_covariance, score_parts
from boxcov.predict.stages import Stages

Derivative = Literal["jvp", "fd"]
_STEP_TOLERANCE = 0.05


class MCGLM(PosteriorPredictor):
    """The paper's method.

    samples: k, the number of directions; the error of the covariance falls as 1 / sqrt(k), see ``ExactGLM`` for none.
    derivative: "jvp" is forward-mode differentiation, exact; "fd" is the paper's finite difference with the step ``epsilon``.
    fresh: draw new directions for every frame; otherwise those of ``seed`` serve all frames, and equal frames get equal numbers.
    cross_box: also return the low-rank covariance of all boxes together, see ``Detections.cross_covariance``.
    chunk: how many directions to differentiate at once, to bound memory; all of them unless given.
    calibrated: also fill ``Detections.predictive``, by the posterior's calibration.
    score: also the variance of each score's logit, and its covariance with the box, from the same directions.

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
        chunk: int | None = None,
        calibrated: bool = False,
        score: bool = False,
    ) -> None:
        check_samples(samples)
        if derivative not in get_args(Derivative):
            raise BoxcovError(f"derivative must be one of {', '.join(get_args(Derivative))}, got {derivative!r}")
        if chunk is not None and (not isinstance(chunk, int) or chunk < 1):
            raise BoxcovError(f"chunk must be a whole number of directions of at least 1, got {chunk!r}")
        if not epsilon > 0:
            raise BoxcovError(f"epsilon must be above 0, got {epsilon}")
        super().__init__(detector, posterior, calibrated, score)
        self.samples, self.derivative, self.epsilon, self.seed = samples, derivative, epsilon, seed
        self.fresh, self.cross_box, self.chunk = fresh, cross_box, chunk
        self._generator = torch.Generator().manual_seed(seed)
        self._etas: dict[str, Tensor] | None = None
        self._step_checked = derivative == "jvp"
        self._stages: Stages | None = None
        self._other_weights = False  # whether boxes were seen to depend on weights that are not the stages'

    def settings(self) -> dict[str, Any]:
        own: dict[str, Any] = {"samples": self.samples, "derivative": self.derivative, "seed": self.seed, "fresh": self.fresh}
        if self.derivative == "fd":
            own["epsilon"] = self.epsilon
        return {**super().settings(), **own}

    def predict(self, point: Point) -> Detections:
        etas = self._directions()
        if self.derivative == "jvp":
            boxes, A = self._derivatives(point, etas)
        else:
            A = finite_differences(point, etas, self.epsilon)
            boxes = A[:, : point.boxes.shape[1]].contiguous()  # in one layout, with logits or without: sums come out the same
            if not self._step_checked:
                self._check_step(point, etas, A)
        factor = (boxes - boxes.mean(2, keepdim=True)) / (self.samples - 1) ** 0.5 if self.cross_box else None
        score = score_parts(sample_covariance(A)[:, -1] if self.score else None)
        return point.detections(covariance=sample_covariance(boxes), factor=factor, meta=self.settings(), **score)

    def asks(self) -> bool:
        return self.score or self._stages is None or not self._stages.suffice

    def _derivatives(self, point: Point, etas: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """J eta (m, D, k) of the boxes, and of all that is asked about, logits too.

        That of the boxes goes through the stages of the head where the detector has them and the boxes depend on nothing else.
        """
        plain = replace(point, logits=None)
        fast = None if self._other_weights else self._by_stages(plain, etas)
        trusted = fast is not None and self._stages is not None and self._stages.trusted
        if fast is not None and trusted and not self.score:
            return fast, fast
        if not point.remembered:
            point = plain = self.linearised.at(point.inputs)
        with nullcontext() if fast is None or trusted else matrix_precision("float32"):  # to be compared, it must be as exact
            A = directional_derivatives(point, etas, self.chunk)
        boxes = A[:, : point.boxes.shape[1]].contiguous()
        if fast is None or trusted:
            return boxes if fast is None else fast, A
        assert self._stages is not None
        rest = {name: eta[:2] for name, eta in etas.items() if name not in self._stages.parameters()}
        if rest and bool(directional_derivatives(plain, rest).any()):
            self._other_weights = True  # the posterior reaches below the head
            return boxes, A
        self._stages.compare(fast, boxes, [])
        return fast, A

    def _by_stages(self, point: Point, etas: dict[str, Tensor]) -> Tensor | None:
        if self._stages is None:
            self._stages = Stages(self.posterior, etas=etas)
        elif self.fresh:
            self._stages.draw(etas)
        return self._stages.found(point)

    def _directions(self) -> dict[str, Tensor]:
        if self._etas is None or self.fresh:
            self._etas = self.posterior.sample(self.samples, self._generator)
        return self._etas

    def _check_step(self, point: Point, etas: dict[str, Tensor], A: Tensor) -> None:
        """On the first boxes: is the finite difference the derivative? If not, say so once and name a step that is better."""
        self._step_checked = True
        try:
            exact = directional_derivatives(point, etas, self.chunk)
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
        errors = [_relative(finite_differences(point, two, step), exact[:, :, :2]) for step in steps]
        error, better = min(zip(errors, steps))
        why = "lost in rounding" if better > self.epsilon else "too long: the boxes are not linear over it"
        warn(
            f"MCGLM(derivative='fd', epsilon={self.epsilon:g}): the step is {why}. The finite differences are {_percent(off)} off the exact "
            f"derivatives; epsilon=1e{round(log10(better))} is {_percent(error)} off, derivative='jvp' needs no epsilon",
            BoxcovWarning,
            stacklevel=4,
        )


class ForwardModeError(BoxcovError):
    """Torch has no forward-mode derivative of something that the detector does."""


def directional_derivatives(point: Point, etas: Weights, chunk: int | None = None) -> Tensor:
    """J eta (m, D, k), of k directions (k, *shape) by parameter name, by forward-mode differentiation, all directions in one pass.

    At a point with logits it is (m, D + 1, k).

    >>> import boxcov
    >>> from boxcov.data import shapes
    >>> from boxcov.detectors.tiny import TinyCenter
    >>> frames = shapes.frames(count=2)
    >>> detector = TinyCenter(threshold=0.05, most=3)
    >>> model = boxcov.MCGLM(detector, boxcov.fit(detector, frames))
    >>> point = model.linearised.at(frames[0][0])
    >>> directional_derivatives(point, model.posterior.sample(7)).shape
    torch.Size([3, 5, 7])
    """
    if torch.is_autocast_enabled(point.boxes.device.type):
        raise BoxcovError(
            "forward-mode differentiation does not work under torch.autocast: call the model outside of it (for a smaller, faster detector "
            "use detector.bfloat16()), or take derivative='fd' with an epsilon for half precision, or ExactGLM with a posterior of the head"
        )
    theta = point.linearised.theta()
    at = {name: theta[name] for name in etas}
    scaled, scale = _normalised(etas, at)

    def one(eta: dict[str, Tensor]) -> Tensor:
        return torch.func.jvp(point.z_at, (at,), (eta,))[1]  # type: ignore[no-any-return]

    # a zero that depends on the direction: vmap cannot stack what does not, as the boxes of a posterior that they do not depend on
    try:
        u = torch.vmap(lambda eta: one(eta) + 0 * next(iter(eta.values())).flatten()[0], chunk_size=chunk)(scaled)
    except NotImplementedError as error:  # fused attention and its like
        raise ForwardModeError(
            f"this detector uses an operation that torch cannot differentiate in forward mode ({str(error).splitlines()[0]}): take ExactGLM, or "
            "derivative='fd', or exchange it (models of transformers have attn_implementation='eager')"
        ) from None
    return at_least_float32(u).movedim(0, 2) * scale


def _normalised(etas: Weights, like: Weights) -> tuple[dict[str, Tensor], Tensor]:
    """Directions of a size that every float type can hold, and the factors (k,) that the derivatives are multiplied by in turn."""
    largest = torch.stack([eta.flatten(1).abs().amax(1) for eta in etas.values()]).amax(0).clamp(min=1e-30)  # (k,)
    scaled = {name: (eta / largest.reshape(-1, *[1] * (eta.dim() - 1))).to(like[name].dtype) for name, eta in etas.items()}
    return scaled, largest


def finite_differences(point: Point, etas: Weights, epsilon: float) -> Tensor:
    """The paper's estimate of J eta (m, D, k): (z(theta + epsilon eta) - z(theta)) / epsilon, one pass for each direction.

    >>> import boxcov
    >>> from boxcov.data import shapes
    >>> from boxcov.detectors.tiny import TinyCenter
    >>> frames = shapes.frames(count=2)
    >>> detector = TinyCenter(threshold=0.05, most=3)
    >>> model = boxcov.MCGLM(detector, boxcov.fit(detector, frames))
    >>> point = model.linearised.at(frames[0][0])
    >>> finite_differences(point, model.posterior.sample(7), epsilon=1e-5).shape
    torch.Size([3, 5, 7])
    """
    theta = point.linearised.theta()
    count = len(next(iter(etas.values())))
    shifted = []
    for i in range(count):
        weights = {name: theta[name] + (epsilon * eta[i]).to(theta[name].dtype) for name, eta in etas.items()}
        shifted.append(at_least_float32(point.difference(point.z_at(weights))) / epsilon)
    return torch.stack(shifted, 2)


def _relative(A: Tensor, exact: Tensor) -> float:
    off = float((A - exact).norm() / exact.norm().clamp(min=1e-30))
    return off if off == off else float("inf")  # NaN: the step left the numbers


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.2g} %" if ratio < 10 else f"a factor of {ratio:.2g}" if ratio < float("inf") else "infinitely far"
