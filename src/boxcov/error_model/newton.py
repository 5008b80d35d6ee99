"""A minimum under bounds, by damped Newton steps: for the smooth problems of a few hundred unknowns that calibration poses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcov.errors import BoxcovError

Array = NDArray[Any]
Objective = Callable[[Array], tuple[float, Array, Array]]
"""``objective(x)``: the value, its gradient (p,) and a curvature (p, p) that is never negative."""

_LONGEST = 5.0  # unknowns are logarithms: none goes further than this in a step
_GAIN = 1e-11  # a step that wins less than this share of the value is the last


def minimise(objective: Objective, start: Array, low: Array, high: Array, most: int = 200) -> Array:
    """The x (p,) between ``low`` and ``high`` where ``objective`` is least, near ``start``.

    An unknown that lies on a bound and would leave rests there while the others move. Levenberg and Marquardt's damping: a step that does
    not help is tried again, shorter and more along the slope.

    >>> square = lambda x: (float(((x - 3) ** 2).sum()), 2 * (x - 3), 2 * np.eye(2))
    >>> minimise(square, np.zeros(2), np.full(2, -np.inf), np.array([np.inf, 1.0])).round(6).tolist()
    [3.0, 1.0]
    """
    x = np.clip(start, low, high)
    value, gradient, curvature = objective(x)
    if not np.isfinite(value):
        raise BoxcovError(
            f"the likelihood of the errors is not finite where the fit begins ({value})"
        )
    damping = 1e-6
    for _ in range(most):
        step = _step(x, gradient, curvature, low, high, damping)
        there = np.clip(x + step, low, high)
        found = objective(there)
        gain = value - found[0]
        if gain > 0:
            x, (value, gradient, curvature), damping = there, found, max(damping / 10, 1e-9)
        elif damping < 1e8:
            damping = max(10 * damping, 1e-3)
            continue
        if gain <= _GAIN * (1 + abs(value)):
            break
    return x


def _step(
    x: Array, gradient: Array, curvature: Array, low: Array, high: Array, damping: float
) -> Array:
    free = ~(((x <= low) & (gradient > 0)) | ((x >= high) & (gradient < 0)))
    step = np.zeros_like(x)
    if free.any():
        H = curvature[np.ix_(free, free)]
        size = np.sqrt(np.maximum(H.diagonal(), 1e-300))
        H = H / size / size[:, None] + damping * np.eye(
            len(H)
        )  # scaled: unknowns have very different curvatures
        step[free] = -np.linalg.solve(H, gradient[free] / size) / size
    return np.clip(
        step, -_LONGEST, _LONGEST
    )  # each by itself: one that nothing holds must not keep the others back
