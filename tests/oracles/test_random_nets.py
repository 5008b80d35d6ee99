"""Factors and covariances of random detectors against what hooks and dense products give."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from boxcov import GLM, MCGLM, ExactGLM, fit
from helpers.random_nets import Levels
from oracles.dense import box_covariance, box_jacobian, flat, relative


@pytest.mark.parametrize("seed", range(12))
def test_random_nets(seed: int) -> None:
    detector = Levels(seed).double().eval()
    before = {name: value.clone() for name, value in detector.state_dict().items()}
    generator = torch.Generator().manual_seed(seed)
    sizes = [(5, 6), (5, 6), detector.random.choice([(5, 6), (7, 5)])]
    shapes = [(1, 2, *size) for size in sizes]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    targets = torch.randn(3, 1, generator=generator, dtype=torch.float64)
    first = torch.cat(inputs[:2])
    items = [(first, targets[:2].flatten()), (inputs[2], targets[2])]
    depth = detector.random.choice(["head", "backbone"])
    posterior = fit(detector, items, depth=depth, n_data=40, prior_precision=0.7)

    for name, (Q, H) in factors(detector, list(zip(inputs, targets))).items():
        if name in posterior.blocks:
            block = posterior.blocks[name]
            assert relative(block.Q.matrix, Q) < 1e-9, name
            assert relative(block.H.matrix, H) < 1e-9, name
    expected = box_covariance(detector, posterior, first)
    for model in (ExactGLM(detector, posterior), GLM(detector, posterior)):
        for _ in range(2):  # also by the route that the first frame chose
            found = model(first)
            assert torch.equal(found.boxes, detector.detect(first).boxes)
            assert relative(found.covariance, expected) < 1e-8, type(model)
    sampled = MCGLM(detector, posterior, samples=4, seed=seed)
    u = torch.zeros(*found.boxes.shape, 4, dtype=torch.float64)
    J = box_jacobian(detector, first)
    for block in posterior.blocks.values():
        eta = flat(block, {name: value.double() for name, value in sampled.etas.items()})  # (4, w)
        u += flat(block, J) @ eta.T
    u -= u.mean(2, keepdim=True)
    assert relative(sampled(first).covariance, u @ u.transpose(1, 2) / 3) < 1e-8
    assert all(torch.equal(before[name], now) for name, now in detector.state_dict().items())


def factors(detector: Levels, frames: list[Any]) -> dict[str, tuple[Tensor, Tensor]]:
    """Q and H by hooks, one frame at a time."""
    kinds = nn.Linear, nn.Conv2d, nn.ConvTranspose2d
    layers = {m: name for name, m in detector.named_modules() if isinstance(m, kinds)}
    calls: list[tuple[nn.Module, Tensor, Tensor]] = []
    sums: dict[str, list[Any]] = defaultdict(lambda: [0, 0, 0])

    def record(module: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> Tensor:
        calls.append((module, given[0].detach().clone(), out * 1))
        return calls[-1][2].clone()  # what follows may change it in place

    hooks = [module.register_forward_hook(record) for module in layers]
    for inputs, target in frames:
        calls.clear()
        loss = detector.loss(detector(inputs), target).sum()
        ends = torch.autograd.grad(loss, [out for *_, out in calls])
        for (module, x, _), d in zip(calls, ends):
            a, groups = inputs_of(module, x), getattr(module, "groups", 1)
            if module.bias is not None:
                a = torch.cat([a, torch.ones_like(a[:, :1])], 1)
            d = d.flatten(0, -2).T if isinstance(module, nn.Linear) else d[0].flatten(1)
            d = d.unflatten(0, (groups, -1))  # (G, n_out, T)
            terms = a @ a.transpose(1, 2), d @ d.transpose(1, 2), a.shape[2]
            sums[layers[module]] = [s + t for s, t in zip(sums[layers[module]], terms)]
    for hook in hooks:
        hook.remove()
    return {name: (Q / count, H / len(frames)) for name, (Q, H, count) in sums.items()}


def inputs_of(module: Any, x: Tensor) -> Tensor:
    """The inputs (G, n_in, T) of one frame: outputs for weights that are one-hot."""
    if isinstance(module, nn.Linear):
        return x.flatten(0, -2).T[None]
    weight, groups = module.weight.detach(), module.groups
    is_transposed = isinstance(module, nn.ConvTranspose2d)
    n_in = weight.shape[0] // groups if is_transposed else weight.shape[1]
    no_bias = {} if module.bias is None else {"bias": torch.zeros_like(module.bias)}
    columns = []
    for channel in range(n_in):
        for tap in range(weight[0, 0].numel()):
            one = torch.zeros_like(weight).flatten(2)
            if is_transposed:
                one[channel::n_in, :, tap] = 1
            else:
                one[:, channel, tap] = 1
            out = functional_call(module, {"weight": one.reshape(weight.shape), **no_bias}, x)
            columns.append(out[0].flatten(1).unflatten(0, (groups, -1))[:, 0])
    return torch.stack(columns, 1)
