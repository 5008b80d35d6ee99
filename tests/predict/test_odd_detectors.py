"""Unusual detectors get correct covariances, or an error that says what is wrong."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from boxcov import GLM, MCGLM, BoxcovError, Detector, ExactGLM, Selection, fit
from boxcov.data import shapes
from boxcov.detectors.tiny import TinyCenter
from helpers.nets import NetDetector
from helpers.odd import METHODS, TOLERANCE, check, double, frames, posterior_of, two_layers
from oracles.dense import box_covariance, relative

# the reader changes what the frozen part returns


class Body(nn.Module):
    """A frozen part that returns its map in a container."""

    def __init__(self, packed: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.conv, self.packed = nn.Conv2d(2, 3, 3, padding=1), packed

    def forward(self, x: Tensor) -> Any:
        return self.packed(self.conv(x).tanh())


class Consumer(nn.Module):
    def __init__(
        self, packed: Callable[[Tensor], Any], consume: Callable[[Any, nn.Module], Tensor]
    ) -> None:
        super().__init__()
        self.body, self.head, self.last = Body(packed), nn.Conv2d(3, 3, 1), nn.Conv2d(3, 2, 1)
        self.consume = consume

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.consume(self.body(x), self.head))


@dataclass
class Features:
    x: Tensor


def replace_entry(out: dict[str, Tensor], head: nn.Module) -> Tensor:
    out["x"] = head(out["x"]).tanh()
    return out["x"]


def replace_inner_entry(out: tuple[dict[str, Tensor]], head: nn.Module) -> Tensor:
    return replace_entry(out[0], head)


def pop_entry(out: dict[str, Tensor], head: nn.Module) -> Tensor:
    return head(out.pop("x")).tanh()


def append_entry(out: list[Tensor], head: nn.Module) -> Tensor:
    out.append(head(out[-1]).tanh())
    return out[-1]


def set_attribute(out: Features, head: nn.Module) -> Tensor:
    out.x = head(out.x).tanh()
    return out.x


def change_attribute_in_place(out: Features, head: nn.Module) -> Tensor:
    out.x += 1
    return head(out.x).tanh()


def next_entry(out: Any, head: nn.Module) -> Tensor:
    return head(next(out)).tanh()


@pytest.mark.parametrize(
    ("packed", "consume"),
    [
        pytest.param(lambda x: {"x": x}, replace_entry, id="dict entry replaced"),
        pytest.param(
            lambda x: OrderedDict(x=x), replace_entry, id="entry of an OrderedDict replaced"
        ),
        pytest.param(
            lambda x: ({"x": x},), replace_inner_entry, id="entry of a dict in a tuple replaced"
        ),
        pytest.param(lambda x: {"x": x}, pop_entry, id="dict entry popped"),
        pytest.param(lambda x: [x], append_entry, id="list appended to"),
        pytest.param(Features, set_attribute, id="attribute set"),
        pytest.param(
            lambda x: Features(x * 2), change_attribute_in_place, id="attribute changed in place"
        ),
        pytest.param(lambda x: iter([x]), next_entry, id="iterator used up"),
    ],
)
def test_a_container_changed_by_its_reader_keeps_the_numbers(packed: Any, consume: Any) -> None:
    detector = double(lambda: Consumer(packed, consume))
    check(detector, posterior_of(detector, ["net.head", "net.last"]))


# posterior weights in unusual places


class Runner(nn.Module):
    """Has no weights, but its output depends on those of the layer it is given."""

    def forward(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x)


class Running(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.runner = nn.Conv2d(2, 3, 3, padding=1), Runner()
        self.head, self.last = nn.Conv2d(3, 2, 1), nn.Conv2d(2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.runner(self.head, self.body(x).tanh()).tanh())


def test_a_frozen_module_that_calls_a_given_layer_is_rerun() -> None:
    detector = double(Running)
    check(detector, posterior_of(detector, ["net.head", "net.last"]))


class Refining(NetDetector):
    """Uses its last layer again in decode, to refine the boxes."""

    def decode(self, raw: dict[str, Tensor], selection: Selection) -> Tensor:
        v = raw["map"][selection.where[0], :, selection.where[1]]  # (m, 2)
        v = v + self.net[-1](v[:, :, None, None].tanh())[:, :, 0, 0]
        return torch.stack([v[:, 0], v[:, 1], v.square().sum(1)], 1)


def test_a_layer_used_in_forward_and_decode_counts_in_both() -> None:
    detector = double(
        lambda: nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 2, 1)),
        Refining,
    )
    check(detector, posterior_of(detector))


# levels: a shared head over different layers, and frames that show only some of them


class Levels(Detector):
    """A head shared by two levels with one neck each; the input gives each token's level."""

    box_fields = ("x", "y")
    classes = ("a",)

    def __init__(self) -> None:
        super().__init__()
        self.necks, self.head = nn.ModuleList([nn.Linear(3, 4), nn.Linear(3, 4)]), nn.Linear(4, 2)

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Any]:
        features = [neck(inputs["x"]).tanh() for neck in self.necks]
        return {
            "features": features,
            "boxes": torch.stack([self.head(t) for t in features], 2),
            "level": inputs["level"],
        }

    def select(self, raw: dict[str, Any]) -> Selection:
        frame, token = torch.ones(raw["level"].shape).nonzero(as_tuple=True)
        where = (frame, token, raw["level"][frame, token])
        return Selection(
            frame, torch.ones(len(frame)), torch.zeros(len(frame), dtype=torch.long), where
        )

    def decode(self, raw: dict[str, Any], selection: Selection) -> Tensor:
        return raw["boxes"][selection.where].exp()

    def instances(self, raw: dict[str, Any], selection: Selection, with_logit: bool = False):
        frame, token, level = selection.where
        for number, features in enumerate(raw["features"]):
            index = (level == number).nonzero()[:, 0]
            yield (
                index,
                lambda index=index, features=features: self.head(
                    features[frame[index], token[index]]
                ).exp(),
            )

    def loss(self, raw: dict[str, Any], targets: Tensor) -> Tensor:
        return (raw["boxes"] - targets).square().flatten(1).sum(1)

    def parts(self):
        return {"head": self.head, "neck": self.necks}


@pytest.mark.parametrize("samples", [None, 1500], ids=["exact", "mc below"])
@pytest.mark.parametrize("levels", [(0, 1), (1, 0)], ids=str)
def test_a_level_missing_from_the_first_frame_is_right_later(
    levels: tuple[int, int], samples: int | None
) -> None:
    torch.manual_seed(0)
    detector = Levels().double()
    x, targets = (
        torch.randn(4, 5, 3, dtype=torch.float64),
        torch.randn(4, 5, 2, 2, dtype=torch.float64),
    )
    mixed = {"x": x, "level": torch.arange(20).reshape(4, 5) % 2}
    posterior = fit(detector, [(mixed, targets)], depth="neck", n_data=50, prior_precision=0.3)
    model = ExactGLM(detector, posterior, samples=samples)
    shown = [
        {"x": x[i : i + 1], "level": torch.full((1, 5), level)} for i, level in enumerate(levels)
    ]
    for inputs in (*shown, mixed):
        assert relative(model(inputs).covariance, box_covariance(detector, posterior, inputs)) < (
            0.2 if samples else 1e-9
        )


# features tapped by hooks


class Tapped(NetDetector):
    """Reads its features from where a hook stored them."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        net[1].register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.features = output

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        self.net[1](self.net[0](inputs))
        return {"map": self.net[2](self.features).flatten(2)}


@pytest.mark.parametrize("depth", ["head", ["net.2"]], ids=["all layers", "last layer"])
def test_a_bound_method_as_a_hook_stores_on_the_shadow(depth: Any) -> None:
    detector = double(two_layers, Tapped)
    detector.detect(
        torch.randn(1, 2, 5, 5, dtype=torch.float64)
    )  # another frame, whose features lie there
    stale = detector.features
    posterior, inputs = posterior_of(detector, depth), frames()[0][:1]
    models = {method: make(detector, posterior) for method, make in METHODS.items()}
    found = {method: model(inputs) for method, model in models.items()}
    assert detector.features is stale
    plain, expected = detector.detect(inputs), box_covariance(detector, posterior, inputs)
    for method, detections in found.items():
        assert torch.equal(detections.boxes, plain.boxes), method
        assert relative(detections.covariance, expected) < TOLERANCE[method], method


# a posterior that the boxes hardly depend on


@pytest.fixture(scope="module")
def center() -> TinyCenter:
    return TinyCenter(threshold=0.05, most=3, width=4).double().eval()


@pytest.fixture(scope="module")
def center_frames() -> list[Any]:
    """Small images with one object each."""
    targets = [
        [{"boxes": torch.tensor([[2.0 + i, 3.0, 1.5, 3.0, 0.4 * i]]), "labels": torch.tensor([i])}]
        for i in range(2)
    ]
    return [
        (inputs[:, :, :16, :16].double(), target)
        for (inputs, _), target in zip(shapes.frames(count=2), targets)
    ]


@pytest.mark.parametrize("depth", [["lateral"], ["lateral", "up"], ["backbone"]], ids=str)
def test_a_posterior_of_layers_below_the_instances_only(
    center: TinyCenter, center_frames: list[Any], depth: list[str]
) -> None:
    posterior = fit(center, center_frames, depth=depth, prior_precision=1.0)
    inputs = center_frames[0][0]
    expected = GLM(center, posterior)(inputs)
    assert float(expected.uncertainty.min()) > 0
    assert relative(ExactGLM(center, posterior)(inputs).covariance, expected.covariance) < 1e-9
    assert (
        relative(ExactGLM(center, posterior, samples=300)(inputs).covariance, expected.covariance)
        < 0.4
    )


@pytest.mark.parametrize(
    "make",
    [GLM, ExactGLM, MCGLM, partial(ExactGLM, samples=4)],
    ids=["glm", "exact", "mcglm", "mc below"],
)
def test_boxes_independent_of_the_posterior_have_variance_0(
    center: TinyCenter, center_frames: list[Any], make: Any
) -> None:
    posterior = fit(center, center_frames, depth=["head.branches.heatmap"], prior_precision=1.0)
    inputs = center_frames[0][0]
    found = make(center, posterior)(inputs)
    assert torch.equal(found.boxes, center.detect(inputs).boxes)
    assert found.covariance.shape == (3, 5, 5)
    assert not bool(found.covariance.any())


class OddLabels(NetDetector):
    """Returns another kind of selection, or labels that begin at 1."""

    change: Callable[[Selection], Any]

    def select(self, raw: Any) -> Any:
        return self.change(super().select(raw))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: (s.frame, s.scores, s.labels, s.where), "select.. returns a tuple: return Sel"),
        (lambda s: replace(s, labels=s.labels.float()), "labels of torch.float32: return Selec"),
        (lambda s: replace(s, labels=s.labels[:, None]), r"shapes \[.*, 1\)\]: return Selection"),
        (lambda s: replace(s, labels=s.labels + 1), "labels must be 0 to 0, for thing"),
    ],
    ids=["tuple", "floats", "shape", "from 1"],
)
def test_a_wrong_selection_is_named(change: Callable[[Selection], Any], message: str) -> None:
    detector = OddLabels(nn.Conv2d(2, 2, 1))
    items = [(torch.randn(1, 2, 2, 2), torch.randn(1, 2, 4))]
    model = ExactGLM(detector, fit(detector, items))
    detector.change = change
    with pytest.raises(BoxcovError, match=message):
        ExactGLM(detector, model.posterior)(items[0][0])


class ChannelsLast(nn.Module):
    """torch has no batched backward pass of a group norm of maps with channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.last = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.contiguous(memory_format=torch.channels_last))
        return self.last(self.norm(x).relu())


def test_a_group_norm_of_channels_last() -> None:
    detector, inputs = double(ChannelsLast), frames()[0]
    posterior = posterior_of(detector)
    expected = box_covariance(detector, posterior, inputs)
    for method in (GLM, ExactGLM):
        assert relative(method(detector, posterior)(inputs).covariance, expected) < 1e-9
    with pytest.raises(BoxcovError, match=r"cannot differentiate in forward mode .* use ExactGLM"):
        MCGLM(detector, posterior)(inputs)


class Silent(NetDetector):
    """Raises an error without a text along directions."""

    def decode(self, raw: dict[str, Tensor], selection: Selection) -> Tensor:
        if torch._C._functorch.maybe_current_level() is not None:
            raise RuntimeError
        return super().decode(raw, selection)


def test_an_error_of_forward_mode_may_have_no_text() -> None:
    detector = double(two_layers, Silent)
    with pytest.raises(BoxcovError, match=r"in forward mode \(RuntimeError\): use ExactGLM"):
        MCGLM(detector, posterior_of(detector))(frames()[0])
