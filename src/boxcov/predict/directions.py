"""Derivatives of the boxes along directions of the posterior: by forward mode, and through the stages of the head where the detector has them."""

from __future__ import annotations

from contextlib import nullcontext
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from boxcov.curvature.fisher import at_least_float32
from boxcov.curvature.posterior import Posterior
from boxcov.errors import BoxcovError
from boxcov.predict.graphs import matrix_precision
from boxcov.predict.linearise import Point, Weights
from boxcov.predict.stages import Stages


class Directions:
    """k directions (k, *shape) by parameter name, and what is known of the ways to differentiate along them."""

    def __init__(self, posterior: Posterior, etas: dict[str, Tensor]) -> None:
        self.etas = etas
        self._stages = Stages(posterior, etas=etas)
        self._other_weights = False  # whether boxes were seen to depend on weights that are not the stages'

    def first(self, k: int) -> Directions:
        """The first k of them; what has been compared counts for them, too."""
        some = copy(self)
        some.etas = {name: eta[:k] for name, eta in self.etas.items()}
        some._stages = self._stages.along(some.etas)
        return some

    def draw(self, etas: dict[str, Tensor]) -> None:
        """Others from here on."""
        self.etas = etas
        self._stages.draw(etas)

    @property
    def suffice(self) -> bool:
        """Whether the stages are enough for any frame, so that the trunk need not be remembered."""
        return self._stages.suffice

    def derivatives(self, point: Point, chunk: int | None = None) -> tuple[Tensor, Tensor]:
        """J eta (m, D, k) of the boxes, and of all that is asked about, logits too.

        That of the boxes goes through the stages of the head where the detector has them and the boxes depend on nothing else.
        """
        plain = replace(point, logits=None)
        fast = None if self._other_weights else self._stages.found(plain)
        trusted = fast is not None and self._stages.trusted
        if fast is not None and trusted and point.logits is None:
            return fast, fast
        if not point.remembered:
            point = plain = point.linearised.at(point.inputs)
        with nullcontext() if fast is None or trusted else matrix_precision("float32"):  # to be compared, it must be as exact
            A = directional_derivatives(point, self.etas, chunk)
        boxes = A[:, : point.boxes.shape[1]].contiguous()
        if fast is None or trusted:
            return boxes if fast is None else fast, A
        rest = {name: eta[:2] for name, eta in self.etas.items() if name not in self._stages.parameters()}
        if rest and bool(directional_derivatives(plain, rest).any()):
            self._other_weights = True  # the posterior reaches below the head
            return boxes, A
        self._stages.compare(fast, boxes, [])
        return fast, A


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
    u = torch.vmap(lambda eta: one(eta) + 0 * next(iter(eta.values())).flatten()[0], chunk_size=chunk)(scaled)
    return at_least_float32(u).movedim(0, 2) * scale


def _normalised(etas: Weights, like: Weights) -> tuple[dict[str, Tensor], Tensor]:
    """Directions of a size that every float type can hold, and the factors (k,) that the derivatives are multiplied by in turn."""
    largest = torch.stack([eta.flatten(1).abs().amax(1) for eta in etas.values()]).amax(0).clamp(min=1e-30)  # (k,)
    scaled = {name: (eta / largest.reshape(-1, *[1] * (eta.dim() - 1))).to(like[name].dtype) for name, eta in etas.items()}
    return scaled, largest
