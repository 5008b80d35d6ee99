"""Derivatives along posterior samples, and the covariance of the boxes that follows from them.

They are computed by vmap(jvp), the oracle, by propagated tangents, or by finite differences.
"""

from __future__ import annotations

from collections.abc import Mapping
from warnings import warn

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from boxcov._torch.layers import LayerCall
from boxcov._torch.modules import LayerCallMode
from boxcov._torch.process_state import (
    Precision,
    at_least_float32,
    full_precision,
    matrix_precision,
)
from boxcov.errors import BoxcovError, BoxcovWarning
from boxcov.predict.forward_mode.directions import Directions, normalise
from boxcov.predict.forward_mode.jvp import NoRule, push_forward, vmap_jvp
from boxcov.predict.forward_mode.tangents import Tangents
from boxcov.predict.linearize import LinearizationPoint, Weights

_DIRECTIONS_AT_ONCE = 100  # by vmap(jvp), whose memory they take
_STEP_TOLERANCE = 0.05  # of finite differences


class ForwardModeError(BoxcovError):
    """Torch has no forward-mode derivative of an operation of the detector."""


def directional_derivatives(point: LinearizationPoint, etas: Weights) -> Tensor:
    """J eta (m, D, k) along k directions (k, *shape) by name; with logits (m, D + 1, k)."""
    if torch.is_autocast_enabled(point.boxes.device.type):
        raise BoxcovError(
            "forward-mode differentiation does not work under torch.autocast: call the model "
            "outside of it (for a smaller, faster detector use detector.bfloat16()), or use "
            "derivative='fd' with an epsilon for half precision, or ExactGLM with a head posterior"
        )
    theta = point.linearized.theta()
    scaled, scale = normalise(etas, theta)
    size = _DIRECTIONS_AT_ONCE if len(scale) > _DIRECTIONS_AT_ONCE else None  # None copies nothing

    def z(*weights: Tensor) -> list[Tensor]:
        return [point.z_at(dict(zip(etas, weights)))]

    try:
        at = tuple(theta[name] for name in etas)
        (u,) = vmap_jvp(z, at, tuple(scaled.values()), size)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # the plain pass has run, so forward mode is the cause
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise  # this is the cause
        if "data pointer" in str(error):
            raise ForwardModeError(
                "forward() or decode() hands a tensor to numpy, PIL or cv2, which torch cannot "
                "differentiate: prepare the inputs before forward(), where the frames are loaded"
            ) from None
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ForwardModeError(
            "this detector uses an operation that torch cannot differentiate in forward mode "
            f"({reason}): use ExactGLM, or derivative='fd', or replace it"
        ) from error
    return at_least_float32(u).movedim(0, 2) * scale


def finite_differences(point: LinearizationPoint, etas: Weights, epsilon: float) -> Tensor:
    """(z(theta + epsilon eta) - z(theta)) / epsilon (m, D, k), one pass per direction."""
    columns = []
    for number in range(len(next(iter(etas.values())))):
        z = point.z_at(point.linearized.moved(etas, number, epsilon))
        columns.append(at_least_float32(point.difference(z)) / epsilon)
    return torch.stack(columns, 2)


def check_step(point: LinearizationPoint, etas: Weights, epsilon: float, A: Tensor) -> None:
    """Warn if finite differences ``A`` are over 5 % off forward mode, or it does not apply."""
    try:
        exact = directional_derivatives(point, etas)
    except ForwardModeError as reason:
        problem = f"the step could not be checked, as {reason}"
    else:
        error = float((A - exact).norm() / exact.norm().clamp(min=1e-30))
        if error <= _STEP_TOLERANCE:  # NaN is not
            return
        problem = (
            f"the finite differences have a relative error of {error:.2g}, because the step is "
            "lost in rounding, or too long for boxes that are not linear: change epsilon by powers "
            "of ten, or use derivative='jvp', which needs none"
        )
    method = f"MCGLM(derivative='fd', epsilon={epsilon:g})"
    warn(f"{method}: {problem}", BoxcovWarning, stacklevel=3)


class TangentPropagation:
    """Tangents along k directions through one pass, and the derivatives of the boxes from them.

    in_half: tangents are stored in float16, which has as many digits as TF32.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], precision: Precision, in_half: bool = False
    ) -> None:
        self.weights, self.precision, self.in_half = weights, precision, in_half
        self._given: Mapping[str, Tensor] = {}
        self._directions: Directions | None = None

    def tangents(
        self, etas: Mapping[str, Tensor], ends: frozenset[int] = frozenset()
    ) -> Tangents | None:
        """Tangents for the next pass along ``etas`` (k, *shape) by name, the same object each time.

        None under autocast.
        """
        device = next(iter(self.weights.values())).device.type
        if torch.is_autocast_enabled(device):
            return None
        if self._directions is None or self._given is not etas:
            self._given = etas
            self._directions = Directions(etas, self.weights, self.precision, self.in_half)
        return Tangents(self._directions, ends)

    def derivatives(self, point: LinearizationPoint) -> Tensor | None:
        """J eta (m, D, k), with logits (m, D + 1, k); None if no raw output has tangents."""
        assert point.tangents is not None
        leaves, form = tree_flatten(point.raw)
        tangents = {
            i: t
            for i, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and (t := point.tangents.of(leaf)) is not None
        }
        if not tangents:
            return None

        def z(*primals: Tensor) -> list[Tensor]:
            filled = list(leaves)
            for i, primal in zip(tangents, primals):
                filled[i] = primal
            return [point.z_of(tree_unflatten(filled, form))]

        with matrix_precision(self.precision):
            (u,) = push_forward(
                z,
                tuple(leaves[i] for i in tangents),
                tuple(t.to(leaves[i].dtype) for i, t in tangents.items()),
            )
        return self.rescale(at_least_float32(u).movedim(0, 2))

    def rescale(self, u: Tensor) -> Tensor:
        """Derivatives (..., k) along the directions, from those along the normalised tangents."""
        assert self._directions is not None
        return u * self._directions.scale.to(u.dtype)


def check_decode(point: LinearizationPoint) -> None:
    """Raise ``NoRule`` if decode() uses posterior weights, whose tangents would be missed."""

    def refuse(name: str, call: LayerCall) -> Tensor:
        raise NoRule(f"decode() uses {name}")

    with LayerCallMode(point.linearized.names, refuse):
        point.z_of(point.raw)


@full_precision()
def sample_covariance(A: Tensor) -> Tensor:
    """The centred sample covariance (m, D, D) of k columns (m, D, k): equations (16) and (17)."""
    A = A.contiguous()  # the result must not depend on strides
    A = A - A.mean(2, keepdim=True)
    return A @ A.transpose(1, 2) / (A.shape[2] - 1)
