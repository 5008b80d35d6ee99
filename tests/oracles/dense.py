"""Exact answers by brute force: dense matrices in float64, one layer at a time."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from boxcov import Detector, Posterior
from boxcov._torch.layers import LayerCall, to_matrix
from boxcov.posterior.kronecker_block import KroneckerBlock


def flat(block: KroneckerBlock, gradients: dict[str, Tensor]) -> Tensor:
    """Gradients (..., *shape) by parameter as rows (..., w) in the order of the weight matrix."""
    layer = block.layer
    bias = None if layer.bias is None else gradients[layer.bias]
    return to_matrix(gradients[layer.weight], bias, layer.geometry).flatten(-3)


def _gradients(numbers: Tensor, detector: Detector) -> dict[str, Tensor]:
    """Gradients (n, *shape) of n numbers, one backward pass each.

    torch.func.functional_call is not used: it unties a module that has two names.
    """
    named = dict(detector.named_parameters())
    rows = [
        torch.autograd.grad(number, list(named.values()), retain_graph=True, allow_unused=True)
        for number in numbers
    ]
    return {
        name: torch.stack([torch.zeros_like(p) if row[i] is None else row[i] for row in rows])
        for i, (name, p) in enumerate(named.items())
    }


def box_jacobian(detector: Detector, inputs: Any) -> dict[str, Tensor]:
    """The Jacobian (m, D, *shape) of the boxes for every parameter, the selection frozen."""
    raw = detector(inputs)
    boxes = detector.decode(raw, detector.select(raw))
    return {
        name: g.unflatten(0, boxes.shape)
        for name, g in _gradients(boxes.flatten(), detector).items()
    }


def frame_gradients(detector: Detector, inputs: Tensor, targets: Any) -> dict[str, Tensor]:
    """The gradient (B, *shape) of every frame's own loss, one frame at a time."""
    losses = [
        detector.loss(detector(inputs[i : i + 1]), targets[i : i + 1])[0]
        for i in range(len(inputs))
    ]
    return _gradients(torch.stack(losses), detector)


def brute_columns(call: LayerCall) -> Tensor:
    """``a`` at every location (B, G, n_in, T): the layer's output for one-hot weights."""
    groups, n_out = (
        call.geometry.groups,
        call.weight.shape[1]
        if call.geometry.transposed
        else call.weight.shape[0] // call.geometry.groups,
    )
    x = call.x.detach()
    if not call.geometry.kernel:
        return (x if x.dim() > 2 else x.unsqueeze(1)).transpose(1, 2).unsqueeze(1)
    inputs = call.weight.shape[0] // groups if call.geometry.transposed else call.weight.shape[1]
    entries = []
    for channel in range(inputs):
        for tap in range(call.geometry.taps):
            one = torch.zeros_like(call.weight).reshape(*call.weight.shape[:2], -1)
            for g in range(groups):
                if call.geometry.transposed:
                    one[g * inputs + channel, :, tap] = 1
                else:
                    one[g * n_out : (g + 1) * n_out, channel, tap] = 1
            out = call.func(x, one.reshape(call.weight.shape), None, **call.rest).flatten(2)
            entries.append(
                out.reshape(len(x), groups, n_out, -1)[:, :, 0]
            )  # every output of a group is the same
    return torch.stack(entries, 2)


def dense_covariance(posterior: Posterior, name: str) -> Tensor:
    """Sigma of one layer (w, w), inverted as a whole."""
    block = posterior.blocks[name]
    groups = []
    for Q, H in zip(block.Q.matrix, block.H.matrix):
        if posterior.form == "paper":
            Q, H = (
                M + posterior.jitter * M.diagonal().mean() * torch.eye(len(M), dtype=M.dtype)
                for M in (Q, H)
            )
            groups.append(torch.linalg.inv(torch.kron(H, Q)))
        else:
            F = torch.kron(H, Q)
            groups.append(
                torch.linalg.inv(
                    posterior.n_data * F + posterior.tau(name) * torch.eye(len(F), dtype=F.dtype)
                )
            )
    return torch.block_diag(*groups)


def eigenbasis_covariance(posterior: Posterior, name: str) -> Tensor:
    """Sigma of one layer (w, w), from its variances in the eigenbasis."""
    block = posterior.blocks[name]
    bases = map(torch.kron, block.H.vectors, block.Q.vectors)
    groups = [(B * v.flatten()) @ B.T for B, v in zip(bases, posterior.variances(name))]
    return torch.block_diag(*groups)


def log_evidence(posterior: Posterior) -> float:
    """The log marginal likelihood of a posterior, up to what its prior does not change.

    With w weights theta and the eigenvalues f_i of the Fisher of a layer, it is the sum over layers
    of ``(w log tau - tau |theta|^2 - sum_i log(n f_i + tau)) / 2``.
    """
    total = 0.0
    for name, block in posterior.blocks.items():
        tau = posterior.tau(name)
        logs = (posterior.n_data * block.curvature.double() + tau).log().sum()
        total += (block.size * math.log(tau) - tau * block.square_norm - float(logs)) / 2
    return total


def box_covariance(detector: Detector, posterior: Posterior, inputs: Any) -> Tensor:
    """``J Sigma J^T`` (m, D, D) from dense matrices."""
    return transform_covariance(box_jacobian(detector, inputs), posterior)


def transform_covariance(J: dict[str, Tensor], posterior: Posterior) -> Tensor:
    """``J Sigma J^T`` (m, D, D) for the Jacobian of ``box_jacobian``."""
    parts = []
    for name, block in posterior.blocks.items():
        rows = flat(block, J)  # (m, D, w)
        parts.append(rows @ dense_covariance(posterior, name) @ rows.transpose(1, 2))
    return torch.stack(parts).sum(0)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=1e-300))
