"""Engine for any detector: ``J Sigma J^T`` by one backward pass per number, batched."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from boxcov._torch.process_state import at_least_float32
from boxcov.posterior.kronecker_block import MEMORY
from boxcov.posterior.posterior import Posterior
from boxcov.predict.linearize import LinearizationPoint, batched_gradients

_EVERY = slice(None)  # all fields of z


def autograd_covariance(point: LinearizationPoint, posterior: Posterior) -> Tensor:
    """``J Sigma J^T`` of z (m, D, D), for the layers of ``posterior``."""
    return torch.cat([posterior.quadratic(g) for _, g in gradients(point, posterior)])


def gradients(
    point: LinearizationPoint, posterior: Posterior, fields: slice = _EVERY
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Gradients (c, D, *shape) of some fields of z by parameter, and the first of the c boxes.

    As many boxes at a time as memory allows.
    """
    theta = point.linearized.theta()
    weights = {name: theta[name].requires_grad_() for name in posterior.parameters}
    size = sum(w.numel() * w.element_size() for w in weights.values())
    with torch.enable_grad():  # not around a yield: an error of the caller would not end it in time
        z = point.z_at(weights)[:, fields]
        parts = z.split(max(1, int(MEMORY // (size * z.shape[1]))))
    start = 0
    for part in parts:
        yield start, _gradients_of(part, weights)
        start += len(part)


def _gradients_of(z: Tensor, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients (c, D, *shape) of numbers z (c, D)."""
    c, D = z.shape
    seeds = torch.eye(c * D, dtype=z.dtype, device=z.device).view(-1, c, D)
    found = batched_gradients(z, list(weights.values()), seeds)
    return {
        name: at_least_float32(w.new_zeros(c, D, *w.shape) if g is None else g.unflatten(0, (c, D)))
        for (name, w), g in zip(weights.items(), found)
    }
