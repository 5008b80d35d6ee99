"""Factors of layers of equal shape, computed together as on a GPU, against one by one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from boxcov import BoxcovError
from boxcov._torch.layers import parse
from boxcov.kfac import factors
from boxcov.kfac import input_gram as grams
from boxcov.kfac.accumulate import Accumulator
from boxcov.kfac.factors import FactorSums
from boxcov.kfac.losses import FrameLosses, select_parameters
from helpers.centerpoint_cases import detector_of, frames, pillar_config
from helpers.nets import CASES, Case, NetDetector

BRANCHES = 5


class Branches(nn.Module):
    """Heads of equal shape with different inputs; ``after`` is called with the inputs."""

    def __init__(self, after: list[Any]) -> None:
        super().__init__()
        self.stem = nn.ModuleList(nn.Conv2d(2, 6, 3, padding=1) for _ in range(BRANCHES))
        self.heads = nn.ModuleList(nn.Conv2d(6, 2, 3, padding=1, groups=2) for _ in range(BRANCHES))
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        read = [stem(x[:, 2 * i : 2 * i + 2].exp()).tanh() for i, stem in enumerate(self.stem)]
        out = [head(x) for head, x in zip(self.heads, read)]
        for change in self.after:
            change(read)
        return torch.cat(out, 1)


def branches(*after: Any) -> NetDetector:
    torch.manual_seed(0)
    return NetDetector(Branches(list(after))).double().eval()


def batch(seed: int, count: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (count, 2 * BRANCHES, 6, 7), (count, 2 * BRANCHES, 42)
    x, y = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return x, y


def counted(
    detector: NetDetector,
    items: list[tuple[Any, Any]],
    joined: bool,
    depth: Any = "head",
) -> Accumulator:
    losses = FrameLosses(detector, select_parameters(detector, depth))
    accumulator = Accumulator(losses)
    accumulator.batch_layers = joined
    for number, (inputs, targets) in enumerate(items):
        accumulator.add(accumulator.terms(inputs, targets, number))
    return accumulator


def assert_same(
    found: dict[str, FactorSums], expected: dict[str, FactorSums], rtol: float = 1e-10
) -> None:
    assert list(found) == list(expected)
    for name, sums in expected.items():
        assert (found[name].locations, found[name].has_gradient) == (
            sums.locations,
            sums.has_gradient,
        )
        for one, other in ((found[name].Q, sums.Q), (found[name].H, sums.H)):
            assert float((one - other).norm()) <= rtol * float(other.norm()), name


@pytest.fixture
def joins(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of inputs of each joint computation."""
    sizes: list[int] = []

    def spied(xs: Any, *rest: Any) -> Tensor:
        sizes.append(len(xs))
        return grams.input_grams(xs, *rest)

    monkeypatch.setattr(factors, "input_grams", spied)
    return sizes


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_kind_of_layer(case: Case) -> None:
    detector = case.detector()
    x, y = case.frames(detector)
    items = [(x[:3], y[:3]), (x[3:4], y[3:4]), (x[4:], y[4:])]
    one_by_one, joined = (counted(detector, items, how) for how in (False, True))
    assert joined.batch_layers  # the layers were computed together
    assert_same(joined.sums, one_by_one.sums)


def test_layers_of_one_form_are_one_product(joins: list[int]) -> None:
    found = counted(branches(), [batch(0), batch(1)], joined=True)
    assert joins == [BRANCHES, BRANCHES] * 2
    joins.clear()
    assert_same(found.sums, counted(branches(), [batch(0), batch(1)], joined=False).sums)
    assert joins == [1] * (4 * BRANCHES)


@pytest.mark.parametrize("stride", [1, 2])
def test_joined_inputs_stay_within_the_memory_limit(
    joins: list[int], monkeypatch: pytest.MonkeyPatch, stride: int
) -> None:
    detector = branches()
    for stem in detector.net.stem:
        stem.stride = (stride, stride)
    x, y = batch(0)
    y = y if stride == 1 else y[:, :, :12]
    expected = counted(detector, [(x, y)], joined=False)
    joins.clear()
    # bytes of a stem's input, or of its unfolded columns
    one = 2 * 2 * 42 * 8 if stride == 1 else 2 * 2 * 9 * 12 * 8
    monkeypatch.setattr(factors, "MAX_BYTES", 2 * one)
    monkeypatch.setattr(
        grams, "_correlates", lambda x, geometry: all(s == 1 for s in geometry.stride)
    )
    assert_same(counted(detector, [(x, y)], joined=True).sums, expected.sums)
    assert sorted(joins) == [1] * (1 + BRANCHES) + [2, 2] if stride == 1 else joins.count(2) >= 2


def test_number_of_operations_does_not_grow_with_the_tasks() -> None:
    """Count products and reductions of one fit step; the tasks have branches of equal shape."""
    seen = []
    for tasks in ((("car",), ("bus",)), (("car",), ("bus",), ("truck",), ("barrier",))):
        config = pillar_config(tasks=tasks)
        config = replace(config, reporting=replace(config.reporting, nms="rotated"))
        detector, (first, second) = detector_of(config), frames(config)
        accumulator = counted(detector, [first], joined=True)
        with torch.autograd.profiler.profile() as profile:
            accumulator.add(accumulator.terms(*second, 1))
        count = Counter(event.name for event in profile.function_events)
        seen.append(
            [
                count[f"aten::{name}"]
                for name in ("bmm", "sub", "_index_put_impl_", "_local_scalar_dense", "nonzero")
            ]
        )
        assert min(seen[-1]) > 0
        assert count["aten::_foreach_add_"] == 1
        assert_same(
            accumulator.sums, counted(detector, [first, second], joined=False).sums, rtol=1e-5
        )
    assert seen[0] == seen[1]


# inputs that change before their factors are computed


def test_an_input_overwritten_in_place_turns_off_joining() -> None:
    """Autograd would raise in the first batch only, where it saves the inputs."""
    spoil = [False]

    def change(read: list[Tensor]) -> None:
        if spoil[0]:
            read[3].detach().mul_(7)

    detector = branches(change)
    sums = []
    for joined in (True, False):
        spoil[0] = False
        accumulator = counted(detector, [batch(0)], joined, depth=["net.heads"])
        spoil[0] = True
        accumulator.add(accumulator.terms(*batch(1), 1))
        accumulator.add(accumulator.terms(*batch(2), 2))
        assert not accumulator.batch_layers
        sums.append(accumulator.sums)
    assert_same(*sums)
    spoil[0] = False
    assert_same(
        sums[0],
        counted(detector, [batch(0), batch(1), batch(2)], joined=False, depth=["net.heads"]).sums,
    )


def test_without_gradients_an_input_may_be_overwritten() -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(10, 10, 3, padding=1), nn.Conv2d(10, 10, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = x * 2
            with torch.no_grad():
                gate = self.a(x).sigmoid()
                x.add_(1)
            return self.b(self.a(x).tanh() * gate)

    torch.manual_seed(0)
    detector = NetDetector(Gate()).double()
    joined, one_by_one = (counted(detector, [batch(0), batch(1)], how) for how in (True, False))
    assert joined.batch_layers
    assert_same(joined.sums, one_by_one.sums)


@pytest.mark.parametrize("bad", [0, 1])
def test_only_the_bad_layer_is_named_and_the_sums_are_unchanged(
    bad: int,
) -> None:
    detector, items = branches(), [batch(0), batch(1)]
    # exp() overflows before the layer; tanh() after it is finite
    items[bad][0][0, 2 * 3, 2, 2] = 1e4
    accumulator = counted(detector, items[:bad], joined=True)
    before = {
        name: (sums.Q.clone(), sums.H.clone(), sums.locations)
        for name, sums in accumulator.sums.items()
    }
    with pytest.raises(
        BoxcovError,
        match=rf"item {bad} gives a NaN or infinite input or gradient "
        r"at net\.stem\.3\.weight, though",
    ):
        accumulator.terms(*items[bad], bad)
    assert accumulator.frames == 2 * bad
    for name, (Q, H, locations) in before.items():
        now = accumulator.sums[name]
        assert torch.equal(now.Q, Q)
        assert torch.equal(now.H, H)
        assert now.locations == locations


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_gradients_together_in_both_memory_orders(layout: torch.memory_format) -> None:
    maps = [torch.randn(2, 6, 5, 7).contiguous(memory_format=layout) for _ in range(3)]
    Ds = [d.unflatten(1, (2, 3)).flatten(3) for d in maps]
    for found, D in zip(factors.output_terms(Ds, batched=True), Ds, strict=True):
        expected = torch.einsum("bgnt,bgmt->gnm", D.double(), D.double())
        assert float((found - expected).norm() / expected.norm()) < 1e-6


@pytest.mark.parametrize("joined", [True, False])
def test_factors_are_in_full_precision_where_the_forward_is_not(joined: bool) -> None:
    x, weight = torch.randn(2, 3, 40, 40), torch.randn(4, 3, 3, 3)
    call = parse(torch.conv2d, (x, weight), {"padding": 1})
    assert call is not None
    inputs = factors.InputFactors(joined)
    with torch.autocast("cpu", torch.bfloat16):
        inputs.add(call, has_bias=True, may_wait=True)
        inputs.finish()
        (found,) = factors.output_terms([x.flatten(2).unsqueeze(1).repeat(1, 1, 2, 1)], joined)
    expected = (
        grams.input_grams([x.double()], call.geometry, has_bias=True)[0],
        torch.einsum("bnt,bmt->nm", *[x.double().flatten(2)] * 2).repeat(2, 2),
    )
    for part, Q in zip((inputs.terms[0], found), expected):
        assert float((part - Q).norm() / Q.norm()) < 1e-6
