"""Derivatives of the boxes along directions of the posterior: stages for the head, tangents for the rest, forward mode for all."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from boxcov._torch.precision import at_least_float32
from boxcov.detector import Detector
from boxcov.errors import BoxcovError
from boxcov.posterior.posterior import Posterior
from boxcov.predict.cuda.graphs import matrix_precision
from boxcov.predict.forward_mode.carried import Carried
from boxcov.predict.forward_mode.tangents import NoRule, Tangents, normalised
from boxcov.predict.head.stages import Found, Stages
from boxcov.predict.linearize import LinearizationPoint, LinearizedDetector, Weights
from boxcov.predict.route import EngineOptions


class Directions:
    """k directions (k, *shape) by parameter name, and what is known of the ways to differentiate along them.

    What the head's layers add comes from its stages where the detector has them, and what lies below, or all if it has none, from tangents
    carried beside a pass of the network. Both are compared with forward-mode differentiation on the first boxes.
    """

    def __init__(
        self,
        detector: Detector,
        posterior: Posterior,
        etas: dict[str, Tensor],
        engine: EngineOptions,
        with_logit: bool = False,
    ) -> None:
        self.detector, self.etas, self.precision, self.with_logit = (
            detector,
            etas,
            engine.precision,
            with_logit,
        )
        chunk = engine.chunk
        self.chunk = None if chunk is None or chunk >= len(next(iter(etas.values()))) else chunk
        self._stages = Stages(posterior, engine, etas)
        self._carried = Carried(engine.precision)
        self._met = False  # whether there have been boxes
        self._staged = True  # whether the detector has stages that can be used

    def draw(self, etas: dict[str, Tensor]) -> None:
        """Others from here on."""
        self.etas = etas
        self._stages.draw(etas)

    @property
    def suffice(self) -> bool:
        """Whether nothing is left to be compared, so that the trunk need not be remembered."""
        if not self._met or (self._staged and not self._stages.known):
            return False
        return self._carried.trusted or (
            self._staged and self._stages.suffice and not self.with_logit
        )

    def tangents(self, linearized: LinearizedDetector) -> Tangents | None:
        """To be carried beside a pass: all directions through the whole network; or, for a head in stages, those of what lies below as far as
        the head's input. None where they are not needed, or before the first boxes, when it is not known which."""
        if not self._met or self.chunk is not None:
            return None
        if self.with_logit or not self._staged:
            return self._carried.along(linearized, self.etas)
        return (
            self._carried.along(linearized, self._rest(), self._stages.ends)
            if self._stages.below
            else None
        )

    def derivatives(self, point: LinearizationPoint) -> tuple[Tensor, Tensor]:
        """J eta (m, D, k) of the boxes, and of all that is asked about, logits too."""
        staged = self._by_stages(point)
        fast = self._fast(point, staged)
        if (
            fast is not None
            and (staged is None or self._stages.trusted)
            and (self._carried.trusted or point.tangents is None)
        ):
            return fast
        if not point.remembered:
            logits = point.logits
            point = replace(point.linearized.at(point.inputs), logits=logits)
        A = directional_derivatives(point, self.etas, self.chunk)
        boxes = A[:, : point.boxes.shape[1]].contiguous()
        if staged is not None and not self._stages.trusted:
            self._learn_stages(point, staged)
        self._met = True
        return self._learn_tangents(point, A) or (boxes, A)

    def _rest(self) -> dict[str, Tensor]:
        """Those that the stages do not account for."""
        own = self._stages.parameters()
        return {name: eta for name, eta in self.etas.items() if name not in own}

    def _by_stages(self, point: LinearizationPoint) -> Found | None:
        found = self._stages.found(replace(point, logits=None)) if self._staged else None
        self._staged = found is not None
        return found

    def _fast(
        self, point: LinearizationPoint, staged: Found | None
    ) -> tuple[Tensor, Tensor] | None:
        """As ``derivatives``, of stages and tangents; None if they do not tell all."""
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
        return (boxes, boxes) if not self.with_logit else None if every is None else (boxes, every)

    def _learn_stages(self, point: LinearizationPoint, staged: Found) -> None:
        """The head's part, compared on the features of the plain pass itself and as exactly as it is: in float32."""
        rest, head = self._rest(), replace(point, logits=None)
        deeper = bool(rest) and bool(
            directional_derivatives(head, {name: eta[:2] for name, eta in rest.items()}).any()
        )
        own = {name: eta for name, eta in self.etas.items() if name not in rest}
        if deeper:  # another pass would compute the features anew
            head = LinearizedDetector(self.detector, list(own)).at(point.inputs)
        with matrix_precision("float32"):
            self._stages.compare(
                staged.part,
                directional_derivatives(head, own, self.chunk),
                sorted(rest) if deeper else [],
            )

    def _learn_tangents(self, point: LinearizationPoint, A: Tensor) -> tuple[Tensor, Tensor] | None:
        """The derivatives of this frame in the way of all later ones, so that equal frames get equal numbers; None if that is the plain one."""
        tangents = self.tangents(point.linearized)
        try:
            again = point if tangents is None else point.linearized.again(point, tangents)
        except NoRule:
            self._carried.usable = False
            return None
        fast = self._fast(again, self._by_stages(again))
        if (
            fast is not None
            and tangents is not None
            and not self._carried.trusted
            and not self._carried.compare(fast[1], A)
        ):
            return None
        return fast


class ForwardModeError(BoxcovError):
    """Torch has no forward-mode derivative of something that the detector does."""


def directional_derivatives(
    point: LinearizationPoint, etas: Weights, chunk: int | None = None
) -> Tensor:
    """J eta (m, D, k), of k directions (k, *shape) by parameter name, by forward-mode differentiation, all directions in one pass.

    At a point with logits it is (m, D + 1, k).

    >>> import boxcov
    >>> from boxcov.data import shapes
    >>> from boxcov.detectors.tiny import TinyCenter
    >>> frames = shapes.frames(count=2)
    >>> detector = TinyCenter(threshold=0.05, most=3)
    >>> model = boxcov.MCGLM(detector, boxcov.fit(detector, frames))
    >>> point = model.linearized.at(frames[0][0])
    >>> directional_derivatives(point, model.posterior.sample(7)).shape
    torch.Size([3, 5, 7])
    """
    if torch.is_autocast_enabled(point.boxes.device.type):
        raise BoxcovError(
            "forward-mode differentiation does not work under torch.autocast: call the model outside of it (for a smaller, faster detector "
            "use detector.bfloat16()), or take derivative='fd' with an epsilon for half precision, or ExactGLM with a posterior of the head"
        )
    theta = point.linearized.theta()
    at = {name: theta[name] for name in etas}
    scaled, scale = normalised(etas, at)

    def one(eta: dict[str, Tensor]) -> Tensor:
        return torch.func.jvp(point.z_at, (at,), (eta,))[1]  # type: ignore[no-any-return]

    # a zero that depends on the direction: vmap cannot stack what does not, as the boxes of a posterior that they do not depend on
    try:
        u = torch.vmap(
            lambda eta: one(eta) + 0 * next(iter(eta.values())).flatten()[0], chunk_size=chunk
        )(scaled)
    except NotImplementedError as error:  # fused attention and its like
        raise ForwardModeError(
            f"this detector uses an operation that torch cannot differentiate in forward mode ({str(error).splitlines()[0]}): take ExactGLM, or "
            "derivative='fd', or exchange it (models of transformers have attn_implementation='eager')"
        ) from None
    return at_least_float32(u).movedim(0, 2) * scale
