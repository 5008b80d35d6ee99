"""Unusual modules, changed weights and threads: unchanged detector, correct covariances."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from boxcov import MCI, BoxcovError, fit
from helpers.nets import NetDetector
from helpers.odd import METHODS, TOLERANCE, check, double, frames, posterior_of, two_layers
from oracles.dense import box_covariance, relative

# weights that change under a model


@pytest.mark.parametrize("method", [*METHODS, "mci"])
def test_other_weights_loaded_under_a_model_are_noticed(method: str) -> None:
    detector, inputs = double(two_layers), frames()[0][:1]
    own = {name: tensor.clone() for name, tensor in detector.state_dict().items()}
    make = METHODS.get(method, lambda detector, posterior: MCI(detector, posterior))
    model = make(detector, posterior_of(detector))
    before = model(inputs)
    detector.load_state_dict({name: tensor + 0.1 for name, tensor in own.items()})
    for _ in range(2):
        with pytest.raises(BoxcovError, match="fingerprint"):
            model(inputs)
    detector.load_state_dict(own)
    assert torch.equal(model(inputs).covariance, before.covariance)


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
def test_loading_the_same_weights_again_is_fine(assign: bool) -> None:
    inputs = frames()[0][:1]
    for method, make in METHODS.items():
        detector = double(lambda: nn.Conv2d(2, 2, 3, padding=1))
        model = make(detector, posterior_of(detector))
        before = model(inputs)
        detector.load_state_dict(
            {name: tensor.clone() for name, tensor in detector.state_dict().items()}, assign=assign
        )
        assert torch.equal(model(inputs).covariance, before.covariance), method


# modules that are not what they seem


def scripted(module: nn.Module) -> torch.jit.ScriptModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(module)


class Backed(nn.Module):
    """A frozen part of any kind, and a head."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, nn.Conv2d(2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())


def body() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2))


def test_a_script_module_is_used_and_left_unchanged() -> None:
    detector = double(lambda: Backed(scripted(body().double().eval())))
    attributes = [dict(module.__dict__) for module in detector.net.body.modules()]
    check(detector, posterior_of(detector, ["net.head"]))
    for module, before in zip(detector.net.body.modules(), attributes):
        assert module.__dict__.keys() == before.keys()
        assert all(module.__dict__[name] is value for name, value in before.items())


def test_a_script_module_in_train_mode_is_refused() -> None:
    detector = double(lambda: Backed(scripted(body().double().eval())))
    posterior = posterior_of(detector, ["net.head"])
    detector.train()
    before = {name: tensor.clone() for name, tensor in detector.state_dict().items()}
    with pytest.raises(BoxcovError, match=r"eval\(\)"):
        fit(detector, [frames()], depth=["net.head"], prior_precision=1.0)
    for make in METHODS.values():
        with pytest.raises(BoxcovError, match=r"eval\(\)"):
            make(detector, posterior)(frames()[0][:1])
    assert all(torch.equal(tensor, before[name]) for name, tensor in detector.state_dict().items())


class Nested(nn.Module):
    """Also holds its registered layers in a list of lists."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = (
            nn.Conv2d(2, 2, 3, padding=1),
            nn.BatchNorm2d(2),
            nn.Conv2d(2, 2, 1),
        )
        self.stages = [[self.conv, self.norm]]

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            for layer in stage:
                x = layer(x)
        return self.head(x)


class NestedDict(Nested):
    def __init__(self) -> None:
        super().__init__()
        self.stages = {"first": {"layers": (self.conv, self.norm)}}

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.stages["first"]["layers"]:
            x = layer(x)
        return self.head(x)


@dataclass(frozen=True)
class Layers:
    conv: nn.Module
    norm: nn.Module


class NestedDataclass(Nested):
    def __init__(self) -> None:
        super().__init__()
        self.stages = [Layers(self.conv, self.norm)]

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage.norm(stage.conv(x))
        return self.head(x)


class Pair(NamedTuple):
    conv: nn.Module
    norm: nn.Module


class NestedNamedTuple(NestedDataclass):
    def __init__(self) -> None:
        super().__init__()
        self.stages = [Pair(self.conv, self.norm)]


class Stage(Pair):
    """Takes one layer, so it cannot be made of its two fields."""

    def __new__(cls, conv: nn.Conv2d) -> Stage:
        return super().__new__(cls, conv, nn.BatchNorm2d(conv.out_channels))


class NestedOwnTuple(NestedDataclass):
    def __init__(self) -> None:
        super().__init__()
        stage = Stage(self.conv)
        self.norm, self.stages = stage.norm, [stage]


class NestedKeys(Nested):
    def __init__(self) -> None:
        super().__init__()
        self.stages = {self.conv: "first", self.norm: "second"}

    def forward(self, x: Tensor) -> Tensor:
        assert self.stages[self.conv] == "first"
        for layer in self.stages:
            x = layer(x)
        return self.head(x)


class Partial(Nested):
    def __init__(self) -> None:
        super().__init__()
        self.stages = partial(self.norm)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.conv(x)))


class PartialMethod(Partial):
    def __init__(self) -> None:
        super().__init__()
        self.stages = partial(self.norm.forward)


class Compiled(Nested):
    def __init__(self) -> None:
        super().__init__()
        self.stages = None
        self.body = torch.compile(nn.Sequential(self.conv, self.norm), backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class CompiledInPlace(Nested):
    def __init__(self) -> None:
        super().__init__()
        for layer in (self.conv, self.norm, self.head):
            layer.compile(backend="eager")


@pytest.mark.parametrize(
    "kind",
    [
        *(Nested, NestedDict, NestedDataclass, NestedNamedTuple, NestedOwnTuple, NestedKeys),
        *(Partial, PartialMethod, Compiled, CompiledInPlace),
    ],
)
def test_modules_in_plain_containers_run_in_eval_mode(kind: type[Nested]) -> None:
    detector = double(kind)
    posterior, inputs = posterior_of(detector, ["net.head"]), frames()[0][:1]
    plain = detector.detect(inputs)
    expected = box_covariance(detector, posterior, inputs)
    detector.train()
    before = {name: tensor.clone() for name, tensor in detector.state_dict().items()}
    again = posterior_of(detector, ["net.head"])
    assert (
        relative(again.blocks["net.head"].H.matrix, posterior.blocks["net.head"].H.matrix) < 1e-12
    )
    for method, make in METHODS.items():
        found = make(detector, posterior)(inputs)
        assert torch.equal(found.boxes, plain.boxes), method
        assert relative(found.covariance, expected) < TOLERANCE[method], method
    changed = [
        name
        for name, tensor in detector.state_dict().items()
        if not torch.equal(tensor, before[name])
    ]
    assert not changed
    assert all(module.training for module in detector.modules())


class Logging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.calls, self.seen, self.both = (
            nn.Conv2d(2, 2, 1),
            [],
            {},
            {"shapes": [], "kinds": set()},
        )

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(1)
        self.seen[tuple(x.shape)] = len(self.calls)
        self.both["shapes"].append(x.shape)
        self.both["kinds"].add(x.dtype)
        return self.conv(x)


def test_logs_of_the_detector_are_not_written() -> None:
    detector = double(Logging)
    posterior = posterior_of(detector)
    for make in METHODS.values():
        make(detector, posterior)(frames()[0][:1])
    net = detector.net
    assert (net.calls, net.seen, net.both) == ([], {}, {"shapes": [], "kinds": set()})
    detector.detect(frames()[0][:1])
    assert net.calls == [1]


class Attention(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x, need_weights=False)[0]


class Tokens(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.stem, self.encoder, self.head = (
            nn.Conv2d(2, 16, 3, padding=1),
            encoder,
            nn.Linear(16, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.stem(x).flatten(2).transpose(1, 2))).transpose(1, 2)


@pytest.mark.parametrize(
    "encoder",
    [
        pytest.param(lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), id="layer"),
        pytest.param(
            lambda: nn.TransformerEncoder(
                nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2
            ),
            id="encoder",
        ),
        pytest.param(lambda: Attention(16, 4, batch_first=True), id="attention"),
    ],
)
def test_transformer_boxes_equal_its_fast_path_bit_for_bit(
    encoder: Callable[[], nn.Module],
) -> None:
    torch.manual_seed(0)
    detector = NetDetector(Tokens(encoder())).eval()
    x, targets = torch.randn(2, 2, 5, 5), torch.randn(2, 2, 25)
    plain = detector.detect(x)
    posterior = fit(detector, [(x, targets)], depth=["net.head"], n_data=50, prior_precision=1.0)
    expected = box_covariance(detector, posterior, x)
    for method, make in METHODS.items():
        found = make(detector, posterior)(x)
        assert torch.equal(found.boxes, plain.boxes), method
        assert relative(found.covariance, expected) < max(TOLERANCE[method], 1e-4), (
            method
        )  # in float32


@pytest.mark.parametrize("depth", [["net.head"], "head"], ids=["last layer", "all layers"])
def test_a_traced_backbone_works(depth: Any) -> None:
    detector = double(lambda: Backed(torch.fx.symbolic_trace(two_layers())))
    check(detector, posterior_of(detector, depth))
    assert isinstance(detector.net.body, torch.fx.GraphModule)


# threads


class Slow(nn.Module):
    """Waits, so that a second thread runs in between."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.01)
        return x


@pytest.mark.parametrize("method", METHODS)
def test_interleaved_threads_do_not_mix(method: str) -> None:
    def net() -> nn.Module:
        return nn.Sequential(
            Slow(), nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), Slow(), nn.Conv2d(3, 2, 1), Slow()
        )

    detector = double(net)
    model = METHODS[method](detector, posterior_of(detector, ["net.4"]))
    inputs = [frames(1, seed)[0] for seed in range(6)]
    alone = [model(x) for x in inputs]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(model, inputs))
    for a, b in zip(alone, together):
        assert torch.equal(a.boxes, b.boxes)
        assert torch.equal(a.covariance, b.covariance)


class Closure(nn.Module):
    """A norm layer inside a closure, which no shadow can put in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(2), nn.Conv2d(2, 2, 1)
        norm = self.norm
        self.run = lambda x: norm(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.run(x))


def test_a_norm_layer_in_train_mode_inside_a_closure_is_noticed() -> None:
    detector = double(Closure)
    posterior = posterior_of(detector)
    check(detector, posterior)
    detector.train()
    with pytest.raises(BoxcovError, match=r"changes its own buffers .* call detector\.eval\(\)"):
        posterior_of(detector)
    detector = double(Closure).train()
    with pytest.raises(BoxcovError, match=r"changes its own buffers .* call detector\.eval\(\)"):
        MCI(detector)(frames()[0])
