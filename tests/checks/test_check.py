from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import boxcov
from boxcov import BoxcovError, Detector, Selection, check
from boxcov.checks import Report
from boxcov.checks.check import CHECKS
from boxcov.data import shapes
from boxcov.detectors.tiny import TinyCenter
from helpers.broken_adapters import BROKEN, Base, Counts, CoupledLoss
from helpers.nets import NetDetector

# a quarter of a scene, to be quick, of two that have objects there
QUARTERS = ((image[:, :, :32, :32].clone(), targets) for image, targets in shapes.frames(count=20))
FRAME, OTHER, *_ = (
    item for item in QUARTERS if int((item[1][0]["boxes"][:, :2] < 15).all(1).sum()) > 0
)


@pytest.fixture(scope="module")
def frame() -> Any:
    return FRAME


@cache
def report_of(make: Callable[[], Detector]) -> Report:
    return check(make(), FRAME)


@pytest.fixture(scope="module")
def sound(frame: Any) -> Report:
    return check(TinyCenter(seed=1, threshold=0.05, most=6, width=4), frame)


def test_a_sound_detector_passes(sound: Report) -> None:
    assert sound.ok, str(sound)
    unmade = [finding.name for finding in sound.findings if finding.passed is None]
    assert unmade == ["own output", "loss: labels", "instances", "candidates"]
    assert sound.findings[0].name == CHECKS[0][0]
    assert len(sound.findings) == len(CHECKS)


@pytest.mark.parametrize(
    ("make", "name", "seen"),
    [pytest.param(*case, id=f"{case[0].__name__}: {case[1]}") for case in BROKEN],
)
def test_broken_adapters_are_caught_by_their_own_check(
    make: Callable[[], Detector], name: str, seen: str
) -> None:
    report = report_of(make)
    finding = report[name]
    assert finding.passed is False, str(report)
    assert finding.todo or "()" in finding.seen  # boxcov's own errors name the method
    assert not report.ok
    assert re.search(seen, finding.seen), finding.seen


ALONE = {  # a broken promise, and the other checks that must fail with it
    "NoGrad": {"boxes: gradient"},
    "TooFewFields": set(),
    "ModeMatters": set(),
    "Overlap": set(),
    "DividedLoss": set(),
    "ChangesInputs": set(),
    "BadStages": set(),
    "NegativeSize": set(),
    "NotFinite": set(),
    "BoxesNotFinite": set(),
}


@pytest.mark.parametrize("name", ALONE)
def test_one_broken_promise_is_not_ten_findings(name: str) -> None:
    make = next(case[0] for case in BROKEN if case[0].__name__ == name)
    meant = {case[1] for case in BROKEN if case[0] is make}
    assert {finding.name for finding in report_of(make).failed} - meant == ALONE[name]


def test_a_coupled_loss_is_caught_with_a_given_frame(frame: Any) -> None:
    assert check(CoupledLoss(), frame, other=OTHER)["loss: frames apart"].passed is False
    assert check(Base(), frame, other=OTHER)["loss: frames apart"].seen.startswith(
        "the same beside another frame"
    )


def test_the_detector_is_untouched(frame: Any) -> None:
    detector = Counts()
    detector.train()
    detector.head.eval()
    detector.head.shared[0].weight.requires_grad_(False)
    before = {
        name: (tensor, tensor.clone(), tensor._version)
        for name, tensor in detector.state_dict(keep_vars=True).items()
    }
    modes = [module.training for module in detector.modules()]
    attributes = {name: set(module.__dict__) for name, module in detector.named_modules()}
    image = frame[0].clone()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    assert not check(detector, frame).ok
    assert torch.equal(torch.rand(3), expected)
    for name, tensor in detector.state_dict(keep_vars=True).items():
        was, copy, version = before[name]
        assert tensor is was
        assert torch.equal(tensor, copy)
        assert tensor.grad is None
        assert name == "calls" or tensor._version == version
    assert [module.training for module in detector.modules()] == modes
    assert {name: set(module.__dict__) for name, module in detector.named_modules()} == attributes
    assert not detector.head.shared[0].weight.requires_grad
    assert torch.equal(frame[0], image)


class AugmentsArray(Base):
    def augment(self, inputs: Any, targets: Any, generator: torch.Generator) -> Any:
        targets[0]["extra"][0] += 1
        return inputs, targets


@pytest.mark.parametrize(("make", "passed"), [(Base, True), (AugmentsArray, False)])
def test_arrays_of_numpy_that_augment_changes(make: Any, passed: bool) -> None:
    inputs, (target,) = FRAME
    extra = {"extra": np.array([1.0, np.nan])}
    assert check(make(), (inputs, [{**target, **extra}]))["augment"].passed is passed


def test_layers_and_cost(sound: Report, frame: Any) -> None:
    detector = TinyCenter(seed=1, threshold=0.05, most=6, width=4)
    posterior = boxcov.fit(detector, [frame], depth="backbone")
    inside = [row for row in sound.layers if not row.reason]
    assert {row.name for row in inside} == {
        block.layer.weight for block in posterior.blocks.values()
    }
    assert [(d.depth, d.layers) for d in sound.depths] == [
        ("head", 9),
        ("neck", 11),
        ("backbone", 16),
    ]
    for depth in sound.depths:
        made = boxcov.fit(detector, [frame], depth=depth.depth)
        assert depth.parameters == sum(block.size for block in made.blocks.values())
        numbers = sum(
            block.Q.vectors.numel() + block.H.vectors.numel() for block in made.blocks.values()
        )
        assert depth.factors_mib == pytest.approx(4 * numbers / 2**20)
        assert depth.fit_mib == 2 * depth.factors_mib
    norms = [row for row in sound.layers if row.reason]
    assert {row.reason for row in norms} == {"scale and shift of BatchNorm2d"}
    names = {
        name for name, module in detector.named_modules() if isinstance(module, nn.BatchNorm2d)
    }
    assert {row.name.rpartition(".")[0] for row in norms} == names
    assert sound.milliseconds > 0


class Odd(nn.Module):
    """A learned scale, and a layer that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.idle = nn.Conv2d(2, 3, 1), nn.Conv2d(2, 2, 1)
        self.scale = nn.Parameter(torch.ones(3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) * self.scale


def test_layers_without_factors_are_named_with_the_way_out() -> None:
    detector, item = NetDetector(Odd()), (torch.randn(1, 2, 5, 5), torch.randn(1, 3, 25))
    report = check(detector, item)
    assert report.ok, str(report)
    reasons = {row.name: row.reason for row in report.layers}
    assert reasons["net.conv.weight"] == ""
    assert reasons["net.scale"].startswith("used otherwise")
    assert reasons["net.idle.weight"] == reasons["net.idle.bias"] == "not used in this pass"
    fixed = ["net.scale", "net.idle.weight", "net.idle.bias"]
    assert f"exclude={fixed!r}" in report["layers"].todo
    assert list(boxcov.fit(detector, [item], options=boxcov.FitOptions(exclude=fixed)).blocks) == [
        "net.conv"
    ]
    assert "bias of a linear layer" in str(report)
    assert report["layers"].seen == (
        "1 layer can be in a posterior; 1 parameter cannot, used otherwise; "
        "2 parameters not used in this pass"
    )


def test_weights_of_a_group_norm_are_called_what_they_are() -> None:
    detector = NetDetector(nn.Sequential(nn.Conv2d(2, 4, 1), nn.GroupNorm(2, 4)))
    report = check(detector, (torch.randn(1, 2, 5, 5), torch.randn(1, 4, 25)))
    reasons = {row.name: row.reason for row in report.layers if row.reason}
    assert reasons == dict.fromkeys(("net.1.weight", "net.1.bias"), "scale and shift of GroupNorm")
    # no constant: the covariance of the convolution passes through it
    posterior = boxcov.fit(detector, [(torch.randn(1, 2, 5, 5), None)], fisher="identity", n_data=1)
    assert list(posterior.blocks) == ["net.0"]


def test_what_a_detector_without_select_static_cannot_do() -> None:
    detector = NetDetector(nn.Conv2d(2, 3, 1))
    finding = check(detector, (torch.randn(1, 2, 5, 5), None))["select_static"]
    assert finding.passed is None
    for word in ("not implemented (optional)", "no ONNX file", "boxcov.compile", "deploy.md"):
        assert word in finding.seen


def test_fields_without_labelled_objects_are_noted(sound: Report) -> None:
    report = check(NetDetector(nn.Conv2d(2, 3, 1)), (torch.randn(1, 2, 5, 5), None))
    finding = report["names"]
    assert finding.passed
    for words in ("calibrate and evaluate", "x y w l yaw, or x1 y1 x2 y2"):
        assert words in finding.todo
    assert sound["names"].todo == ""
    # what the gradient is counted over
    assert re.search(
        r"\d+ of the \d+ weight and bias tensors of layers that can be in a posterior",
        report["boxes: gradient"].seen,
    )


def test_the_cost_of_scores_is_named(sound: Report) -> None:
    assert "backward pass" not in sound["logits"].seen
    slow = report_of(Base)["logits"]
    assert slow.passed
    assert "with_logit=True takes one backward pass per box" in slow.seen
    assert slow.todo.startswith("append the logit in instances(with_logit=True)")


def test_a_static_selection_in_another_order_is_named(frame: Any) -> None:
    class ByScore(Base):
        def select(self, raw: Any) -> Any:
            found = super().select(raw)
            where = tuple(t.flip(0) for t in found.where)
            return Selection(where[0], found.scores.flip(0), found.labels.flip(0), where)

    finding = check(ByScore(), frame)["select_static"]
    assert finding.passed
    assert "in another order, which boxcov.compile does not take" in finding.seen


def test_limits_that_leave_boxes_off_are_not_an_error(frame: Any) -> None:
    class Beyond(Base):
        def select_static(self, raw: Any, limits: Any) -> Any:
            found = super().select_static(raw, limits)
            return replace(found, left_off=found.left_off + 3)

    finding = check(Beyond(), frame)["select_static"]
    assert finding.passed is None
    assert "3 boxes or candidates are beyond StaticLimits(" in finding.seen


class Sized(Base):
    """The size of the image is a raw output that decode() reads as a number."""

    def forward(self, inputs: Tensor) -> Any:
        return {**super().forward(inputs), "image": torch.tensor([[32.0, 32.0]] * len(inputs))}

    def decode(self, raw: Any, selection: Any) -> Tensor:
        height, width = raw["image"][0].tolist()
        return super().decode(raw, selection) * torch.tensor([width, height, 1, 1, 1]) / 32


def test_a_float_without_weights_needs_no_derivative(frame: Any) -> None:
    finding = check(Sized(), frame)["decode: derivative"]
    assert finding.passed, finding.seen


class Prepares(Base):
    """Prepares its inputs by numpy inside forward()."""

    def forward(self, inputs: Tensor) -> Any:
        return super().forward(torch.from_numpy(inputs.numpy() * 1))


def test_preprocessing_inside_forward_is_named(frame: Any) -> None:
    finding = check(Prepares(), frame)["weights to boxes"]
    assert finding.passed is False
    assert "hands a tensor to numpy, PIL or cv2" in finding.seen
    assert finding.todo.startswith("prepare the inputs before forward()")


def test_the_models_own_boxes(frame: Any) -> None:
    detector = Base()
    boxes = detector.eval().detect(frame[0]).boxes
    assert check(detector, frame, reference=boxes.flip(0))["own output"].passed
    lost = check(detector, frame, reference=boxes[1:] + 0.5)["own output"]
    assert lost.passed is False
    assert "5 of the model's own 5 boxes are not among the 6" in lost.seen
    assert check(detector, frame, reference=boxes[:, :3])["own output"].passed is False


def test_text_and_json(sound: Report, frame: Any) -> None:
    text = str(sound)
    lines = text.splitlines()
    assert lines[0].startswith("TinyCenter: 6 boxes")
    assert lines[-1] == "26 of 26 checks passed, 4 skipped"
    column = 10 + max(len(name) for name, _ in CHECKS)
    assert all(
        any(
            line[8:column].rstrip() == f.name and f.seen.startswith(line[column:]) for line in lines
        )
        for f in sound.findings
    )
    assert max(map(len, lines)) <= 125
    again = json.loads(sound.to_json())
    assert again["ok"] is True
    assert [finding["name"] for finding in again["findings"]] == [name for name, _ in CHECKS]
    assert again["layers"][0]["name"] == "backbone.0.0.weight"
    failed = str(report_of(Counts))
    assert "  FAIL  state" in failed
    with pytest.raises(BoxcovError, match="no finding 'speed': there are names, parts"):
        _ = sound["speed"]
    assert "-> do not write to buffers" in failed


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_of_half_precision_is_no_finding(frame: Any, dtype: torch.dtype) -> None:
    detector = TinyCenter(threshold=0.05, most=3, width=4).eval().to(dtype)
    found = check(detector, (frame[0].to(dtype), None))["weights to boxes"]
    assert found.passed is None, found.seen
    assert "check it in float32" in found.seen


def test_without_targets_the_loss_is_not_checked(frame: Any) -> None:
    report = check(Base(), (frame[0], None))
    assert report.ok
    assert (
        report["loss"].passed
        is report["loss: frames apart"].passed
        is report["loss: gradient"].passed
        is None
    )


@pytest.mark.parametrize("reason", ["one frame at a time", ""])
def test_frames_that_cannot_be_batched_are_reported(frame: Any, reason: str) -> None:
    class Whole(Base):
        def forward(self, inputs: Tensor) -> Any:
            if len(inputs) > 1:
                raise RuntimeError(reason)
            return super().forward(inputs)

    report = check(Whole(), frame)
    assert report.ok
    assert f"RuntimeError: {reason}" in report["loss: frames apart"].seen
    assert report["boxes: in a batch"].passed is None


def test_wrong_arguments_are_refused(frame: Any) -> None:
    with pytest.raises(
        BoxcovError,
        match=r"expected a boxcov.Detector, got a Linear: boxcov.wrap makes one",
    ):
        check(nn.Linear(2, 2), frame)  # type: ignore[arg-type]
    with pytest.raises(
        BoxcovError, match=r"frame must be a pair \(inputs, targets\), got a Tensor"
    ):
        check(Base(), frame[0])


def test_frame_numbers_of_no_box_are_integers_too(frame: Any) -> None:
    class NoBox(Base):
        def select(self, raw: Any) -> Any:
            none = torch.zeros(0)
            return Selection(none, none, none.long(), ())

    assert "select() returns frames of torch.float32" in check(NoBox(), frame)["select"].seen


class FirstFrame(Base):
    """Reads the boxes of the first frame, whatever the batch."""

    def select(self, raw: Any) -> Selection:
        found = super().select(raw)
        first = found.frame == 0
        own = {n: getattr(found, n)[first] for n in ("frame", "scores", "labels")}
        return replace(found, **own, where=tuple(t[first] for t in found.where))


def test_a_selection_of_the_first_frame_alone_is_reported(frame: Any) -> None:
    found = check(FirstFrame(), frame)["boxes: in a batch"]
    assert found.passed is False
    assert "in a batch of two, as its last frame" in found.seen
