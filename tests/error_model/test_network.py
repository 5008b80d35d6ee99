"""The network of the error model: members and outputs."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from boxcov.error_model.network import Network, Outputs


def random_network(width: int, members: int = 3, inputs: int = 5, outputs: int = 7) -> Network:
    generator = torch.Generator().manual_seed(1)
    network = Network.initial(members, inputs, outputs, width, generator)
    return network.with_parameters(
        [torch.randn(p.shape, generator=generator) for p in network.parameters()]
    )


@pytest.mark.parametrize("width", [0, 6])
def test_members_equal_single_networks(width: int) -> None:
    network = random_network(width)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(2))
    together = network(x)
    assert together.shape == (3, 4, 7)
    for k in range(3):
        linear, bias, *hidden = (p[k] for p in network.parameters())
        y = x @ linear + bias
        if hidden:
            w1, b1, w2, b2, w3 = hidden
            y = y + F.silu(F.silu(x @ w1 + b1) @ w2 + b2) @ w3
        torch.testing.assert_close(together[k], y, rtol=1e-4, atol=1e-4)


def test_members_may_have_inputs_of_their_own() -> None:
    network = random_network(6)
    x = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(2))
    own = network(x)
    for k in range(3):
        torch.testing.assert_close(own[k], network(x[k])[k], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [0, 6])
def test_a_new_network_is_nearly_constant(width: int) -> None:
    network = Network.initial(2, 5, 7, width, torch.Generator().manual_seed(0))
    y = network(torch.randn(50, 5, generator=torch.Generator().manual_seed(0)))
    assert float(y.abs().max()) < 0.6
    assert len(network.parameters()) == (7 if width else 2)


@pytest.mark.parametrize("has_heading", [False, True])
def test_the_outputs_share_no_column(has_heading: bool) -> None:
    outputs = Outputs(thresholds=3, fields=4, has_heading=has_heading)
    y = torch.zeros(outputs.size)
    read = []
    for column in range(outputs.size):
        other = y.clone()
        other[column] = 1.0
        changed = []
        for name in ("no_object", "iou_below", "log_scale", *(["flipped"] * has_heading)):
            method = getattr(outputs, name)
            if not torch.equal(method(y), method(other)):
                changed.append(name)
        read.append(changed)
    expected = [["no_object"], *[["iou_below"]] * 4]
    expected += [["flipped"]] * has_heading + [["log_scale"]] * 4
    assert read == expected


def test_iou_below_rises_and_the_shares_sum_to_one() -> None:
    outputs = Outputs(thresholds=9, fields=2, has_heading=False)
    y = 30 * torch.randn(5, 200, outputs.size, generator=torch.Generator().manual_seed(3))
    below = outputs.iou_below(y)
    assert below.shape == (5, 200, 9)
    assert bool((below.diff(dim=-1) >= 0).all())
    assert bool(((below >= 0) & (below <= 1)).all())
    shares = y[..., 1:11].double().softmax(-1)
    torch.testing.assert_close(below.double(), shares.cumsum(-1)[..., :9], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        (below[..., -1] + shares[..., -1].float()), torch.ones(5, 200), rtol=1e-5, atol=1e-5
    )
