"""Engine: directional derivatives by vmap(jvp), the oracle of all faster ones."""

from __future__ import annotations

import torch
from torch import Tensor

from boxcov._torch.precision import at_least_float32
from boxcov.errors import BoxcovError
from boxcov.posterior.posterior import Posterior
from boxcov.predict.forward_mode.directions import normalise
from boxcov.predict.linearize import LinearizationPoint, Weights


class PosteriorSamples:
    """k directions eta, drawn from the posterior: once from ``seed``, or anew for every frame."""

    def __init__(
        self, posterior: Posterior, count: int, seed: int, per_frame: bool = False
    ) -> None:
        self.posterior, self.count, self.per_frame = posterior, count, per_frame
        self._generator = torch.Generator().manual_seed(seed)
        self._etas: dict[str, Tensor] | None = None

    @property
    def etas(self) -> dict[str, Tensor]:
        """Directions (k, *shape) by parameter name, of all layers."""
        if self._etas is None:
            self._etas = self.posterior.sample(self.count, self._generator)
        return self._etas

    def next_frame(self) -> None:
        """Draw new directions, if every frame has its own."""
        if self.per_frame:
            self._etas = self.posterior.sample(self.count, self._generator)


class ForwardModeError(BoxcovError):
    """Torch has no forward-mode derivative of an operation of the detector."""


def directional_derivatives(
    point: LinearizationPoint, etas: Weights, chunk: int | None = None
) -> Tensor:
    """J eta (m, D, k) along k directions (k, *shape) by name; with logits (m, D + 1, k)."""
    if torch.is_autocast_enabled(point.boxes.device.type):
        raise BoxcovError(
            "forward-mode differentiation does not work under torch.autocast: call the model "
            "outside of it (for a smaller, faster detector use detector.bfloat16()), or use "
            "derivative='fd' with an epsilon for half precision, or ExactGLM with a head posterior"
        )
    theta = point.linearized.theta()
    at = {name: theta[name] for name in etas}
    scaled, scale = normalise(etas, at)

    def one(eta: dict[str, Tensor]) -> Tensor:
        u: Tensor = torch.func.jvp(point.z_at, (at,), (eta,))[1]
        # vmap can only stack what depends on the direction: add a zero that does
        return u + 0 * next(iter(eta.values())).flatten()[0]

    try:
        u = torch.vmap(one, chunk_size=chunk)(scaled)
    except NotImplementedError as error:  # such as fused attention
        raise ForwardModeError(
            "this detector uses an operation that torch cannot differentiate in forward mode "
            f"({str(error).splitlines()[0]}): use ExactGLM, or derivative='fd', or replace it "
            "(models of transformers have attn_implementation='eager')"
        ) from None
    return at_least_float32(u).movedim(0, 2) * scale
