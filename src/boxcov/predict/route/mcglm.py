"""The routes of MCGLM: derivatives along posterior samples.

z are the numbers of a box and, with ``with_logit``, the logit of its score.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from boxcov._torch.process_state import matrix_precision
from boxcov.predict.engine_options import EngineOptions
from boxcov.predict.forward_mode.derivatives import (
    check_decode,
    check_step,
    directional_derivatives,
    finite_differences,
)
from boxcov.predict.forward_mode.jvp import NoRule
from boxcov.predict.forward_mode.tangents import Tangents
from boxcov.predict.head.stages import StagedResult
from boxcov.predict.linearize import LinearizationPoint, LinearizedDetector
from boxcov.predict.route.base import Router, TangentRouter
from boxcov.predict.route.verification import warn_of_boxes


class FiniteDifferenceRouter(Router):
    """Finite differences, for ``MCGLM(derivative="fd")``; the first boxes check their step."""

    def __init__(
        self,
        linearized: LinearizedDetector,
        options: EngineOptions,
        etas: Mapping[str, Tensor],
        epsilon: float,
    ) -> None:
        super().__init__(linearized, options)
        self.etas, self.epsilon = etas, epsilon

    def derivatives(self, point: LinearizationPoint) -> tuple[Tensor, Tensor]:
        """J eta of the boxes (m, D, k) and of z, one pass per direction."""
        A = finite_differences(point, self.etas, self.epsilon)
        if self.route is None:
            self.settle("finite differences", "finite differences")
            check_step(point, self.etas, self.epsilon, A)
        return A[:, : point.boxes.shape[1]], A


class MCGLMRouter(TangentRouter):
    """Chooses for ``MCGLM``: stages for the head, propagated tangents for the rest, or vmap(jvp)
    for everything."""

    def needs_trunk(self) -> bool:
        has_stages = not self.stages_check.is_refused
        if has_stages and not self.stages_check.is_verified:
            return True
        if self.tangents_check.is_verified:
            return False
        return not has_stages or bool(self._etas_below) or self.with_logit

    def next_tangents(self) -> Tangents | None:
        # tangents of the first boxes are propagated only after vmap(jvp) has run
        return None if self.route is None else self._tangents()

    def _tangents(self) -> Tangents | None:
        """Tangents of all that stages do not compute; None if there is nothing to propagate."""
        if self.tangents_check.is_refused:
            return None
        if self.with_logit or self.stages_check.is_refused:
            return self.propagation.tangents(self.etas)
        if not self._etas_below:
            return None
        return self.propagation.tangents(self._etas_below, self.staged_head.first_layer)

    def derivatives(self, point: LinearizationPoint) -> tuple[Tensor, Tensor]:
        """J eta of the boxes (m, D, k) and of z."""
        staged, fast = self._run_stages(point), None
        has_new = staged is not None and self.stages_check.new_kinds(staged)
        own = point.tangents
        is_same = staged is None or self.stages_check.same_boxes(staged, point)
        if not has_new and is_same and (own is None or self.tangents_check.covers({own.ends})):
            fast = self._fast(point, staged)
        return self._verify(point, staged) if fast is None else fast

    def _run_stages(self, point: LinearizationPoint) -> StagedResult | None:
        if self.stages_check.is_refused:
            return None
        staged = self.staged_head.run(replace(point, logits=None), self.etas)
        if staged is None:
            self.stages_check.refuse()
        return staged

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
            return None if every is None else (every[:, : point.boxes.shape[1]], every)
        boxes = staged.head
        if self._etas_below:
            if staged.derivatives_below is None:
                return None
            boxes = boxes + self.propagation.rescale(staged.derivatives_below)
        if not self.with_logit:
            return boxes, boxes
        return None if every is None else (boxes, every)

    def _verify(
        self, point: LinearizationPoint, staged: StagedResult | None
    ) -> tuple[Tensor, Tensor]:
        """As ``derivatives``: by the oracle, or by the fast route where it agrees with it."""
        point = self.with_trunk(point)
        A = self.oracle(point, self.etas)
        boxes = A[:, : point.boxes.shape[1]]
        agrees = True
        if staged is not None and self.stages_check.new_kinds(staged):
            agrees = self._verify_stages(point, staged, boxes)
        if agrees and staged is not None and not self.stages_check.same_boxes(staged, point):
            warn_of_boxes(point, self.posterior.fingerprint, "mcglm")
            agrees = False
        fast = self._verify_fast(point, staged, A) if agrees else None
        rest = "propagated tangents" if self.tangents_check.is_verified else "vmap(jvp)"
        if self.stages_check.is_verified:
            self.settle("stages", rest if self._etas_below else "none")
        else:
            self.settle(rest, rest)
        return (boxes, A) if fast is None else fast

    def _verify_stages(self, point: LinearizationPoint, staged: StagedResult, slow: Tensor) -> bool:
        """Compare the head's part with vmap(jvp), in float32 on the features of the plain pass.

        slow: the derivatives (m, D, k) of all layers. Their cost does not depend on m, so all boxes
        are compared.
        """
        head, names = replace(point, logits=None), self.staged_head.parameters
        own = {name: eta for name, eta in self.etas.items() if name in names}
        etas_below = {name: eta for name, eta in self.etas.items() if name not in names}
        two = {name: eta[:2] for name, eta in etas_below.items()}
        has_below = bool(two) and bool(directional_derivatives(head, two).any())
        if has_below:
            # linearize in the head's weights only, so that the cached trunk ends at the head and
            # both sides read the same features
            head = LinearizedDetector(self.linearized.detector, list(own)).at(point.inputs)
        if has_below or slow.is_cuda:  # a GPU may compute ``slow`` in TF32
            with matrix_precision("float32"):
                slow = directional_derivatives(head, own)
        agrees = self.stages_check.compare(staged, slow)
        if self.stages_check.is_verified:  # at least for some kinds of boxes
            self._etas_below = etas_below if has_below else {}
        return agrees

    def _verify_fast(
        self, point: LinearizationPoint, staged: StagedResult | None, A: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """The derivatives of this frame by the route of later ones; None if that is vmap(jvp)."""
        tangents = self._tangents()
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
        agrees = self.tangents_agree(fast[1], A, tangents)
        if agrees is None:
            return self._verify_fast(replace(point, tangents=None), staged, A)
        return fast if agrees else None
