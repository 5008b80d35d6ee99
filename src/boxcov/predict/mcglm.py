"""MC-GLM, algorithm 1 of the paper: the sample covariance of directional derivatives.

``DirectionRouter`` chooses the engine of each frame, as ``route.py`` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor

from boxcov._torch.process_state import matrix_precision
from boxcov.detections import Detections
from boxcov.detector import Detector
from boxcov.errors import BoxcovError, check_choice, check_whole
from boxcov.posterior.posterior import Posterior
from boxcov.predict.finite_difference import check_step, finite_differences
from boxcov.predict.forward_mode.derivatives import (
    PosteriorSamples,
    check_decode,
    directional_derivatives,
    sample_covariance,
)
from boxcov.predict.forward_mode.tangents import NoRule, Tangents
from boxcov.predict.head.stages import StagedResult
from boxcov.predict.linearize import LinearizationPoint, LinearizedDetector
from boxcov.predict.predictor import PosteriorPredictor, logit_fields
from boxcov.predict.route import DEFAULT_ENGINE, EngineOptions, Route, Router, State, TangentRouter

Derivative = Literal["jvp", "fd"]


class MCGLM(PosteriorPredictor):
    """The paper's method: derivatives along samples of the posterior, and their covariance.

    samples: k, the number of directions, which are drawn once with ``seed``. The error of the
        covariance falls as 1 / sqrt(k), while ``ExactGLM`` has none.
    derivative: "jvp" is forward-mode differentiation, exact; "fd" is the paper's finite difference
        with the step ``epsilon``.
    with_logit: also return the variance of each score's logit and its covariance with the box.
    engine: speed against accuracy and memory.

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
    router: DirectionRouter | Router  # of finite differences

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
        super().__init__(detector, posterior, with_logit, engine)
        self.samples, self.derivative, self.epsilon, self.seed = samples, derivative, epsilon, seed
        self._samples = PosteriorSamples(self.posterior, samples, seed)
        self.router = self.build_router()
        self.set_error_model(posterior.error_model)

    def build_router(self) -> DirectionRouter | Router:
        if self.derivative == "fd":
            return super().build_router()
        return DirectionRouter(
            self.linearize(), self.posterior, self.engine, self._samples, self.with_logit
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
        if isinstance(self.router, DirectionRouter):
            boxes, A = self.router.derivatives(point)
        else:
            A = self._differences(point)
            boxes = A[:, : point.boxes.shape[1]].contiguous()
        row = sample_covariance(A)[:, -1] if self.with_logit else None
        return point.detections(
            covariance=sample_covariance(boxes),
            meta=self.settings(),
            **logit_fields(row),
        )

    def _differences(self, point: LinearizationPoint) -> Tensor:
        """J eta of z (m, D, k), one pass per direction; the step is checked on the first boxes."""
        A = finite_differences(point, self._samples.etas, self.epsilon)
        if self.router.route is None:
            self.router.settle("finite differences", "finite differences")
            check_step(point, self._samples.etas, self.epsilon, A)
        return A


class DirectionRouter(TangentRouter):
    """Routes of ``MCGLM``: derivatives along posterior samples, by stages for the head, propagated
    tangents for the rest, or vmap(jvp) for everything."""

    def __init__(
        self,
        linearized: LinearizedDetector,
        posterior: Posterior,
        options: EngineOptions,
        samples: PosteriorSamples,
        with_logit: bool = False,
    ) -> None:
        super().__init__(linearized, posterior, options)
        self.samples, self.with_logit = samples, with_logit
        self._has_below = False  # known once the stages are verified

    def needs_trunk(self) -> bool:
        has_stages = not self.stages_check.is_refused
        if self.route is None or (has_stages and self.stages_check.state is not State.VERIFIED):
            return True
        if self.tangents_check.state is State.VERIFIED:
            return False
        return not has_stages or self._has_below or self.with_logit

    def next_tangents(self) -> Tangents | None:
        if self.route is None or self.tangents_check.is_refused:
            return None
        if self.with_logit or self.stages_check.is_refused:
            return self.propagation.tangents(self.samples.etas)
        if not self._has_below:
            return None
        return self.propagation.tangents(self._etas_below(), self.staged_head.first_layer)

    def derivatives(self, point: LinearizationPoint) -> tuple[Tensor, Tensor]:
        """J eta of the boxes (m, D, k) and of z, which includes the logit if there is one."""
        staged = self._run_stages(point)
        fast = self._fast(point, staged) if self._is_verified(point, staged) else None
        return self._verify(point, staged) if fast is None else fast

    def _verify(
        self, point: LinearizationPoint, staged: StagedResult | None
    ) -> tuple[Tensor, Tensor]:
        """As ``derivatives``: by the oracle, or by the fast route where it agrees with it."""
        point = self.with_trunk(point)
        A = directional_derivatives(point, self.samples.etas)
        boxes = A[:, : point.boxes.shape[1]].contiguous()
        agrees = (
            staged is None or not self.new_kinds(staged) or self._verify_head(point, staged, boxes)
        )
        fast = self._verify_fast(point, staged, A) if agrees else None
        self._settle()
        return (boxes, A) if fast is None else fast

    def _settle(self) -> None:
        is_fast = self.tangents_check.state is State.VERIFIED
        rest = "propagated tangents" if is_fast else "vmap(jvp)"
        if self.stages_check.state is State.VERIFIED:
            self.settle("stages", rest if self._has_below else "none")
        else:
            self.settle(rest, rest)

    def _run_stages(self, point: LinearizationPoint) -> StagedResult | None:
        if self.stages_check.is_refused:
            return None
        staged = self.staged_head.run(replace(point, logits=None), self.samples.etas)
        if staged is None:
            self.stages_check.refuse()
        return staged

    def _is_verified(self, point: LinearizationPoint, staged: StagedResult | None) -> bool:
        if staged is not None and self.new_kinds(staged):
            return False
        return point.tangents is None or self.tangents_check.covers({point.tangents.ends})

    def _fast(
        self, point: LinearizationPoint, staged: StagedResult | None
    ) -> tuple[Tensor, Tensor] | None:
        """As ``derivatives``, from stages and tangents; None if they do not cover everything."""
        every = None
        if point.tangents is not None and not point.tangents.ends:
            try:
                every = self.propagation.derivatives(point)
            except NoRule:
                self.tangents_check.refuse()
        if staged is None:
            D = point.boxes.shape[1]
            return None if every is None else (every[:, :D].contiguous(), every)
        boxes = staged.head
        if self._has_below:
            if staged.below is None:
                return None
            boxes = boxes + self.propagation.rescale(staged.below)
        if not self.with_logit:
            return boxes, boxes
        return None if every is None else (boxes, every)

    def _verify_head(self, point: LinearizationPoint, staged: StagedResult, slow: Tensor) -> bool:
        """Compare the head's part with vmap(jvp), in float32 on the features of the plain pass.

        slow: the derivatives (m, D, k) of all layers. Their cost does not depend on m, so all boxes
        are compared.
        """
        below, head = self._etas_below(), replace(point, logits=None)
        two = {name: eta[:2] for name, eta in below.items()}
        has_below = bool(two) and bool(directional_derivatives(head, two).any())
        own = {name: eta for name, eta in self.samples.etas.items() if name not in below}
        if has_below:  # with fewer weights the trunk reaches up to the head: equal features
            head = LinearizedDetector(self.linearized.detector, list(own)).at(point.inputs)
        if has_below or slow.is_cuda:  # a GPU may compute ``slow`` in TF32
            with matrix_precision("float32"):
                slow = directional_derivatives(head, own)
        if self.verify_stages(staged, slow):
            self._has_below = has_below
            return True
        return False

    def _verify_fast(
        self, point: LinearizationPoint, staged: StagedResult | None, A: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """The derivatives of this frame by the route of later ones; None if that is vmap(jvp)."""
        self.route = self.route or Route("vmap(jvp)")  # a route of None propagates no tangents
        tangents = self.next_tangents()
        try:
            if tangents is not None:
                point = self.linearized.with_tangents(point, tangents)
                if not tangents.ends:
                    check_decode(point)
                staged = self._run_stages(point)
            fast = self._fast(point, staged)
        except NoRule:
            self.tangents_check.refuse()
            return None
        if fast is None or tangents is None or self.tangents_check.covers({tangents.ends}):
            return fast
        return fast if self.verify_tangents(fast[1], A, tangents) else None

    def _etas_below(self) -> Mapping[str, Tensor]:
        """Directions of the weights that the stages do not account for."""
        own = self.staged_head.parameters
        return {name: eta for name, eta in self.samples.etas.items() if name not in own}
