"""Tangents in float16 against those in the dtype of the network, within rounding to 10 bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from boxcov.predict.forward_mode.directions import Directions
from boxcov.predict.forward_mode.storage import Tangent, empty_tangents
from boxcov.predict.forward_mode.sum_kernel import Layout
from boxcov.predict.forward_mode.tangents import Tangents

ROUNDING = 4e-3  # of a network with about ten layers: each rounds by 2^-11, a few times


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.second(self.norm(self.first(x)).relu_()))


class Neck(nn.Module):
    """Maps of two sizes, one of which may have no tangents, as one map."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.same = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Conv2d(3, 4, 1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        small = F.max_pool2d(x, 2)[:, :3]
        return torch.cat(
            [self.norm(self.up(x)), self.same(F.interpolate(small, scale_factor=4))], 1
        )


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(F.gelu(self.first(x.flatten(2).transpose(1, 2))))
        return y.softmax(-1) + y.mean(1, keepdim=True)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x + x, x], 1)[:, :8]


BODIES: dict[str, Callable[[], nn.Module]] = {
    "convolution": lambda: nn.Conv2d(8, 8, 3, padding=1),
    "in groups": lambda: nn.Conv2d(8, 8, 3, padding=1, groups=4, bias=False),
    "transposed": lambda: nn.ConvTranspose2d(8, 4, 3, stride=2),
    "one dimension": lambda: nn.Sequential(nn.Flatten(2), nn.Conv1d(8, 4, 3)),
    "linear": Rows,
    "activations": lambda: nn.Sequential(
        nn.Conv2d(8, 8, 1), nn.SiLU(), nn.Conv2d(8, 8, 3), nn.LeakyReLU(0.1), nn.Conv2d(8, 8, 1)
    ),
    "residual": lambda: nn.Sequential(Residual(), Residual()),
    "concatenation": Neck,
}


def network(body: str, gain: float = 1.0) -> nn.Sequential:
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    net = nn.Sequential(stem, BODIES[body]()).eval()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
        elif hasattr(module, "weight"):
            module.weight.data.mul_(gain)
    return net


def directions_of(net: nn.Module, named: str = "", size: float = 1.0) -> dict[str, Tensor]:
    norms = {n for n, m in net.named_modules() if isinstance(m, nn.BatchNorm2d)}
    return {
        name: size * torch.randn(4, *p.shape)
        for name, p in net.named_parameters()
        if name.startswith(named) and name.rpartition(".")[0] not in norms
    }


def propagated(net: nn.Module, x: Tensor, directions: Directions) -> tuple[Tensor, Tensor]:
    with torch.no_grad(), Tangents(directions) as tangents:
        out = net(x)
    t = tangents.of(out)
    assert t is not None
    assert t.dtype == out.dtype
    return out, t


def both(
    net: nn.Module, etas: dict[str, Tensor], frames: list[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Tangents in float16 and in float64."""
    half = Directions(etas, dict(net.named_parameters()), in_half=True)
    found = [propagated(net, x, half) for x in frames]
    for (out, _), x in zip(found, frames):
        with torch.no_grad():
            assert torch.equal(out, net(x))
    net.double()
    exact = Directions(etas, dict(net.named_parameters()))
    return [(t, propagated(net, x.double(), exact)[1]) for (_, t), x in zip(found, frames)]


def error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("named", ["", "0", "1"], ids=["all", "stem", "body"])
def test_agrees_within_rounding(body: str, named: str) -> None:
    net = network(body)
    frames = [torch.randn(2, 3, 8, 12) for _ in range(2)]  # the first one is measured
    for found, exact in both(net, directions_of(net, named), frames):
        assert error(found, exact) < ROUNDING


@pytest.mark.parametrize("gain", [1e-6, 1e6])
@pytest.mark.parametrize("size", [1e-20, 1e20])
@pytest.mark.parametrize("body", ["activations", "residual", "concatenation"])
def test_scales_hold_any_range(body: str, gain: float, size: float) -> None:
    """Gains of 1e6 in each layer: no float16 holds the tangents without a scale."""
    net = network(body, gain)
    for found, exact in both(net, directions_of(net, "", size), [torch.randn(1, 3, 8, 8)]):
        assert error(found, exact) < ROUNDING


def test_products_are_in_float16() -> None:
    net, x = network("residual"), torch.randn(1, 3, 8, 8)
    half = Directions(directions_of(net), dict(net.named_parameters()), in_half=True)
    with torch.no_grad(), Tangents(half) as tangents:
        out = net(x)
        assert tangents._tangents[out].t.dtype == torch.float16
        stored = tangents.stored(net[0][0](x))
    assert stored is not None
    assert stored.t.dtype == torch.float16
    assert stored.scale is not None
    assert 32 <= float(stored.t.abs().max()) <= 64


def test_larger_frames_keep_their_digits() -> None:
    net, x = network("residual"), torch.randn(1, 3, 8, 8)
    for found, exact in both(net, directions_of(net), [x, 100 * x, x / 100]):
        assert error(found, exact) < ROUNDING


@pytest.mark.parametrize("body", ["convolution", "linear", "residual", "concatenation"])
def test_an_overflow_is_not_finite(body: str) -> None:
    net, x = network(body), torch.randn(1, 3, 8, 8)
    half = Directions(directions_of(net), dict(net.named_parameters()), in_half=True)
    assert bool(propagated(net, x, half)[1].isfinite().all())
    assert not bool(propagated(net, 1e6 * x, half)[1].isfinite().all())


def test_a_frame_of_zeros_is_no_measure() -> None:
    net, x = network("convolution"), torch.randn(1, 3, 8, 8)
    net[0][0].weight.data.zero_()
    etas = directions_of(net, "1.weight")
    half = Directions(etas, dict(net.named_parameters()), in_half=True)
    assert bool(propagated(net, 0 * x, half)[1].isfinite().all())
    assert bool(propagated(net, x, half)[1].isfinite().all())


@pytest.mark.parametrize("size", [1e-9, 1e9])
@pytest.mark.parametrize("body", ["in groups", "plain", "sum"])
def test_tangents_of_any_size_follow_zeros(body: str, size: float) -> None:
    """A first frame of zeros has no scale: with that of ones, 1e-9 would become zero."""
    torch.manual_seed(0)
    bodies = {"plain": nn.Identity, "sum": Doubled, "in groups": BODIES["in groups"]}
    net = nn.Sequential(nn.Conv2d(3, 8, 1, bias=False), nn.ReLU(), bodies[body]())
    net.append(nn.Conv2d(8, 4, 3, bias=False)).eval()
    frames = [torch.zeros(1, 3, 6, 6), size * torch.randn(1, 3, 6, 6)]
    (_, _), (found, exact) = both(net, directions_of(net), frames)
    assert error(found, exact) < ROUNDING


def test_half_networks_keep_their_tangents() -> None:
    net, x = network("residual").half(), torch.randn(1, 3, 8, 8).half()
    etas = directions_of(net)
    weights = dict(net.named_parameters())
    found = [propagated(net, x, Directions(etas, weights, in_half=flag))[1] for flag in (0, 1)]
    assert torch.equal(*found)


# the layouts that the kernel reads


def test_layouts_of_maps() -> None:
    shape = torch.Size((3, 2, 8, 4, 5))  # (k, B, C, H, W)
    maps = torch.randn(2, 3 * 8, 4, 5).contiguous(memory_format=torch.channels_last)
    own = maps.unflatten(1, (3, 8)).movedim(1, 0)
    assert own.shape == shape
    layout = Layout.of(own, 2)
    assert layout is not None
    assert (layout.direction, layout.pixel) == (8, 24)
    out = empty_tangents(shape, own, torch.float16)
    assert out.flatten(0, 1).is_contiguous(memory_format=torch.channels_last)
    layout = Layout.of(out, 2)
    assert layout is not None
    assert (layout.direction, layout.pixel) == (2 * 8 * 4 * 5, 8)
    wide = empty_tangents(torch.Size((3, 2, 16, 4, 5)), own, torch.float16).narrow(2, 8, 8)
    layout = Layout.of(wide, 2)
    assert layout is not None
    assert (layout.direction, layout.pixel) == (2 * 16 * 4 * 5, 16)


@pytest.mark.parametrize(
    "x",
    [torch.ones(3, 2, 8, 4, 5), torch.ones(3, 1, 4, 5, 8).expand(3, 2, 4, 5, 8).movedim(4, 2)],
    ids=["channels first", "broadcast over the batch"],
)
def test_other_layouts_are_left_to_torch(x: Tensor) -> None:
    assert Layout.of(x, 2) is None


@pytest.mark.parametrize("factor", [(8, 1, 1), (2, 8, 4, 5)])
def test_factors_have_layouts(factor: tuple[int, ...]) -> None:
    given = torch.ones(factor)
    if given.dim() == 4:
        given = given.contiguous(memory_format=torch.channels_last)
    layout = Layout.of(given.expand(2, 8, 4, 5).unsqueeze(0), 2)
    assert layout is not None
    assert layout.pixel == (0 if len(factor) == 3 else 8)


def test_a_tangent_at_its_scale_is_not_copied() -> None:
    t = torch.ones(2, 3).half()
    assert Tangent(t, scale=4.0).half(4.0) is t
    assert Tangent(t, scale=4.0).half(8.0).tolist() == [[0.5] * 3] * 2
