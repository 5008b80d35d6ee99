"""Weights changed in place are noticed, also where no version counter rises; so are settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from types import MethodType

import numpy as np
import pytest
import torch
from torch import nn

import boxcov
from boxcov import GLM, MCGLM, MCI, BoxcovError, ExactGLM, Selection
from boxcov._torch.modules import shadow
from boxcov._torch.snapshot import ModuleSnapshot, WeightChecksum
from boxcov.data import shapes
from boxcov.detectors.tiny import TinyCenter
from boxcov.predict.engine_options import EngineOptions


def scale_data(detector: TinyCenter) -> None:
    next(detector.parameters()).data.mul_(1.01)


def write_through_numpy(detector: TinyCenter) -> None:
    list(detector.parameters())[-1].detach().numpy()[...] += 0.25


def write_buffer(detector: TinyCenter) -> None:
    name, _ = next((n, b) for n, b in detector.named_buffers() if b.is_floating_point())
    detector.get_buffer(name).data.add_(0.5)


def fused_step(detector: TinyCenter) -> None:
    for parameter in detector.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW(detector.parameters(), lr=1e-3, fused=True).step()


CHANGES = [scale_data, write_through_numpy, write_buffer, fused_step]


@pytest.fixture
def own(tiny: TinyCenter) -> TinyCenter:
    """A detector with a buffer that a test may change."""
    detector = TinyCenter(threshold=tiny.threshold, most=tiny.most)
    detector.load_state_dict(tiny.state_dict())
    detector.register_buffer("offset", torch.zeros(3))
    return detector


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed_within_the_delay(change, own, image) -> None:
    model = MCI(own, samples=2)
    model(image)
    change(own)
    with pytest.raises(BoxcovError, match="mci: this posterior was made for weights with the"):
        [model(image) for _ in range(model.engine.verify)]


def test_buffers_outside_the_state_dict_count(own, image) -> None:
    own.register_buffer("table", torch.zeros(3), persistent=False)
    model = MCI(own, samples=2)
    model(image)
    own.table.data[0] = 7
    with pytest.raises(BoxcovError, match=r"mci: a buffer .* build the model again"):
        [model(image) for _ in range(model.engine.verify)]


@pytest.mark.parametrize("method", [MCGLM, ExactGLM])
@pytest.mark.parametrize("change", CHANGES[:2])
def test_always_notices_at_once(method, change, tiny, posterior, image) -> None:
    own = TinyCenter(threshold=tiny.threshold, most=tiny.most)
    own.load_state_dict(tiny.state_dict())
    model = method(own, posterior, engine=EngineOptions(verify="always"))
    model(image)
    change(own)
    with pytest.raises(BoxcovError, match="weights with the fingerprint"):
        model(image)


@pytest.mark.parametrize(
    ("build", "compiled"),
    [(ExactGLM, False), (MCGLM, False), (GLM, False), (ExactGLM, True), (MCGLM, True)],
)
def test_a_changed_threshold_is_followed(build, compiled, tiny, posterior, image) -> None:
    own = TinyCenter(threshold=tiny.threshold, most=tiny.most)
    own.load_state_dict(tiny.state_dict())
    model = build(own, posterior)
    run = boxcov.compile(model, image) if compiled else model
    before = run(image)
    own.threshold = float(before.scores.median())
    found, plain = run(image), own.detect(image)
    assert 0 < len(found) < len(before)
    assert torch.equal(found.boxes, plain.boxes)
    assert found.meta["configuration"] == own.configuration()
    own.most = 1
    assert len(run(image)) == 1


def test_an_error_model_of_another_threshold_is_refused(tiny, posterior, image) -> None:
    own = TinyCenter(threshold=tiny.threshold, most=tiny.most)
    own.load_state_dict(tiny.state_dict())
    model = boxcov.calibrate(ExactGLM(own, posterior), shapes.frames(seed=1, count=40), copies=0)
    before = model(image)
    own.threshold = 0.5
    for _ in range(2):
        with pytest.raises(BoxcovError, match="threshold"):
            model(image)
    own.threshold = tiny.threshold
    assert torch.equal(model(image).risk, before.risk)
    assert model(image).meta == before.meta


class CountingCenter(TinyCenter):
    """Writes attributes in each pass."""

    calls = 0

    def __init__(self, threshold: float, most: int) -> None:
        super().__init__(threshold=threshold, most=most)
        self.calls, self.shape = 0, (0, 0)

    def forward(self, inputs):
        self.calls, self.shape = self.calls + 1, tuple(inputs.shape[2:])
        return super().forward(inputs)


def test_what_a_pass_writes_is_not_a_setting(tiny, posterior, image) -> None:
    own = CountingCenter(tiny.threshold, tiny.most)
    own.load_state_dict(tiny.state_dict())
    model = ExactGLM(own, posterior)
    model(image)
    router = model.router
    for size in (64, 48, 64):
        own.detect(image[:, :, :size, :size])
        model(image)
        assert model.router is router
    own.threshold = 1.0
    assert not len(model(image))


@dataclass
class Settings:
    threshold: float
    calls: int = 0


class ConfiguredCenter(TinyCenter):
    """Has its threshold in a dataclass, to which each pass writes."""

    @property
    def threshold(self) -> float:
        return self.settings[0].threshold

    @threshold.setter
    def threshold(self, value: float) -> None:
        self.settings = (Settings(value),)

    def forward(self, inputs):
        self.settings[0].calls += 1
        return super().forward(inputs)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_dataclass_of_settings_is_followed(compiled, tiny, posterior, image) -> None:
    own = ConfiguredCenter(threshold=tiny.threshold, most=tiny.most)
    own.load_state_dict(tiny.state_dict())
    model = ExactGLM(own, boxcov.fit(own, shapes.frames(count=4)))
    run = boxcov.compile(model, image) if compiled else model
    before, router = run(image), model.router
    assert len(run(image)) == len(before)
    assert model.router is router
    assert own.settings[0].calls == 0
    own.settings[0].threshold = float(before.scores.median())
    found = run(image)
    assert 0 < len(found) < len(before)
    assert found.meta["configuration"] == own.configuration()


class DefaultCenter(TinyCenter):
    """Has a default of its class, and creates an attribute in each pass."""

    least = 0.0

    def forward(self, inputs):
        self.last_shape = tuple(inputs.shape)
        return super().forward(inputs)

    def select(self, raw):
        self.threshold = max(self.threshold, self.least)
        return super().select(raw)


def test_an_attribute_that_hides_a_default_is_followed(tiny, posterior, image) -> None:
    own = DefaultCenter(threshold=tiny.threshold, most=tiny.most)
    own.load_state_dict(tiny.state_dict())
    model = ExactGLM(own, posterior)
    before, router = model(image), model.router
    own.detect(image)
    model(image)
    assert model.router is router
    own.least = float(before.scores.median())
    found = model(image)
    assert 0 < len(found) < len(before)
    assert torch.equal(found.boxes, own.detect(image).boxes)


class SelectiveCenter(TinyCenter):
    """Reports the boxes above a limit, which it holds in attributes of several kinds."""

    def __init__(self, threshold: float, most: int) -> None:
        super().__init__(threshold=threshold, most=most)
        self.limit, self.array = torch.tensor(0.0), np.zeros(1)
        self.by_name, self.nested, self.ignored = {"all": self.limit}, [[0.0, self.limit]], set()
        self.rule, self.plain = lambda scores: scores >= 0, {"all": [0.0] * 1000}

    def select(self, raw):
        found = super().select(raw)
        limits = (self.limit, float(self.array[0]), self.by_name["all"], max(self.nested[0]))
        limits = (*limits, max(self.plain["all"]))
        kept = self.rule(found.scores) & (found.scores >= max(limits))
        kept &= torch.tensor([label not in self.ignored for label in found.labels.tolist()])
        where = tuple(index[kept] for index in found.where)
        return Selection(found.frame[kept], found.scores[kept], found.labels[kept], where)


ATTRIBUTES: dict[str, Callable[[SelectiveCenter, float], object]] = {
    "tensor": lambda own, limit: setattr(own, "limit", torch.tensor(limit)),
    "array": lambda own, limit: setattr(own, "array", np.full(1, limit)),
    "in a dict": lambda own, limit: own.by_name.update(all=torch.tensor(limit)),
    "in a list": lambda own, limit: own.nested[0].append(limit),
    "in a list of numbers": lambda own, limit: own.plain["all"].append(limit),
    "in a set": lambda own, limit: own.ignored.add(0),
    "function": lambda own, limit: setattr(own, "rule", lambda scores: scores >= limit),
    "method": lambda own, limit: setattr(own, "select", MethodType(first, own)),
}


def first(self: TinyCenter, raw: object) -> Selection:
    found = TinyCenter.select(self, raw)
    where = tuple(index[:1] for index in found.where)
    return Selection(found.frame[:1], found.scores[:1], found.labels[:1], where)


@pytest.mark.parametrize("kind", ATTRIBUTES)
def test_any_attribute_is_followed(kind, tiny, posterior, image) -> None:
    own = SelectiveCenter(tiny.threshold, tiny.most)
    own.load_state_dict(tiny.state_dict())
    model = MCGLM(own, posterior, samples=2)
    before, router = model(image), model.router
    model(image)
    assert model.router is router
    ATTRIBUTES[kind](own, float(before.scores.median()))
    found, plain = model(image), own.detect(image)
    assert 0 < len(plain) < len(before)
    assert torch.equal(found.boxes, plain.boxes)


@dataclass
class Node:
    """Knows its parent, as trees often do."""

    value: float
    parent: Node | None = None
    children: list[Node] = field(default_factory=list)


class Named(dict):
    """Keys can be read as attributes; ``deepcopy`` fails for such a dict."""

    __getattr__ = dict.__getitem__


def test_odd_attributes_can_be_compared() -> None:
    own = TinyCenter()
    own.tree = Node(1.0)
    own.tree.children.append(Node(2.0, parent=own.tree))
    own.named, own.by_module = Named(limit=0.5), {own.head: Lock()}
    snapshot = ModuleSnapshot(own, shadow(own))
    assert snapshot.is_unchanged()
    own.tree.children[0].value = 3.0
    assert not snapshot.is_unchanged()


@dataclass(eq=False)
class Unfinished:
    """Is never equal to a copy."""

    threshold: float
    later: float = field(init=False)


def test_what_is_not_set_yet_is_unchanged() -> None:
    own = TinyCenter()
    own.one = Unfinished(0.5)
    assert ModuleSnapshot(own).is_unchanged()


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook_of_later_is_followed(register, tiny, posterior, image) -> None:
    own = TinyCenter(threshold=tiny.threshold, most=tiny.most)
    own.load_state_dict(tiny.state_dict())
    model = ExactGLM(own, posterior)
    before = model(image)
    results = {
        "register_forward_hook": lambda module, given, out: 0.5 * out,
        "register_forward_pre_hook": lambda module, given: (0.5 * given[0],),
    }
    handle = getattr(own.backbone, register)(results[register])
    found, plain = model(image), own.detect(image)
    assert torch.equal(found.boxes, plain.boxes)
    assert torch.equal(found.scores, plain.scores)
    assert not torch.equal(found.scores, before.scores)
    handle.remove()
    assert torch.equal(model(image).scores, before.scores)


@pytest.mark.parametrize("verify", [0, -1, "never", 1.5, None, True])
def test_odd_options_are_refused(verify) -> None:
    with pytest.raises(BoxcovError, match="verify must be 'always' or a number of calls"):
        EngineOptions(verify=verify)
    with pytest.raises(BoxcovError, match="tolerance must be a number, got '1e-3'"):
        EngineOptions(tolerance="1e-3")
    with pytest.raises(BoxcovError, match="cuda_graphs must be True or False, got 'no'"):
        EngineOptions(cuda_graphs="no")


class Odd(nn.Module):
    """Weights of several types and layouts: channels last, with gaps, shared, empty, scalar."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        kernel = torch.randn(6, 5, 3, 3, generator=generator)
        self.kernel = nn.Parameter(kernel.to(memory_format=torch.channels_last))
        self.gaps = nn.Parameter(torch.randn(7, 10, generator=generator)[:, ::3])
        self.shared = self.kernel
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.register_buffer("in_half", torch.randn(9, generator=generator).half())
        self.register_buffer("in_double", torch.randn(3, generator=generator).double())
        self.register_buffer("scalar", torch.tensor(2.0))
        self.register_buffer("count", torch.tensor(2))


def swap(values: torch.Tensor) -> None:
    first, second = (0, 0, 0, 0), (1, 2, 0, 1)
    values[first], values[second] = values[second].clone(), values[first].clone()


EDITS: list[Callable[[Odd], object]] = [
    lambda m: m.kernel.data[3, 2, 1, 0].neg_(),
    lambda m: swap(m.kernel.data),
    lambda m: m.kernel.data.neg_(),
    lambda m: m.gaps.data[6, 3].add_(1),
    lambda m: m.in_half.data[8].mul_(2),
    lambda m: m.in_double.data[0].mul_(1 + 1e-15),
    lambda m: m.scalar.data.fill_(3),
]


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("calls", [1, 3, 1000])
@pytest.mark.parametrize("chunk", [4, 2**20])
def test_any_value_of_any_layout_counts(edit, calls, chunk, monkeypatch) -> None:
    monkeypatch.setattr(WeightChecksum, "_CHUNK", chunk)
    module = Odd()
    checksum = WeightChecksum(module, calls)
    assert all(bool(checksum.next_share()) for _ in range(2 * calls))
    module.count += 1  # not a weight
    assert all(bool(checksum.next_share()) for _ in range(calls))
    edit(module)
    assert not all(bool(checksum.next_share()) for _ in range(calls))


def test_a_module_without_weights() -> None:
    assert bool(WeightChecksum(nn.ReLU(), 4).next_share())


def test_the_shares_of_a_call_are_small() -> None:
    """Each call reads its share and no more."""
    module = nn.Sequential(*(nn.Linear(32, 32) for _ in range(40)))
    checksum = WeightChecksum(module, 16)
    sizes = [sum(map(len, (t for chunk in share for t in chunk))) for share in checksum._shares]
    total = sum(p.numel() for p in module.parameters())
    assert len(sizes) == 16
    assert sum(sizes) == total
    assert max(sizes) == total // 16
