"""The paper's finite differences, and a check of their step."""

from __future__ import annotations

from math import log10
from warnings import warn

import torch
from torch import Tensor

from boxcov._torch.layers import at_least_float32
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
    """Warn if finite differences ``A`` are not the derivatives, and name a better step."""
    method = f"MCGLM(derivative='fd', epsilon={epsilon:g})"
    try:
        exact = directional_derivatives(point, etas)
    except ForwardModeError as reason:
        _warn(f"{method}: the step could not be checked, as {reason}")
        return
    error = _relative_error(A, exact)
    if error <= _STEP_TOLERANCE:
        return
    two = {name: eta[:2] for name, eta in etas.items()}
    steps = [10.0**power for power in range(-9, 1)]
    least, better = min(
        (_relative_error(finite_differences(point, two, step), exact[:, :, :2]), step)
        for step in steps
    )
    is_short = better > epsilon
    why = "lost in rounding" if is_short else "too long: the boxes are not linear over it"
    _warn(
        f"{method}: the step is {why}. The finite differences are {_percent(error)} off the exact "
        f"derivatives; epsilon=1e{round(log10(better))} is {_percent(least)} off, "
        "derivative='jvp' needs no epsilon"
    )


def _warn(message: str) -> None:
    warn(message, BoxcovWarning, stacklevel=3)


def _relative_error(A: Tensor, exact: Tensor) -> float:
    error = float((A - exact).norm() / exact.norm().clamp(min=1e-30))
    return error if error == error else float("inf")


def _percent(ratio: float) -> str:
    if ratio < 10:
        return f"{100 * ratio:.2g} %"
    return f"a factor of {ratio:.2g}" if ratio < float("inf") else "infinitely far"
