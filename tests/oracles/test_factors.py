"""The Kronecker factors against brute force, the exact Fisher, and curvlinops."""

from __future__ import annotations

import importlib
import os

import pytest
import torch
from torch import Tensor, nn

from boxcov import fit
from boxcov._torch.layers import LayerCall
from boxcov._torch.modules import LayerCallMode
from helpers.nets import CASES, Case, NetDetector
from oracles.dense import brute_columns, flat, frame_gradients, relative


def brute_factors(
    detector: NetDetector, inputs: Tensor, targets: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """Q and H by weight name, frame by frame, gradients by retain_grad."""
    names = {id(p): name for name, p in detector.named_parameters()}
    sums: dict[str, list] = {}
    for i in range(len(inputs)):
        seen = []

        def run(name: str, call: LayerCall, seen: list = seen) -> Tensor:
            out = call()
            out.retain_grad()
            seen.append((name, call, brute_columns(call), out))
            return out.clone()  # so that nothing works on it in place

        with LayerCallMode(names, run):
            raw = detector(inputs[i : i + 1])
        detector.loss(raw, targets[i : i + 1]).sum().backward()
        for name, call, a, out in seen:
            d = (
                out.grad.reshape(a.shape[0], call.geometry.groups, -1, a.shape[3])
                if call.geometry.kernel
                else None
            )
            if d is None:
                d = (
                    (out.grad if out.dim() > 2 else out.grad.unsqueeze(1))
                    .transpose(1, 2)
                    .unsqueeze(1)
                )
            if call.bias is not None:
                a = torch.cat([a, torch.ones_like(a[:, :, :1])], 2)
            entry = sums.setdefault(name, [0, 0, 0])
            entry[0] = entry[0] + torch.einsum("bgit,bgjt->gij", a, a)
            entry[1] = entry[1] + torch.einsum("bgit,bgjt->gij", d, d)
            entry[2] += a.shape[0] * a.shape[3]
    detector.zero_grad()
    return {name: (Q / count, H / len(inputs)) for name, (Q, H, count) in sums.items()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_factors_equal_brute_force(case: Case) -> None:
    detector = case.detector()
    inputs, targets = case.frames(detector)
    posterior = fit(detector, [(inputs, targets)])
    expected = brute_factors(detector, inputs, targets)
    assert {block.layer.weight for block in posterior.blocks.values()} == set(expected)
    for block in posterior.blocks.values():
        Q, H = expected[block.layer.weight]
        assert relative(block.Q.matrix, Q) < 1e-12
        assert relative(block.H.matrix, H) < 1e-12


@pytest.mark.parametrize("sizes", [[1] * 6, [2, 4], [5, 1], [6]], ids=str)
@pytest.mark.parametrize("case", [CASES[0], CASES[4], CASES[12]], ids=lambda case: case.name)
def test_scaling_does_not_depend_on_the_batches(case: Case, sizes: list[int]) -> None:
    detector = case.detector()
    inputs, targets = case.frames(detector, count=6)
    whole = fit(detector, [(inputs, targets)])
    split = fit(detector, list(zip(inputs.split(sizes), targets.split(sizes))))
    assert split.n_data == whole.n_data == 6
    assert split.loss == pytest.approx(whole.loss)
    for name, block in whole.blocks.items():
        assert relative(split.blocks[name].Q.matrix, block.Q.matrix) < 1e-12
        assert relative(split.blocks[name].H.matrix, block.H.matrix) < 1e-12


def test_repeating_the_data_changes_n_alone() -> None:
    detector = CASES[4].detector()
    item = CASES[4].frames(detector)
    once, thrice = fit(detector, [item]), fit(detector, [item] * 3)
    assert thrice.n_data == 3 * once.n_data
    for name, block in once.blocks.items():
        assert relative(thrice.blocks[name].H.matrix, block.H.matrix) < 1e-12


class Regression(NetDetector):
    """Half the squared error, so that the gradient at the output is the residual."""

    def loss(self, raw: dict[str, Tensor], targets: Tensor) -> Tensor:
        return 0.5 * (raw["map"] - targets).square().flatten(1).sum(1)


def exact_fisher(detector: NetDetector, inputs: Tensor, targets: Tensor, block) -> Tensor:
    g = flat(block, frame_gradients(detector, inputs, targets))  # (B, w)
    return g.T @ g / len(g)


def kfac(block) -> Tensor:
    return torch.block_diag(*(torch.kron(H, Q) for Q, H in zip(block.Q.matrix, block.H.matrix)))


def test_kfac_is_the_exact_fisher_of_a_deep_linear_net() -> None:
    """One location and gradients independent of the inputs, so that KFAC is exact."""
    torch.manual_seed(0)
    detector = Regression(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(3, 3))).double()
    x = torch.randn(7, 4, dtype=torch.float64).repeat_interleave(3, 0)
    with torch.no_grad():
        y = detector(x)["map"]
    residual = 3**0.5 * torch.eye(3, dtype=torch.float64).repeat(7, 1).unsqueeze(2)
    posterior = fit(detector, [(x, y - residual)])
    for block in posterior.blocks.values():
        assert relative(kfac(block), exact_fisher(detector, x, y - residual, block)) < 1e-12


def test_kfac_is_the_exact_fisher_of_one_frame_and_one_location() -> None:
    torch.manual_seed(0)
    detector = NetDetector(
        nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Conv2d(3, 2, 1))
    ).double()
    x, y = torch.randn(1, 2, 3, 3, dtype=torch.float64), torch.randn(1, 2, 1, dtype=torch.float64)
    posterior = fit(detector, [(x, y)])
    for block in posterior.blocks.values():
        assert relative(kfac(block), exact_fisher(detector, x, y, block)) < 1e-12


@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_kfac_equals_curvlinops_on_mse(kind: str) -> None:
    # where the package is promised, its absence is a failure, not a reason to look away
    curvlinops = (
        importlib.import_module("curvlinops")
        if os.environ.get("CI")
        else pytest.importorskip("curvlinops")
    )
    torch.manual_seed(0)
    layers = {
        "linear": [nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)],
        "convolution": [
            nn.Conv2d(2, 3, 3, padding=1),
            nn.Tanh(),
            nn.Conv2d(3, 4, 3, stride=2, bias=False),
            nn.Flatten(),
            nn.Linear(16, 3),
        ],
    }[kind]
    net = nn.Sequential(*layers).double()

    class Flat(NetDetector):
        def loss(self, raw: dict[str, Tensor], targets: Tensor) -> Tensor:
            return (raw["map"].squeeze(2) - targets).square().sum(1)

    x = torch.randn(6, *((4,) if kind == "linear" else (2, 6, 6)), dtype=torch.float64)
    y = torch.randn(6, 3, dtype=torch.float64)
    posterior = fit(Flat(net), [(x[:4], y[:4]), (x[4:], y[4:])])
    operator = curvlinops.KFACLinearOperator(
        net,
        nn.MSELoss(reduction="sum"),
        list(net.parameters()),
        [(x[:4], y[:4]), (x[4:], y[4:])],
        fisher_type="empirical",
        separate_weight_and_bias=False,
        check_deterministic=False,
    )
    dense = torch.as_tensor(operator @ torch.eye(operator.shape[1], dtype=torch.float64))
    # curvlinops orders by parameter, boxcov by weight matrix with the bias as last column
    start = 0
    for block in posterior.blocks.values():
        layer = block.layer
        rows, columns = layer.n_out, layer.n_in - (layer.bias is not None)
        order = [[start + o * columns + i for i in range(columns)] for o in range(rows)]
        start += rows * columns
        if layer.bias is not None:
            order = [[*line, start + o] for o, line in enumerate(order)]
            start += rows
        index = torch.tensor(order).flatten()
        theirs = dense[index][:, index]
        assert relative(posterior.n_data * kfac(block), theirs) < 1e-6
    assert start == len(dense)
