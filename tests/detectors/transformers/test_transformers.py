"""DETR, YOLOS and RT-DETR of Hugging Face transformers, small and random, under the contract."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="transformers is not installed")

import transformers

import boxcov
from boxcov import GLM, MCGLM, BoxcovError, BoxcovWarning, ExactGLM, Posterior, Selection, fit
from boxcov.data import coco
from boxcov.detectors.transformers import QueryDetector, wrap
from boxcov.predict import instances
from boxcov.predict.route import exact
from helpers.transformers_cases import (
    MODELS,
    NAMES,
    PROCESSORS,
    detr,
    made,
    objects,
    pixels,
    rt_detr,
    yolos,
)
from oracles.dense import relative


@pytest.fixture(scope="module", params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def detector(name: str) -> QueryDetector:
    return made(name)


@pytest.fixture(scope="module")
def frames() -> list:
    return [(pixels(seed=i), [objects(3 - i, seed=i)]) for i in range(3)]


@pytest.fixture(scope="module")
def posterior(detector: QueryDetector, frames: list) -> Posterior:
    return fit(detector, frames, n_data=100, prior_precision=1.0)


def state(model: nn.Module) -> list[Any]:
    tensors = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    modes = [
        (m.training, dict(m._forward_hooks), dict(m._forward_pre_hooks), sorted(m.__dict__))
        for m in model.modules()
    ]
    return [tensors, modes, [(p.requires_grad, p.grad) for p in model.parameters()]]


def same(a: list[Any], b: list[Any]) -> bool:
    return (
        a[1:] == b[1:]
        and a[0].keys() == b[0].keys()
        and all(torch.equal(t, b[0][key]) for key, t in a[0].items())
    )


# boxes are the model's own


def test_boxes_equal_the_models_own_bit_for_bit(name: str, detector: QueryDetector) -> None:
    x = pixels(2, seed=5)
    with torch.no_grad():
        out = detector.model(x)
    processor = getattr(transformers, PROCESSORS[name])()
    for sizes in (torch.tensor([[64, 96], [64, 96]]), torch.tensor([[480, 640], [100, 33]])):
        found = detector.detect({"pixel_values": x, "sizes": sizes})
        theirs = processor.post_process_object_detection(
            out, threshold=detector.threshold, target_sizes=sizes
        )
        for b, one in enumerate(found.frames(2)):
            known = theirs[b]["labels"] > 0  # 0 is N/A
            assert int(known.sum()) > 1
            assert torch.equal(one.boxes, theirs[b]["boxes"][known])
            assert torch.equal(one.scores, theirs[b]["scores"][known])
            assert [NAMES[int(n)] for n in theirs[b]["labels"][known]] == [
                detector.classes[i] for i in one.labels
            ]
    assert torch.equal(
        detector.detect(x).boxes,
        detector.detect({"pixel_values": x, "sizes": torch.tensor([[64, 96]] * 2)}).boxes,
    )


def test_boxes_of_version_2_equal_the_models_own() -> None:
    detector, x = wrap(rt_detr(version=2), threshold=0.15), pixels(2, seed=5)
    with torch.no_grad():
        out = detector.model(x)
    processor = transformers.RTDetrImageProcessorPil()
    theirs = processor.post_process_object_detection(
        out, threshold=0.15, target_sizes=torch.tensor([[64, 96], [64, 96]])
    )
    for b, one in enumerate(detector.detect(x).frames(2)):
        known = theirs[b]["labels"] > 0
        assert int(known.sum()) > 1
        assert torch.equal(one.boxes, theirs[b]["boxes"][known])
        assert torch.equal(one.scores, theirs[b]["scores"][known])


def test_the_general_wrap_knows_the_library(detector: QueryDetector) -> None:
    found = boxcov.wrap(detector.model)
    assert type(found) is type(detector)
    assert found.classes == detector.classes


def test_a_mask_reaches_the_model() -> None:
    detector, x = made("detr"), pixels(2)
    mask = torch.ones(2, 64, 96, dtype=torch.long)
    mask[1, :, 50:] = 0
    with torch.no_grad():
        out = detector.model(x, pixel_mask=mask)
    raw = detector({"pixel_values": x, "pixel_mask": mask})
    assert torch.equal(raw["boxes"], out.pred_boxes)
    assert not torch.equal(raw["boxes"], detector(x)["boxes"])


# covariances


def test_exact_is_one_backward_pass_a_number_at_d_passes(
    detector: QueryDetector, frames: list, posterior: Posterior, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*given: Any) -> None:
        raise AssertionError("not by instance")

    monkeypatch.setattr(exact, "autograd_covariance", slow)
    batched: list[int] = []
    passes = instances.field_gradients
    monkeypatch.setattr(
        instances,
        "field_gradients",
        lambda boxes, edges: batched.append(boxes.shape[1]) or passes(boxes, edges),
    )
    x = torch.cat([frames[0][0], frames[1][0]])
    found = ExactGLM(detector, posterior, with_logit=True)(x)
    assert len(found) > 4
    assert batched == [
        4,
        5,
    ]  # D passes for the boxes, D + 1 with the logit, however many boxes there are
    expected = GLM(detector, posterior, with_logit=True)(x)
    assert relative(found.covariance, expected.covariance) < 1e-5
    assert relative(found.score_variance, expected.score_variance) < 1e-5
    assert (
        relative(found.score_covariance, expected.score_covariance) < 1e-5
        or float(expected.score_covariance.norm()) == 0
    )
    assert bool((found.uncertainty > 0).all())
    assert bool((found.score_variance > 0).all())


def test_boxes_and_the_model_stay_as_they_are(
    detector: QueryDetector, frames: list, posterior: Posterior
) -> None:
    before, x = state(detector), frames[0][0]
    plain = detector.detect(x)
    fit(detector, frames[:1], prior_precision=1.0)
    for model in (
        MCGLM(detector, posterior, samples=4),
        GLM(detector, posterior),
        ExactGLM(detector, posterior),
    ):
        found = model(x)
        assert all(
            torch.equal(getattr(found, part), getattr(plain, part))
            for part in ("boxes", "scores", "labels", "frame")
        )
    assert same(state(detector), before)


# whether a dead unit's gradient is exactly zero or not depends on the processor's rounding
@pytest.mark.filterwarnings("ignore:the loss of .* frames? has a zero gradient")
def test_deeper_layers_are_exact_too(detector: QueryDetector, frames: list) -> None:
    depth = list(detector.parts())[-1]
    posterior = fit(detector, frames[:2], depth=depth, n_data=100, prior_precision=1.0)
    products = {
        n.removesuffix(".weight")
        for n, p in detector.named_parameters()
        if p.dim() > 1 and n.endswith(".weight")
    }
    left = [n for n in products - set(posterior.blocks) if "embed" not in n]
    assert not left, left
    best = detector.detect(frames[0][0]).scores.sort(descending=True).values[:3]
    few = wrap(
        detector.model, threshold=float(best[-1]) - 1e-4
    )  # a pass through the whole network for every number
    found, expected = ExactGLM(few, posterior)(frames[0][0]), GLM(few, posterior)(frames[0][0])
    assert len(found) >= len(best) > 0
    assert relative(found.covariance, expected.covariance) < 1e-4


def test_parts_are_apart(detector: QueryDetector) -> None:
    modules = [
        m
        for part in detector.parts().values()
        for m in (part if isinstance(part, tuple) else (part,))
    ]
    found = [id(p) for module in modules for p in module.parameters()]
    assert len(found) == len(set(found))


def test_fused_attention_has_a_derivative_in_forward_mode(frames: list) -> None:
    detector = made("detr")
    posterior = fit(detector, frames, depth="neck", n_data=100, prior_precision=1.0)
    fused = MCGLM(detector, posterior, samples=400)(frames[0][0])
    assert relative(fused.covariance, GLM(detector, posterior)(frames[0][0]).covariance) < 0.25
    detector.model.set_attn_implementation("eager")
    plain = MCGLM(detector, posterior, samples=400)(frames[0][0])
    assert relative(fused.covariance, plain.covariance) < 1e-3


def test_finite_differences_that_cannot_be_checked_say_so(frames: list) -> None:
    detector = made("rt_detr")
    posterior = fit(detector, frames, depth="neck", n_data=100, prior_precision=1.0)
    with pytest.warns(
        BoxcovWarning, match="the step could not be checked, as this detector uses an operation"
    ):
        MCGLM(detector, posterior, samples=2, derivative="fd", epsilon=1e-3)(frames[0][0])


@pytest.mark.parametrize(
    "layer", ["bbox_embed.0.layers.2", "bbox_embed.1.layers.2", "query_pos_head.layers.1"]
)
def test_the_derivative_goes_through_the_boxes_of_earlier_layers(layer: str) -> None:
    """RT-DETR detaches them in training: the last box depends on them all the same."""
    detector = made("rt_detr").double()
    x = pixels().double()
    with torch.no_grad():
        selection = detector.select(detector(x))
    weight = detector.model.model.decoder.get_submodule(layer).weight
    direction = torch.randn(
        weight.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    boxes = detector.decode(detector(x), selection)
    probe = torch.linspace(-1, 1, boxes.numel(), dtype=torch.float64).reshape(boxes.shape)
    slope = (torch.autograd.grad((boxes * probe).sum(), weight)[0] * direction).sum()
    ends = []
    for step in (1e-6, -1e-6):
        with torch.no_grad():
            weight.add_(step * direction)
            ends.append((detector.decode(detector(x), selection) * probe).sum())
            weight.sub_(step * direction)
    assert abs(float(slope - (ends[0] - ends[1]) / 2e-6)) < 1e-4 * abs(float(slope))


def test_one_decoder_layer_and_one_query_twice() -> None:
    detector = wrap(rt_detr(layers=1), threshold=0.0)
    frames = [(pixels(), [objects(2)])]
    posterior = fit(detector, frames, prior_precision=1.0)
    found, expected = ExactGLM(detector, posterior)(pixels()), GLM(detector, posterior)(pixels())
    selection = detector.select(detector(pixels()))
    assert len(selection.where[1].unique()) < len(selection)
    assert relative(found.covariance, expected.covariance) < 1e-5


def test_the_second_version_of_rt_detr(frames: list) -> None:
    detector, x = wrap(rt_detr(version=2), threshold=0.3), pixels(2)
    with torch.no_grad():
        out = detector.model(x)
    raw = detector(x)
    assert torch.equal(raw["boxes"], out.pred_boxes)
    assert torch.equal(raw["logits"], out.logits)
    posterior = fit(detector, frames, prior_precision=1.0)
    found, expected = ExactGLM(detector, posterior)(x), GLM(detector, posterior)(x)
    assert len(found) > 2
    assert relative(found.covariance, expected.covariance) < 1e-5


# the loss


def labelled(targets: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """As the models take them: centre and size in parts of the image, the model's numbers."""
    found = []
    for target in targets:
        low, high = (target["boxes"] / torch.tensor([96.0, 64, 96, 64])).split(2, 1)
        found.append(
            {
                "boxes": torch.cat([(low + high) / 2, high - low], 1),
                "class_labels": target["labels"] + 1,
            }
        )
    return found


def test_the_loss_of_an_image_is_the_model_s_of_a_batch_of_one(detector: QueryDetector) -> None:
    targets = [objects(3, seed=1), objects(0), objects(1, seed=2)]
    x = pixels(3, seed=3)
    found = detector.loss(detector(x), targets)
    alone = [
        detector.model(x[b : b + 1], labels=labelled(targets[b : b + 1])).loss for b in range(3)
    ]
    torch.testing.assert_close(found, torch.stack(alone), rtol=1e-4, atol=1e-5)


def test_the_model_divides_by_all_objects_of_a_batch(detector: QueryDetector) -> None:
    """So its box losses of a batch are the means of the images', by their numbers of objects."""
    targets = [objects(3, seed=1), objects(1, seed=2)]
    x = pixels(2, seed=3)
    whole = detector.model(x, labels=labelled(targets)).loss_dict
    alone = [
        detector.model(x[b : b + 1], labels=labelled(targets[b : b + 1])).loss_dict
        for b in range(2)
    ]
    for key in ("loss_bbox", "loss_giou"):
        torch.testing.assert_close(
            whole[key], (3 * alone[0][key] + alone[1][key]) / 4, rtol=1e-4, atol=1e-5
        )


def test_losses_on_all_layers_of_the_decoder(frames: list) -> None:
    detector = wrap(detr(auxiliary_loss=True), threshold=0.1)
    x, targets = frames[0]
    expected = detector.model(x, labels=labelled(targets)).loss
    torch.testing.assert_close(
        detector.loss(detector(x), targets)[0], expected, rtol=1e-4, atol=1e-5
    )
    more = fit(detector, frames, n_data=100, prior_precision=1.0)
    assert (
        relative(ExactGLM(detector, more)(x).covariance, GLM(detector, more)(x).covariance) < 1e-5
    )


def test_invalid_targets(detector: QueryDetector) -> None:
    raw = detector(pixels(2))
    with pytest.raises(BoxcovError, match="2 frames in the batch, but targets for 1"):
        detector.loss(raw, [objects(1)])
    wrong = {**objects(1), "labels": torch.tensor([3])}
    with pytest.raises(BoxcovError, match="targets of frame 1: labels from 3 to 3, but 3 classes"):
        detector.loss(raw, [objects(1), wrong])


# what is given


def test_classes() -> None:
    model = yolos()
    assert wrap(model).classes == ("cat", "cow", "dog")
    some = wrap(model, ["dog", "cat"], threshold=0.0)
    everything = wrap(model, threshold=0.0).detect(pixels())
    found = some.detect(pixels())
    assert [some.classes[i] for i in found.labels] == [
        n for n in (everything.classes[i] for i in everything.labels) if n != "cow"
    ]
    assert wrap(model, {"Kuh": 2}).labels.numbers == (2,)
    for classes, message in (
        (["cat", "horse"], "classes name horse, unknown to the model: it has cat, cow, dog"),
        ([], "classes must be different names, at least one, got none"),
        (["cat", "cat"], "classes must be different names, at least one"),
        ("cat", "a list of names, got the string 'cat'"),
        ({"cat": 9}, "numbers that the model does not have: cat: 9; it has 0 to 3"),
    ):
        with pytest.raises(BoxcovError, match=message):
            wrap(model, classes)
    model.config.id2label = {0: "cat", 1: "cat", 2: "dog", 3: "cow"}
    with pytest.raises(BoxcovError, match="several numbers for cat"):
        wrap(model)
    old = {"couch": "sofa", "tv": "tvmonitor"}
    model.config.id2label = {i: old.get(n, n) for i, n in enumerate(["N/A", *coco.CLASSES])}
    assert wrap(model).labels.classes == coco.CLASSES
    assert wrap(model).labels.numbers == tuple(range(1, 81))


def test_invalid_inputs(detector: QueryDetector) -> None:
    for inputs in (torch.zeros(3, 64, 96), torch.zeros(1, 1, 64, 96)):
        with pytest.raises(BoxcovError, match=r"images must be \(B, 3, h, w\), got"):
            detector(inputs)
    with pytest.raises(BoxcovError, match="optionally pixel_mask and sizes, got a dict of images"):
        detector({"images": pixels()})
    with pytest.raises(BoxcovError, match=r"got a BatchFeature: dict\(...\) makes a dict of it"):
        detector(transformers.BatchFeature({"pixel_values": pixels()}))
    with pytest.raises(BoxcovError, match="threshold must be from 0 to 1, got 7"):
        wrap(detector.model, threshold=7)


def test_nothing_found_is_nothing(detector: QueryDetector, posterior: Posterior) -> None:
    quiet = wrap(detector.model, threshold=1.0)
    found = ExactGLM(quiet, posterior, with_logit=True)(pixels())
    assert (len(found), found.covariance.shape, found.score_variance.shape) == (0, (0, 4, 4), (0,))
    nothing = torch.zeros(0, dtype=torch.long)
    assert quiet.decode(
        quiet(pixels()), Selection(nothing, torch.zeros(0), nothing, (nothing, nothing))
    ).shape == (0, 4)
