"""The pretend GPU raises what CUDA would, and its graphs and streams behave as CUDA's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from helpers.pretend_gpu import pretend_gpu


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    with pretend_gpu():
        yield


def made_on_gpu() -> Tensor:
    return torch.ones(3, device="cuda")


def test_tensors_and_modules_move_and_copies_stay() -> None:
    layer = nn.Linear(3, 2).to("cuda:1")
    assert layer.weight.is_cuda
    assert deepcopy(layer).bias.device == torch.device("cuda:1")
    x = torch.ones(3, device="cuda:1", requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert x.grad.device == torch.device("cuda:1")
    assert (x + 1)[0].cpu().device == torch.device("cpu")
    assert torch.zeros_like(x).device == x.device != torch.ones(1).device
    x.detach().cpu().numpy()
    with pytest.raises(TypeError, match="can't convert"):
        x.detach().numpy()


def test_functional_derivatives() -> None:
    def slope(direction: Tensor) -> Tensor:
        x = made_on_gpu()
        added: Tensor = torch.func.jvp(
            lambda x: x * x + torch.ones(3, device=x.device), (x,), (direction,)
        )[1]
        return added

    found = torch.vmap(slope)(torch.eye(3, device="cuda"))
    assert found.is_cuda
    assert torch.equal(found.cpu(), 2 * torch.eye(3))


MIXTURES: list[Callable[[Tensor], object]] = [
    lambda x: x + torch.ones(3),
    lambda x: torch.stack([x[0], torch.tensor(1.0)]),
    lambda x: torch.ones(3)[x.long()],
    lambda x: x + x.to("cuda:1"),
    lambda x: torch.rand(3, device="cuda", generator=torch.Generator()),
    lambda x: torch.ones(1, device="cuda:2"),
]


@pytest.mark.parametrize("mix", MIXTURES)
def test_devices_do_not_mix(mix: Callable[[Tensor], object]) -> None:
    with pytest.raises(RuntimeError, match=r"device|generator"):
        mix(made_on_gpu())


def test_what_cuda_allows_to_mix() -> None:
    x = made_on_gpu()
    assert (x * torch.tensor(2.0)).is_cuda
    assert x[torch.tensor([0, 1])].is_cuda
    assert torch.zeros(3).copy_(x).device == torch.device("cpu")
    assert x.quantile(0.5).is_cuda  # torch makes a number on the device by itself


def test_a_replay_writes_over_the_outputs() -> None:
    graph, x = torch.cuda.CUDAGraph(), made_on_gpu()
    with torch.cuda.graph(graph):
        total = torch.zeros(3, device="cuda")
        total += x
        out = 2 * total
    assert out.isnan().all()  # a capture runs nothing
    for value in (1.0, 4.0):
        x.fill_(value)
        graph.replay()
        assert out.tolist() == [2 * value] * 3


WAITS: list[Callable[[Tensor], object]] = [
    lambda x: x.sum().item(),
    lambda x: x[x > 0],
    lambda x: x.nonzero(),
    lambda x: x.cpu(),
    lambda x: x.tolist(),
    lambda x: torch.tensor([1.0], device="cuda"),
    lambda x: x[[0, 1]],
    lambda x: torch.cuda.synchronize(),
    lambda x: torch.cuda.current_stream().wait_stream(torch.cuda.Stream()),
]


@pytest.mark.parametrize("wait", WAITS)
def test_a_capture_must_not_wait(wait: Callable[[Tensor], object]) -> None:
    x = made_on_gpu()
    with (
        pytest.raises(RuntimeError, match=r"capturing|uncaptured"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        wait(x)


def test_a_graph_holds_one_device() -> None:
    """What runs on another GPU meanwhile is no part of the graph: it runs once."""
    graph, x = torch.cuda.CUDAGraph(), torch.ones(3, device="cuda:1")
    with torch.cuda.graph(graph):
        out = x + 1
    x.fill_(5)
    graph.replay()
    assert out.tolist() == [2.0] * 3


def test_a_graph_that_reads_freed_memory() -> None:
    graph, x = torch.cuda.CUDAGraph(), made_on_gpu()
    with torch.cuda.graph(graph):
        out = x + 1
    graph.replay()
    del x
    with pytest.raises(AssertionError, match="freed after its capture"):
        graph.replay()
    assert out.is_cuda


def test_streams_must_wait_for_each_other() -> None:
    x, side = made_on_gpu(), torch.cuda.Stream()
    with torch.cuda.stream(side), pytest.raises(AssertionError, match="does not wait for"):
        x + 1
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x + 1
    with pytest.raises(AssertionError, match="does not wait for"):
        y + 1
    torch.cuda.current_stream().wait_stream(side)
    assert (y + 1).is_cuda


def test_memory_that_another_stream_still_reads() -> None:
    x, side = made_on_gpu(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x + 1
    del x
    with pytest.raises(AssertionError, match="memory is used again"):
        made_on_gpu()
    assert y.is_cuda
