from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import boxcov
from boxcov import BoxcovError, Detector, Selection
from boxcov.data import shapes
from boxcov.detectors.tiny import TinyCenter
from boxcov.posterior import posterior

FRAMES = [(image[:, :, :32, :32].clone(), targets) for image, targets in shapes.frames(count=3)]


def tiny() -> TinyCenter:
    return TinyCenter(seed=1, threshold=0.05, most=6, width=4).eval()


def wrapped(model: TinyCenter, **other: Any) -> Detector:
    """Return a TinyCenter as a wrapped foreign model."""
    given: dict[str, Any] = {
        "select": TinyCenter.select,
        "decode": TinyCenter.decode,
        "loss": TinyCenter.loss,
        "parts": {
            "head": "head",
            "neck": ("lateral", "up"),
            "backbone": [getattr(model, "backbone", "backbone"), "deep"],
        },
        "box_fields": TinyCenter.box_fields,
        "classes": TinyCenter.classes,
    }
    return boxcov.wrap(model, **{**given, **other})


OPTIONAL = {
    name: getattr(TinyCenter, name) for name in ("instances", "stages", "logits", "sample_targets")
}


@pytest.fixture(scope="module")
def pair() -> tuple[TinyCenter, Detector]:
    model = tiny()
    return model, wrapped(model, **OPTIONAL)


def fitted(detector: Detector, **how: Any) -> boxcov.Posterior:
    return boxcov.fit(detector, FRAMES, depth="neck", n_data=100, prior_precision=1.0, **how)


def test_it_is_the_detector_that_it_wraps(monkeypatch, pair: tuple[TinyCenter, Detector]) -> None:
    model, detector = pair
    seed_of = (
        posterior._layer_seed
    )  # draws go by the names of layers, which have a prefix in the one that wraps
    monkeypatch.setattr(
        posterior, "_layer_seed", lambda seed, name: seed_of(seed, name.removeprefix("model."))
    )
    ours, theirs = (fitted(d, fisher="mc") for d in (detector, model))
    assert {name.removeprefix("model.") for name in ours.blocks} == set(theirs.blocks)
    for method in (boxcov.ExactGLM, boxcov.MCGLM):
        a, b = (
            method(d, p, with_logit=True)(FRAMES[0][0])
            for d, p in ((detector, ours), (model, theirs))
        )
        assert len(a) == 6
        for name in ("boxes", "scores", "labels", "covariance", "score_variance"):
            assert torch.equal(getattr(a, name), getattr(b, name)), (method, name)


def test_what_was_not_given_is_not_there(pair: tuple[TinyCenter, Detector]) -> None:
    model, detector = pair
    plain = wrapped(model)
    assert boxcov.check(plain, FRAMES[0])["instances"].passed is None
    with pytest.raises(BoxcovError, match=r"WrappedTinyCenter has no logits"):
        boxcov.ExactGLM(plain, fitted(detector), with_logit=True)
    with pytest.raises(BoxcovError, match=r"has no candidates\(\)"):
        boxcov.NMSSpread(plain)
    a, b = (boxcov.ExactGLM(d, fitted(d))(FRAMES[0][0]).covariance for d in (plain, detector))
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)


def test_names_with_and_without_the_prefix() -> None:
    parts = {"head": "model.head", "neck": ("lateral", "model.up"), "backbone": "backbone"}
    detector = wrapped(tiny(), parts=parts)
    assert [len(part) for part in detector.parts().values()] == [1, 2, 1]
    ours, theirs = (
        fitted(detector, options=boxcov.FitOptions(exclude=exclude))
        for exclude in (["up", "head.shared.0.weight"], ["model.up", "model.head.shared.0.weight"])
    )
    assert set(ours.blocks) == set(theirs.blocks)
    assert not any("up" in name for name in ours.blocks)
    by_list = [boxcov.fit(detector, FRAMES, depth=[name]).blocks for name in ("up", "model.up")]
    assert list(by_list[0]) == list(by_list[1])


def test_mode_copies_and_bound_methods() -> None:
    model = tiny().train()
    detector = wrapped(
        model, loss=model.loss, forward=TinyCenter.forward
    )  # bound to the model: taken for its function
    assert detector.training
    before = model.state_dict()["backbone.0.1.running_mean"].clone()
    posterior = fitted(detector)
    assert torch.equal(model.state_dict()["backbone.0.1.running_mean"], before)
    assert model.training
    again = copy.deepcopy(detector)
    assert again.model is not model
    assert torch.equal(
        boxcov.ExactGLM(again, posterior)(FRAMES[0][0]).covariance,
        boxcov.ExactGLM(detector, posterior)(FRAMES[0][0]).covariance,
    )
    assert "boxes x y w l yaw of car, pedestrian" in repr(detector)


def test_fields_that_wrap_around() -> None:
    model = tiny()
    assert wrapped(model).periods == Detector.periods
    assert wrapped(model, periods={"x": 32.0}).periods == {"x": 32.0}
    assert Detector.periods == {"yaw": pytest.approx(6.2831853)}
    with pytest.raises(BoxcovError, match="periods of z, but the box fields are"):
        wrapped(model, periods={"z": 1.0})


def two_arguments(raw: Any, selection: Selection) -> Tensor:
    return raw


MODEL = tiny()


def from_around(model: nn.Module, inputs: Tensor) -> Any:
    return MODEL(inputs)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"decode": two_arguments},
            r"decode must be a function decode\(model, raw, selection\): too many positional",
        ),
        ({"decode": 3}, r"decode must be a function decode\(model, raw, selection\), got a int"),
        (
            {"forward": from_around},
            r"forward reads MODEL from an enclosing scope, but boxcov works on a shadow",
        ),
        (
            {"forward": lambda model, inputs: MODEL.head(inputs)},
            r"forward reads MODEL from an enclosing scope",
        ),
        ({"loss": MODEL.head.forward}, r"loss is bound to another module"),
        ({"loss": MODEL.head}, r"loss is bound to another module"),
        ({"parts": {}}, r"parts must name the modules of the head"),
        (
            {"parts": {"head": "heads"}},
            r"the part 'head' names 'heads', which is not a module of the model: its children",
        ),
        (
            {"parts": {"head": nn.ReLU()}},
            r"the part 'head' names a ReLU, which is not a module of the model: its children",
        ),
        (
            {"parts": {"head": MODEL.head.shared[0].weight}},
            r"^the part 'head' names the parameter head.shared.0.weight, not a module: name "
            r"head.shared.0, which holds it; FitOptions\(exclude=",
        ),
        (
            {"parts": {"head": ("head.shared", "model.head.shared.0.weight")}},
            r"^the part 'head' names the parameter head.shared.0.weight, not a module",
        ),
        (
            {"parts": {"head": nn.Parameter(torch.ones(2))}},
            r"^the part 'head' names a Parameter, which is not a module of the model: its",
        ),
        (
            {"box_fields": "x y w"},
            r"box_fields must be a sequence of names, got the string .*: "
            r"write box_fields=\('x', 'y', 'w'\)",
        ),
        ({"box_fields": ("x", "x")}, r"box_fields must be distinct names"),
        ({"classes": ()}, r"classes must be distinct names, at least one"),
    ],
)
def test_what_cannot_be_wrapped(given: dict[str, Any], message: str) -> None:
    with pytest.raises(BoxcovError, match=message):
        wrapped(MODEL, **given)


def test_what_is_no_model() -> None:
    with pytest.raises(BoxcovError, match=r"wrap takes a torch.nn.Module, got a function"):
        wrapped(two_arguments)  # type: ignore[arg-type]


def test_a_closure_over_a_part_is_refused() -> None:
    model = tiny()
    head = model.head
    with pytest.raises(BoxcovError, match=r"decode reads head from an enclosing scope"):
        wrapped(model, decode=lambda model, raw, selection: head(raw))


def test_signals_of_a_wrapped_model(pair: tuple[TinyCenter, Detector]) -> None:
    model, detector = pair
    raw = model(FRAMES[0][0])
    selection = model.select(raw)
    assert wrapped(model).signals(raw, selection) == {}
    (logit,) = detector.signals(raw, selection).values()  # it has logits()
    assert torch.equal(logit, model.logits(raw, selection))
    informed = wrapped(model, signals=TinyCenter.signals)
    assert informed.signals(raw, selection).keys() == model.signals(raw, selection).keys()
    assert boxcov.check(informed, FRAMES[0])["signals"].passed


@pytest.mark.filterwarnings("ignore:with_logit=True takes:boxcov.BoxcovWarning")
def test_instances_may_ignore_the_score_logit(pair: tuple[TinyCenter, Detector]) -> None:
    model, detector = pair
    plain = wrapped(
        model, **{**OPTIONAL, "instances": lambda m, raw, selection: m.instances(raw, selection)}
    )
    raw = plain(FRAMES[0][0])
    assert plain.instances(raw, plain.select(raw), with_logit=True) is None
    a, b = (
        boxcov.ExactGLM(d, fitted(d), with_logit=True)(FRAMES[0][0]).score_variance
        for d in (plain, detector)
    )
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)


class OfALibrary(nn.Linear):
    __module__ = "torchvision.models"


def test_what_a_librarys_adapter_would_not_use_is_refused() -> None:
    with pytest.raises(BoxcovError, match="no signals=, periods= for a model of torchvision alone"):
        boxcov.wrap(OfALibrary(1, 1), signals=lambda model, raw, selection: {}, periods={})


def test_what_a_model_without_functions_needs() -> None:
    with pytest.raises(BoxcovError, match="to wrap a Linear, give select=, decode=, loss=, parts="):
        boxcov.wrap(nn.Linear(1, 1))
    with pytest.raises(BoxcovError, match="to wrap a Linear, give parts=, classes=: see docs"):
        boxcov.wrap(
            nn.Linear(1, 1),
            select=lambda model, raw: raw,
            decode=lambda model, raw, selection: raw,
            loss=lambda model, raw, targets: raw,
            box_fields=["x"],
        )
