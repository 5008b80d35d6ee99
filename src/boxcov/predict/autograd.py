"""Engine: covariances for any detector, one backward pass per number, batched."""

from __future__ import annotations

import torch
from torch import Tensor

from boxcov._torch.precision import at_least_float32
from boxcov.posterior.posterior import Posterior
from boxcov.predict.covariance import MEMORY
from boxcov.predict.linearize import LinearizationPoint


def autograd_covariance(point: LinearizationPoint, posterior: Posterior) -> tuple[Tensor, Tensor]:
    """``J Sigma J^T`` of the boxes (m, D, D), and the last row of that of z.

    The row is (m, D), with logits (m, D + 1). As many boxes at a time as memory allows.
    """
    with torch.enable_grad():
        theta = point.linearized.theta()
        weights = {name: theta[name].requires_grad_() for name in posterior.parameters}
        z = point.z_at(weights)
        m, D = point.boxes.shape
        size = sum(w.numel() * w.element_size() for w in weights.values())
        step = max(1, int(MEMORY // (size * D)))
        covariances, last_rows = [], []
        for start in range(0, m, step):
            stop = min(start + step, m)
            gradients = _gradients(z[:, :D], start, stop, weights)
            covariances.append(posterior.quadratic(gradients))
            if z.shape[1] == D:
                last_rows.append(covariances[-1][:, -1])
                continue
            of_logit = _gradients(z[:, D:], start, stop, weights)
            joint = {name: torch.cat([g, of_logit[name]], 1) for name, g in gradients.items()}
            last_rows.append(posterior.quadratic(joint)[:, -1])
    return torch.cat(covariances), torch.cat(last_rows)


def _gradients(z: Tensor, start: int, stop: int, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients (c, D, *shape) of the numbers of boxes ``start`` to ``stop``."""
    m, D = z.shape
    seeds = z.new_zeros(stop - start, D, m, D)
    boxes, fields = torch.arange(stop - start, device=z.device), torch.arange(D, device=z.device)
    seeds[boxes[:, None], fields, boxes[:, None] + start, fields] = 1
    gradients = torch.autograd.grad(
        *(z, list(weights.values()), seeds.flatten(0, 1)),
        retain_graph=True,
        is_grads_batched=True,
        allow_unused=True,
    )
    return {
        name: at_least_float32(
            w.new_zeros(stop - start, D, *w.shape) if g is None else g.unflatten(0, (-1, D))
        )
        for (name, w), g in zip(weights.items(), gradients)
    }
