"""The weights in the posterior: depth, excluded modules, unsupported parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from boxcov import BoxcovError, FitOptions, fit
from boxcov.data import shapes
from boxcov.detectors.tiny import TinyCenter
from helpers.nets import NetDetector, random_item, two_convolutions


@pytest.fixture
def detector() -> NetDetector:
    return two_convolutions()


def test_depth_names_parts_or_modules() -> None:
    detector, frames = TinyCenter(), shapes.frames(count=2)
    head, neck, backbone = (
        set(fit(detector, frames, depth=depth).blocks) for depth in ("head", "neck", "backbone")
    )
    assert head < neck < backbone
    assert neck - head == {"lateral.0", "up.0"}
    assert set(fit(detector, frames, depth=["up", "head.shared"]).blocks) == {
        "up.0",
        "head.shared.0",
    }


def test_unknown_depth_and_modules_are_named() -> None:
    with pytest.raises(
        BoxcovError, match="'tail' is not a part of this detector: it has head, neck, backbone"
    ):
        fit(TinyCenter(), shapes.frames(count=1), depth="tail")
    with pytest.raises(BoxcovError, match=r"module 'head\.share'.*did you mean head"):
        fit(TinyCenter(), shapes.frames(count=1), depth=["head.share"])


def test_layers_that_read_the_same_tensor_share_one_factor() -> None:
    posterior = fit(TinyCenter(), shapes.frames(count=2))
    first = [
        posterior.blocks[f"head.branches.{name}.0"].Q
        for name in ("heatmap", "offset", "size", "rot")
    ]
    assert all(Q is first[0] for Q in first)


class Unfactored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.scale, self.norm = (
            nn.Conv2d(2, 2, 3, padding=1),
            nn.Parameter(torch.ones(2, 1, 1)),
            nn.BatchNorm2d(2),
        )
        self.act = nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(x)) * self.scale)


def test_one_error_names_all_unsupported_parameters() -> None:
    detector = NetDetector(Unfactored())
    with pytest.raises(
        BoxcovError,
        match=r"net\.scale, net\.act\.weight \(not, .*exclude=\['net\.act', 'net\.scale'\]",
    ):
        fit(detector, [random_item()])
    assert set(fit(detector, [random_item()], depth=["net.conv"]).blocks) == {"net.conv"}


class Idle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.idle = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


def test_a_layer_that_does_not_run_is_called_so() -> None:
    message = (
        r"posterior: net\.idle\.weight, net\.idle\.bias \(a layer that does not run in forward.*"
        r"exclude=\['net\.idle'\]"
    )
    with pytest.raises(BoxcovError, match=message) as error:
        fit(NetDetector(Idle()), [random_item()])
    assert "factored" not in str(error.value)


class LateLayer(NetDetector):
    """A layer that runs in loss(), not in forward()."""

    def loss(self, raw: Any, targets: Any) -> Tensor:
        return super().loss({"map": self.net.idle(raw["map"][..., None])[..., 0]}, targets)


def test_a_layer_that_runs_in_the_loss_alone_is_called_so() -> None:
    detector = LateLayer(Idle())
    with pytest.raises(BoxcovError, match=r"does not run in forward\(\).*exclude=\['net\.idle'\]"):
        fit(detector, [random_item()])
    options = FitOptions(exclude=["net.idle"])
    assert set(fit(detector, [random_item()], options=options).blocks) == {"net.conv"}


def test_excluded_modules_are_constants() -> None:
    detector = NetDetector(nn.Sequential(nn.Conv2d(2, 2, 1), nn.PReLU(), nn.Conv2d(2, 2, 1)))
    assert set(fit(detector, [random_item()], options=FitOptions(exclude=["net.1"])).blocks) == {
        "net.0",
        "net.2",
    }


class Embedding(nn.Module):
    """A weight with a second use outside its layer, as in tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x + self.conv.weight.sum())


def test_a_weight_with_a_hidden_use_is_refused() -> None:
    detector = NetDetector(Embedding())
    with pytest.raises(BoxcovError, match=r"cannot be in a posterior: net\.conv\.weight"):
        fit(detector, [random_item()])
    detector.requires_grad_(False)  # also in a frozen detector
    with pytest.raises(BoxcovError, match=r"cannot be in a posterior: net\.conv\.weight"):
        fit(detector, [random_item()])


class Weighted(NetDetector):
    """A weighted sum as loss: the gradient of a bias is the sum of the weights."""

    def loss(self, raw: dict[str, Tensor], targets: Tensor) -> Tensor:
        return (raw["map"] * targets).sum((1, 2))


@pytest.mark.parametrize("seed", range(8))
def test_cancelling_gradients_are_not_a_hidden_use(seed) -> None:
    """Two orders of summation share no digit of a sum that is zero up to rounding."""
    torch.manual_seed(seed)
    targets = torch.randn(2, 2, 25)
    targets[1] = 0.3 - targets[0].flip(1)
    targets -= targets.sum((0, 2), keepdim=True) / 50
    net = Weighted(nn.Conv2d(2, 2, 3, padding=1))
    assert fit(net, [(torch.rand(2, 2, 5, 5), targets)]).frames == 2


class TwoBiases(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)).transpose(1, 2)


def test_one_weight_with_two_biases_is_refused() -> None:
    with pytest.raises(
        BoxcovError,
        match=r"net\.a\.weight is used with the bias net\.a\.bias and with the bias net\.b\.bias",
    ):
        fit(NetDetector(TwoBiases()), [(torch.randn(1, 3, 2), torch.randn(1, 2, 3))])


def test_a_frozen_detector_gives_the_same_posterior(detector: NetDetector) -> None:
    data = random_item()
    before = fit(detector, [data])
    detector.requires_grad_(False)
    after = fit(detector, [data])
    assert all(
        torch.equal(after.blocks[name].H.values, block.H.values)
        for name, block in before.blocks.items()
    )
    assert not any(p.requires_grad for p in detector.parameters())


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        self.idle(x)
        return self.used(x)


def test_a_layer_that_the_loss_does_not_reach_is_named() -> None:
    with pytest.raises(
        BoxcovError, match=r"no gradient for net\.idle\.weight.*exclude=\['net\.idle'\]"
    ):
        fit(NetDetector(Unused()), [random_item()])
    assert set(
        fit(NetDetector(Unused()), [random_item()], options=FitOptions(exclude=["net.idle"])).blocks
    ) == {"net.used"}


def test_integer_parameters_stay_constant() -> None:
    """A quantized table, for example: torch computes no gradients with integers."""
    detector = two_convolutions()
    detector.net.register_parameter("steps", nn.Parameter(torch.arange(3), requires_grad=False))
    posterior = fit(detector, [random_item()], depth="head")
    assert set(posterior.blocks) == {"net.0", "net.2"}
