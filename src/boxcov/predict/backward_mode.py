"""Engine for any detector: ``J Sigma J^T`` by one backward pass per number, batched."""

from __future__ import annotations

import torch
from torch import Tensor

from boxcov._torch.layers import at_least_float32
from boxcov.posterior.kronecker_block import MEMORY
from boxcov.posterior.posterior import Posterior
from boxcov.predict.linearize import LinearizationPoint


def autograd_covariance(point: LinearizationPoint, posterior: Posterior) -> Tensor:
    """``J Sigma J^T`` of z (m, D, D), for the layers of ``posterior``.

    As many boxes at a time as memory allows.
    """
    with torch.enable_grad():
        theta = point.linearized.theta()
        weights = {name: theta[name].requires_grad_() for name in posterior.parameters}
        z = point.z_at(weights)
        size = sum(w.numel() * w.element_size() for w in weights.values())
        step = max(1, int(MEMORY // (size * z.shape[1])))
        return torch.cat([posterior.quadratic(_gradients(part, weights)) for part in z.split(step)])


def _gradients(z: Tensor, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients (c, D, *shape) of numbers z (c, D)."""
    c, D = z.shape
    seeds = torch.eye(c * D, dtype=z.dtype, device=z.device).view(-1, c, D)
    found = torch.autograd.grad(
        *(z, list(weights.values()), seeds),
        retain_graph=True,
        is_grads_batched=True,
        allow_unused=True,
    )
    return {
        name: at_least_float32(w.new_zeros(c, D, *w.shape) if g is None else g.unflatten(0, (c, D)))
        for (name, w), g in zip(weights.items(), found)
    }
