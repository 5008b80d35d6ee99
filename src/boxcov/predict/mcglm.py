"""MC-GLM (algorithm 1 of the paper): directional derivatives of the boxes along samples of the posterior, and their sample covariance."""

from __future__ import annotations

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
from boxcov.predict.carried import Carried
from boxcov.predict.graphs import Precision, matrix_precision
from boxcov.predict.linearise import Linearised, Point, Weights
from boxcov.predict.predictor import PosteriorPredictor, check_precision, check_samples, sample_covariance, score_parts
from boxcov.predict.stages import Found, Stages
from boxcov.predict.tangents import NoRule, Tangents, normalised

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
    precision: of the derivatives ("jvp"): "float32", or "tf32" (on a GPU) or "half", faster and less exact; see docs/performance.md.

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
        precision: Precision = "float32",
    ) -> None:
        check_samples(samples)
        check_precision(precision)
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
        self.precision = precision
        self._stages: Stages | None = None
        self._staged = True  # whether the detector has stages that can be used
        self._carried = Carried(precision)

    def settings(self) -> dict[str, Any]:
        own: dict[str, Any] = {"samples": self.samples, "derivative": self.derivative, "seed": self.seed, "fresh": self.fresh}
        if self.derivative == "fd":
            own["epsilon"] = self.epsilon
        return {**super().settings(), **own}

    def predict(self, point: Point) -> Detections:
        etas = self._etas
        assert etas is not None
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
        if self._stages is None or self.derivative == "fd":
            return True
        staged = not self._staged or self._stages.known
        return not staged or (not self._carried.trusted and (self.score or not self._staged or not self._stages.suffice))

    def along(self) -> Tangents | None:
        if self._etas is None or self.fresh:
            self._etas = self.posterior.sample(self.samples, self._generator)
        return None if self._stages is None else self._tangents()  # before the first boxes it is not known what there is to carry

    def _tangents(self) -> Tangents | None:
        """All directions through the whole network; or, for a head in stages, those of what lies below as far as the head's input."""
        assert self._etas is not None
        if self.derivative == "fd" or (self.chunk is not None and self.chunk < self.samples):
            return None
        if self.score or not self._staged:
            return self._carried.along(self.linearised, self._etas)
        assert self._stages is not None
        return self._carried.along(self.linearised, self._rest(self._etas), self._stages.ends) if self._stages.below else None

    def _rest(self, etas: dict[str, Tensor]) -> dict[str, Tensor]:
        """Those that the stages do not account for."""
        assert self._stages is not None
        own = self._stages.parameters()
        return {name: eta for name, eta in etas.items() if name not in own}

    def _derivatives(self, point: Point, etas: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """J eta (m, D, k) of the boxes, and of all that is asked about, logits too.

        What the head's layers add comes from its stages where the detector has them, and what lies below from tangents carried beside the
        plain pass. Both are compared with forward-mode differentiation when they are first met.
        """
        staged = self._by_stages(point, etas)
        fast = self._fast(point, staged)
        if fast is not None and (staged is None or self._stages_trusted) and (self._carried.trusted or point.tangents is None):
            return fast
        if not point.remembered:
            point = self.linearised.at(point.inputs)
            point = point.scored() if self.score else point
        A = directional_derivatives(point, etas, self.chunk)
        boxes = A[:, : point.boxes.shape[1]].contiguous()
        if staged is not None and not self._stages_trusted:
            self._learn_stages(point, etas, staged)
        return self._learn_tangents(point, etas, A) or (boxes, A)

    @property
    def _stages_trusted(self) -> bool:
        return self._stages is not None and self._stages.trusted

    def _by_stages(self, point: Point, etas: dict[str, Tensor]) -> Found | None:
        if self._stages is None:
            self._stages = Stages(self.posterior, self.precision, etas=etas)
        elif self.fresh:
            self._stages.draw(etas)
        found = self._stages.found(replace(point, logits=None))
        self._staged = found is not None
        return found

    def _fast(self, point: Point, staged: Found | None) -> tuple[Tensor, Tensor] | None:
        """As ``_derivatives``, of stages and tangents; None if they do not tell all."""
        assert self._stages is not None
        every = None
        if point.tangents is not None and not point.tangents.ends:
            with matrix_precision(self.precision):
                every = self._carried.derivatives(point)
        if staged is None:
            return None if every is None else (every[:, : point.boxes.shape[1]].contiguous(), every)
        boxes = staged.part
        if self._stages.below:
            if staged.below is None:
                return None
            boxes = boxes + self._carried.scaled(staged.below)
        return (boxes, boxes) if not self.score else None if every is None else (boxes, every)

    def _learn_stages(self, point: Point, etas: dict[str, Tensor], staged: Found) -> None:
        """The head's part, compared on the features of the plain pass itself and as exactly as it is: in float32."""
        assert self._stages is not None
        rest, head = self._rest(etas), replace(point, logits=None)
        deeper = bool(rest) and bool(directional_derivatives(head, {name: eta[:2] for name, eta in rest.items()}).any())
        own = {name: eta for name, eta in etas.items() if name not in rest}
        if deeper:  # another pass would compute the features anew
            head = Linearised(self._detector, list(own)).at(point.inputs)
        with matrix_precision("float32"):
            self._stages.compare(staged.part, directional_derivatives(head, own, self.chunk), sorted(rest) if deeper else [])

    def _learn_tangents(self, point: Point, etas: dict[str, Tensor], A: Tensor) -> tuple[Tensor, Tensor] | None:
        """The derivatives of this frame in the way of all later ones, so that equal frames get equal numbers; None if that is the plain one."""
        tangents = self._tangents()
        try:
            again = point if tangents is None else self.linearised.again(point, tangents)
        except NoRule:
            self._carried.usable = False
            return None
        fast = self._fast(again, self._by_stages(again, etas) if self._staged else None)
        if fast is not None and tangents is not None and not self._carried.trusted and not self._carried.compare(fast[1], A):
            return None
        return fast

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
    scaled, scale = normalised(etas, at)

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
