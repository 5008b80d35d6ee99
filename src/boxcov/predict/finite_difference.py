"""The paper's finite differences, and a check of their step."""

from __future__ import annotations

from warnings import warn

import torch
from torch import Tensor

from boxcov._torch.process_state import at_least_float32
from boxcov.errors import BoxcovWarning
from boxcov.predict.forward_mode.derivatives import ForwardModeError, directional_derivatives
from boxcov.predict.linearize import LinearizationPoint, Weights

_STEP_TOLERANCE = 0.05


def finite_differences(point: LinearizationPoint, etas: Weights, epsilon: float) -> Tensor:
    """(z(theta + epsilon eta) - z(theta)) / epsilon (m, D, k), one pass per direction."""
    columns = []
    for number in range(len(next(iter(etas.values())))):
        z = point.z_at(point.linearized.moved(etas, number, epsilon))
        columns.append(at_least_float32(point.difference(z)) / epsilon)
    return torch.stack(columns, 2)


def check_step(point: LinearizationPoint, etas: Weights, epsilon: float, A: Tensor) -> None:
    """Warn if finite differences ``A`` are over 5 % off forward mode, or it does not apply."""
    method = f"MCGLM(derivative='fd', epsilon={epsilon:g})"
    try:
        exact = directional_derivatives(point, etas)
    except ForwardModeError as reason:
        message = f"{method}: the step could not be checked, as {reason}"
        warn(message, BoxcovWarning, stacklevel=3)
        return
    error = float((A - exact).norm() / exact.norm().clamp(min=1e-30))
    if not error <= _STEP_TOLERANCE:  # NaN included
        warn(
            f"{method}: the finite differences have a relative error of {error:.2g}, because the "
            "step is lost in rounding, or too long for boxes that are not linear: change epsilon "
            "by powers of ten, or use derivative='jvp', which needs none",
            BoxcovWarning,
            stacklevel=3,
        )
