"""Q over the locations that carry gradient, against brute force."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from boxcov import BoxcovError, ExactGLM, FitOptions, Posterior, fit
from boxcov._torch.layers import Geometry, LayerCall, columns, columns_at
from boxcov._torch.modules import LayerCallMode
from boxcov.data import shapes
from boxcov.detectors.tiny import TinyCenter
from boxcov.kfac.input_gram import input_gram, weighted_gram
from helpers.nets import CASES, Case, NetDetector
from oracles.dense import brute_columns, relative


def brute_pairs(
    detector: NetDetector, inputs: Tensor, targets: Tensor
) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Return ``a`` (1, G, n_in, T) and ``d`` (1, G, n_out, T) per weight, frame and layer call."""
    names = {id(p): name for name, p in detector.named_parameters()}
    found: dict[str, list] = {}
    for i in range(len(inputs)):
        seen: list = []

        def run(name: str, call: LayerCall, seen: list = seen) -> Tensor:
            out = call()
            out.retain_grad()
            seen.append((name, call, brute_columns(call), out))
            return out.clone()

        with LayerCallMode(names, run):
            raw = detector(inputs[i : i + 1])
        detector.loss(raw, targets[i : i + 1]).sum().backward()
        for name, call, a, out in seen:
            if call.bias is not None:
                a = torch.cat([a, torch.ones_like(a[:, :, :1])], 2)
            if call.geometry.kernel:
                d = out.grad.reshape(1, call.geometry.groups, -1, a.shape[3])
            else:
                d = (
                    (out.grad if out.dim() > 2 else out.grad.unsqueeze(1))
                    .transpose(1, 2)
                    .unsqueeze(1)
                )
            found.setdefault(name, []).append((a, d))
    detector.zero_grad()
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_factors_equal_brute_force_and_keep_the_trace(case: Case) -> None:
    detector = case.detector()
    inputs, targets = case.frames(detector)
    posterior = fit(
        detector,
        [(inputs[:2], targets[:2]), (inputs[2:], targets[2:])],
        options=FitOptions(locations="gradient"),
    )
    plain = fit(detector, [(inputs, targets)])
    assert posterior.locations == "gradient"
    for name, block in posterior.blocks.items():
        pairs = brute_pairs(detector, inputs, targets)[block.layer.weight]
        weighted = sum(
            torch.einsum("bgit,bgjt,bgt->gij", a, a, d.square().sum(2)) for a, d in pairs
        )
        total = sum(d.square().sum((0, 2, 3)) for _, d in pairs)
        assert relative(block.Q.matrix, weighted / total[:, None, None]) < 1e-12
        assert relative(block.H.matrix, plain.blocks[name].H.matrix) < 1e-12
        traces = block.Q.values.sum(1) * block.H.values.sum(1)
        exact = sum((a.square().sum(2) * d.square().sum(2)).sum((0, 2)) for a, d in pairs) / len(
            inputs
        )
        assert relative(traces, exact) < 1e-12


class Marked(NetDetector):
    """A gradient of equal norm at the locations marked by the targets, and zero elsewhere."""

    def loss(self, raw: dict[str, Tensor], targets: Tensor) -> Tensor:
        return (raw["map"] * targets).sum((1, 2))


def test_marked_locations_are_averaged_plainly() -> None:
    torch.manual_seed(0)
    detector = Marked(nn.Conv2d(2, 3, 3, padding=1)).double()
    x = torch.randn(4, 2, 6, 7, dtype=torch.float64)
    marks = (torch.rand(4, 1, 42) < 0.2).double()
    posterior = fit(
        detector, [(x, marks.expand(4, 3, 42))], options=FitOptions(locations="gradient")
    )
    # (n, 18)
    a = columns(x, Geometry((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1)))[:, 0].transpose(1, 2)[
        marks[:, 0] == 1
    ]
    a = torch.cat([a, torch.ones_like(a[:, :1])], 1)
    assert 0 < len(a) < 4 * 42
    assert relative(posterior.blocks["net"].Q.matrix[0], a.T @ a / len(a)) < 1e-12


def test_a_uniform_gradient_gives_the_plain_factor() -> None:
    torch.manual_seed(0)
    detector = Marked(nn.Conv2d(2, 3, 3, padding=1)).double()
    item = torch.randn(4, 2, 6, 7, dtype=torch.float64), torch.ones(4, 3, 42, dtype=torch.float64)
    plain, weighted = (
        fit(detector, [item]),
        fit(detector, [item], options=FitOptions(locations="gradient")),
    )
    assert relative(weighted.blocks["net"].Q.matrix, plain.blocks["net"].Q.matrix) < 1e-12


def test_a_group_without_gradient_is_left_to_the_prior() -> None:
    detector = Marked(nn.Conv2d(4, 2, 1, groups=2)).double()
    targets = torch.tensor([1.0, 0.0], dtype=torch.float64).view(1, 2, 1).expand(3, 2, 9)
    posterior = fit(
        detector,
        [(torch.randn(3, 4, 3, 3, dtype=torch.float64), targets)],
        options=FitOptions(locations="gradient"),
        prior_precision=4.0,
    )
    assert bool(
        (posterior.blocks["net"].Q.values[0].sum() > 0)
        & (posterior.blocks["net"].Q.values[1] == 0).all()
    )
    assert torch.allclose(posterior.variances("net")[1], torch.tensor(0.25, dtype=torch.float64))


def test_layers_that_read_the_same_tensor_have_their_own_factor(tmp_path) -> None:
    detector, frames = TinyCenter(threshold=0.05, most=20), shapes.frames(count=6)
    posterior = fit(detector, frames, options=FitOptions(locations="gradient"))
    first = [
        posterior.blocks[f"head.branches.{name}.0"].Q
        for name in ("heatmap", "offset", "size", "rot")
    ]
    assert len({id(Q) for Q in first}) == 4
    assert relative(first[1].matrix, first[0].matrix) > 1e-3
    posterior.save(tmp_path / "p")
    again = Posterior.load(tmp_path / "p", detector)
    assert again.locations == "gradient"
    for name, block in posterior.blocks.items():
        assert torch.equal(again.blocks[name].Q.vectors, block.Q.vectors)
    model = ExactGLM(detector, again)
    inputs = frames[0][0]
    first_time = model(inputs).covariance
    assert model.router.route.head == "stages"  # although the branches share no factor
    part = model.router._head_by_instance(model.linearized.at(inputs))
    assert relative(first_time, part.covariance) < 1e-5


def test_unfolding_some_locations_alone() -> None:
    x = torch.randn(3, 4, 5, 6, dtype=torch.float64)
    for geometry in (
        Geometry((3, 2), (2, 1), ((1, 1), (0, 1)), (1, 2), groups=2),
        Geometry((3, 3), (2, 2), ((1, 2), (1, 2)), (1, 1), groups=2, transposed=True),
    ):
        whole = columns(x, geometry)
        item, location = torch.tensor([2, 0, 2]), torch.tensor([0, whole.shape[3] - 1, 5])
        assert torch.equal(columns_at(x, geometry, item, location), whole[item, :, :, location])


@pytest.mark.parametrize("has_bias", [False, True])
def test_weighted_gram_edges(monkeypatch, has_bias: bool) -> None:
    geometry = Geometry((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1))
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    assert not bool(
        weighted_gram(x, torch.zeros(2, 1, 16, dtype=torch.float64), geometry, has_bias).any()
    )
    assert weighted_gram(
        x[:0], torch.zeros(0, 1, 16, dtype=torch.float64), geometry, has_bias
    ).shape == (1, 27 + has_bias, 27 + has_bias)
    monkeypatch.setattr("boxcov.kfac.input_gram._MAX_BYTES", 5 * 27 * 8)  # five locations at a time
    ones = torch.ones(2, 1, 16, dtype=torch.float64)
    assert (
        relative(
            weighted_gram(x, 3 * ones, geometry, has_bias), 3 * input_gram(x, geometry, has_bias)
        )
        < 1e-12
    )


def test_unknown_locations() -> None:
    with pytest.raises(BoxcovError, match="locations must be one of all, gradient, got 'some'"):
        fit(TinyCenter(), shapes.frames(count=1), options=FitOptions(locations="some"))
