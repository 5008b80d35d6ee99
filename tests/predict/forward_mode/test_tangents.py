"""Propagated tangents against forward-mode differentiation of the whole network."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from boxcov.predict.forward_mode.directions import Directions
from boxcov.predict.forward_mode.jvp import NoRule
from boxcov.predict.forward_mode.tangents import Tangents


class Mixed(nn.Module):
    """A network with every kind of layer and operation, including some without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        )
        self.groups = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1, groups=4, bias=False),
            nn.BatchNorm2d(8),
            nn.SiLU(inplace=True),
        )
        self.depth = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=8), nn.LeakyReLU(0.1)
        )
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.side = nn.Conv2d(3, 4, 1)
        self.last = nn.Linear(8, 5)
        self.line = nn.Conv1d(5, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        y = y + self.groups(y)
        y = self.depth(y)
        y += 1
        y = torch.cat([F.gelu(self.up(y)), self.side(x), x[:, :0]], 1)
        y = F.max_pool2d(y, 2) * y.mean((2, 3), keepdim=True).sigmoid() + y.amax()
        y = self.last(y.permute(0, 2, 3, 1)).softmax(-1)
        y = torch.cat([torch.empty(0), y[..., :2], y[..., 2:]], axis=-1)
        return self.line(y.flatten(1, 2).transpose(1, 2))


def network(seed: int = 0) -> Mixed:
    torch.manual_seed(seed)
    made = Mixed().double().eval()
    for module in made.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return made


def exact(net: nn.Module, x: Tensor, etas: dict[str, Tensor]) -> Tensor:
    weights = {name: p.detach() for name, p in net.named_parameters() if name in etas}

    def run(given: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(net, given, (x,))

    return torch.vmap(lambda eta: torch.func.jvp(run, (weights,), (eta,))[1])(etas)


def carried(
    net: nn.Module, x: Tensor, etas: dict[str, Tensor]
) -> tuple[Tensor, Tensor | None, Tangents]:
    directions = Directions(etas, dict(net.named_parameters()))
    with torch.no_grad(), Tangents(directions) as tangents:
        out = net(x)
    t = tangents.of(out)
    return out, None if t is None else t * directions.scale.reshape(-1, *[1] * out.dim()), tangents


@pytest.mark.parametrize(
    "named", ["", "weight", "bias", "stem", "depth", "up", "side", "last", "line"]
)
@pytest.mark.parametrize("batch", [1, 3])
def test_tangents_of_each_layer_and_of_all_layers(named: str, batch: int) -> None:
    net, x = network(), torch.randn(batch, 3, 8, 12, dtype=torch.float64)
    names = [name for name, p in net.named_parameters() if named in name and ".1." not in name]
    etas = {
        name: 3 * torch.randn(4, *net.get_parameter(name).shape, dtype=torch.float64)
        for name in names
    }
    out, t, _ = carried(net, x, etas)
    with torch.no_grad():
        assert torch.equal(out, net(x))
        torch.testing.assert_close(t, exact(net, x, etas), rtol=1e-10, atol=1e-12)


class Conditional(nn.Module):
    """One norm for rows and for maps, and its statistics once more with a computed scale."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.norm(self.layer(x)).T.expand(2, 4, 4))
        statistics = self.norm.running_mean, self.norm.running_var
        return F.batch_norm(y, *statistics, weight=x.exp().sum(0))


def test_a_norm_may_be_called_in_several_ways() -> None:
    net = Conditional().double().eval()
    etas = {"layer.weight": torch.randn(3, 4, 4, dtype=torch.float64)}
    directions = Directions(etas, dict(net.named_parameters()))
    for x in torch.randn(2, 4, 4, dtype=torch.float64):
        with torch.no_grad(), Tangents(directions) as tangents:
            t = tangents.of(net(x))
        expected = exact(net, x, etas) / directions.scale.reshape(-1, 1, 1, 1)
        torch.testing.assert_close(t, expected)
    assert len(directions._factors) == 2


def test_tensors_independent_of_the_weights_have_no_tangent() -> None:
    net, x = network(), torch.randn(1, 3, 8, 8, dtype=torch.float64)
    etas = {"line.weight": torch.randn(2, 2, 5, 3, dtype=torch.float64)}
    with torch.no_grad(), Tangents(Directions(etas, dict(net.named_parameters()))) as tangents:
        before = net.stem(x)
    assert tangents.of(before) is None


def test_tangents_stop_at_the_end_layers() -> None:
    net, x = network(), torch.randn(1, 3, 8, 8, dtype=torch.float64)
    etas = {"stem.0.weight": torch.randn(2, *net.stem[0].weight.shape, dtype=torch.float64)}
    ends = frozenset([id(net.groups[0].weight)])
    with (
        torch.no_grad(),
        Tangents(Directions(etas, dict(net.named_parameters())), ends) as tangents,
    ):
        features = net.stem(x)
        behind = net.groups(features)
    assert tangents.of(features) is not None
    assert tangents.of(behind) is None


def test_tangents_are_freed_with_their_tensors() -> None:
    net, x = network(), torch.randn(1, 3, 8, 8, dtype=torch.float64)
    etas = {"stem.0.weight": torch.randn(2, *net.stem[0].weight.shape, dtype=torch.float64)}
    out, _, tangents = carried(net, x, etas)
    assert len(tangents._tangents) == 1
    del out
    gc.collect()
    assert len(tangents._tangents) == 0


@pytest.mark.parametrize(
    "step",
    [
        lambda x, y: y.mul_(2),
        lambda x, y: F.conv2d(x, y[:, :3, :2, :2]),
        lambda x, y: F.batch_norm(y, None, None, training=True),
        lambda x, y: torch.mul(y, 2, out=torch.empty_like(y)),
        lambda x, y: F.conv2d(y[0], torch.ones(1, 8, 1, 1, dtype=y.dtype)),
    ],
    ids=["in place", "computed weight", "norm over the batch", "out", "no batch"],
)
def test_operations_without_a_rule_are_refused(step) -> None:
    net, x = network(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    etas = {"stem.0.weight": torch.randn(2, *net.stem[0].weight.shape, dtype=torch.float64)}
    with torch.no_grad(), Tangents(Directions(etas, dict(net.named_parameters()))):
        y = net.stem[0](x)
        with pytest.raises(NoRule):
            step(x, y)


def test_directions_of_any_size() -> None:
    """The paper's posterior has directions of 1e5, which half precision cannot hold."""
    net, x = network().float(), torch.randn(1, 3, 8, 8)
    etas = {"stem.0.weight": 1e30 * torch.randn(2, *net.stem[0].weight.shape)}
    _, t, _ = carried(net, x, etas)
    assert bool(t.isfinite().all())
    torch.testing.assert_close(
        t / 1e30,
        exact(net, x, {"stem.0.weight": etas["stem.0.weight"] / 1e30}),
        rtol=1e-4,
        atol=1e-6,
    )
