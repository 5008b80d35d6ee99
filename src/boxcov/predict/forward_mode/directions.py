"""Directions eta in the form that the products of tangents take."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch
from torch import Tensor, nn

from boxcov._torch.layers import LayerCall
from boxcov._torch.process_state import Precision
from boxcov.predict.forward_mode.storage import Float16Operands, channels_last


class Directions:
    """k directions (k, *shape) of ``weights``, both by name; cached from frame to frame.

    Tangents are propagated along normalised directions, whose size every dtype can hold. ``scale``
    (k,) multiplies the derivatives in the end. in_half: store tangents of float32 tensors in
    float16.
    """

    def __init__(
        self,
        etas: Mapping[str, Tensor],
        weights: Mapping[str, Tensor],
        precision: Precision = "float32",
        in_half: bool = False,
    ) -> None:
        self.names, self.precision = {id(weights[name]): name for name in etas}, precision
        self.etas, self.scale = normalise(etas, weights)
        self.count = len(self.scale)
        self.half = Float16Operands() if in_half else None
        self._stacked: dict[tuple[str, int], Tensor] = {}
        self._factors: dict[Hashable, tuple[Tensor, Tensor, Tensor | None]] = {}

    def of(self, parameter: Tensor | None) -> Tensor | None:
        """Directions (k, *shape) of a parameter; None if it has none."""
        return None if parameter is None else self.etas.get(self.names.get(id(parameter), ""))

    def stacked(self, call: LayerCall, eta: Tensor, factor: float | None = None) -> Tensor:
        """The k directions of a call's weight as one weight with k times as many outputs.

        factor: multiplies it, for the result in float16.
        """
        key = self.names[id(call.weight)], call.geometry.groups
        if factor is not None:
            assert self.half is not None
            return self.half.operand(key, lambda: _stack(call, eta), factor)
        if self.half is not None:  # needed once, to measure scales, unless there are none
            return _stack(call, eta)
        if key not in self._stacked:
            self._stacked[key] = channels_last(_stack(call, eta))
        return self._stacked[key]

    def norm_factor(self, variance: Tensor, weight: Tensor | None, eps: float, dims: int) -> Tensor:
        """The factor of a batch norm in eval mode, channels first (C, 1, ...)."""
        key = id(variance), id(weight), eps, dims
        if key in self._factors:
            return self._factors[key][0]
        factor = (variance + eps).rsqrt()
        factor = factor if weight is None else factor * weight.detach()
        factor = factor.reshape(-1, *[1] * (dims - 2))
        if weight is None or isinstance(weight, nn.Parameter):  # not computed from the frame
            # the tensors are kept alive, so that no other tensor gets the id of one of them
            self._factors[key] = factor, variance, weight
        return factor


def _stack(call: LayerCall, eta: Tensor) -> Tensor:
    """Directions (k, *shape) of a call's weight as one weight with k times as many outputs."""
    if call.geometry.transposed:  # (k, n_in, n_out, ...)
        return eta.movedim(0, 1).flatten(1, 2)
    if call.geometry.kernel:  # (k, n_out, n_in / groups, ...), the groups outermost
        return eta.unflatten(1, (call.geometry.groups, -1)).transpose(0, 1).flatten(0, 2)
    return eta.flatten(0, 1)


def normalise(
    etas: Mapping[str, Tensor], like: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], Tensor]:
    """Directions with a largest entry of 1, and the factors (k,) to multiply derivatives by.

    The paper's posterior has directions of 1e5, which a detector in half precision cannot hold.
    """
    sizes = [eta.flatten(1).abs().amax(1) for eta in etas.values()]
    scale = torch.stack(sizes).amax(0).clamp(min=1e-30)  # (k,)
    scaled = {
        name: (eta / scale.reshape(-1, *[1] * (eta.dim() - 1))).to(like[name].dtype)
        for name, eta in etas.items()
    }
    return scaled, scale
