"""Small random torchvision detectors under the contract; skipped without torchvision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import boxcov
from boxcov import GLM, MCGLM, BoxcovError, ExactGLM, Posterior, fit
from boxcov.data.coco import CLASSES
from boxcov.detectors.torchvision import TorchvisionDetector, wrap
from boxcov.predict.route import exact
from helpers.torchvision_cases import MODELS, NAMES, images, objects, retinanet, retinanet_normed
from oracles.dense import relative


@pytest.fixture(scope="module", params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def detector(name: str) -> TorchvisionDetector:
    return wrap(MODELS[name](), NAMES)


@pytest.fixture(scope="module")
def frames() -> list:
    return [(images(seed=i), [objects(3 - i, seed=i)]) for i in range(3)]


@pytest.fixture(scope="module")
def posterior(detector: TorchvisionDetector, frames: list) -> Posterior:
    return fit(detector, frames, n_data=100, prior_precision=1.0)


def test_boxes_are_those_of_the_model_bit_for_bit(detector: TorchvisionDetector) -> None:
    x = images(3, seed=5)
    with torch.no_grad():
        theirs = detector.model(x)
    found = detector.detect(x)
    for b, one in enumerate(found.frames(3)):
        known = (
            theirs[b]["labels"] > 0
        )  # the background is never reported, though RetinaNet and FCOS have a number for it
        assert int(known.sum()) > 0
        assert torch.equal(one.boxes, theirs[b]["boxes"][known])
        assert torch.equal(one.scores, theirs[b]["scores"][known])
        assert [NAMES[n] for n in theirs[b]["labels"][known]] == [
            detector.classes[i] for i in one.labels
        ]


def test_the_general_wrap_knows_the_library(detector: TorchvisionDetector) -> None:
    found = boxcov.wrap(detector.model)
    assert type(found) is type(detector)
    assert torch.equal(found.detect(images()).boxes, wrap(detector.model).detect(images()).boxes)


def test_exact_is_one_backward_pass_a_number(
    name: str, detector: TorchvisionDetector, posterior: Posterior, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*given: Any) -> None:
        raise AssertionError("not by instance")

    if name != "fcos":
        monkeypatch.setattr(exact, "autograd_covariance", slow)
    x = images(2, seed=1)
    found, expected = (
        ExactGLM(detector, posterior, with_logit=True)(x),
        GLM(detector, posterior, with_logit=True)(x),
    )
    assert len(found) > 3
    for part in ("covariance", "score_variance"):
        assert relative(getattr(found, part), getattr(expected, part)) < 1e-4, part
        assert float(getattr(found, part).norm()) > 0
    assert float((found.score_covariance - expected.score_covariance).norm()) <= 1e-4 * float(
        expected.score_covariance.norm()
    )


def test_boxes_and_the_model_stay_as_they_are(
    detector: TorchvisionDetector, frames: list, posterior: Posterior
) -> None:
    x = images(2)
    plain = detector.detect(x)
    before = {key: tensor.clone() for key, tensor in detector.state_dict().items()}
    attributes = [
        (m.training, sorted(m.__dict__), dict(m._forward_hooks)) for m in detector.modules()
    ]
    draws = torch.get_rng_state()
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
    assert all(torch.equal(tensor, before[key]) for key, tensor in detector.state_dict().items())
    assert attributes == [
        (m.training, sorted(m.__dict__), dict(m._forward_hooks)) for m in detector.modules()
    ]
    assert torch.equal(torch.get_rng_state(), draws)


def test_monte_carlo_agrees(detector: TorchvisionDetector, posterior: Posterior) -> None:
    found, expected = (
        MCGLM(detector, posterior, samples=600)(images()),
        GLM(detector, posterior)(images()),
    )
    assert relative(found.covariance, expected.covariance) < 0.25


def test_deeper_layers_are_exact_too(detector: TorchvisionDetector, frames: list) -> None:
    posterior = fit(detector, frames, depth="backbone", n_data=100, prior_precision=1.0)
    products = {n.removesuffix(".weight") for n, p in detector.named_parameters() if p.dim() > 1}
    assert set(posterior.blocks) == products
    found, expected = ExactGLM(detector, posterior)(images()), GLM(detector, posterior)(images())
    assert relative(found.covariance, expected.covariance) < 1e-4


def test_group_norm_in_a_head_leaves_no_crops(frames: list) -> None:
    detector = wrap(retinanet_normed(), NAMES)
    x = images()
    raw = detector(x)
    assert detector.instances(raw, detector.select(raw)) is None
    posterior = fit(detector, frames, prior_precision=1.0)
    assert (
        relative(
            ExactGLM(detector, posterior)(x).covariance, GLM(detector, posterior)(x).covariance
        )
        < 1e-4
    )


def test_regions_stay_those_of_the_selection_under_other_weights() -> None:
    """Other weights propose other regions: an instance must not become another one."""
    detector = wrap(MODELS["faster_rcnn"](), NAMES)
    x = images()
    with torch.no_grad():
        raw = detector(x)
        selection = detector.select(raw)
        boxes = detector.decode(raw, selection)
        for p in detector.model.rpn.parameters():
            p.mul_(-1)
        other = detector(x)
        assert not torch.equal(other["proposals"][0], raw["proposals"][0])
        torch.testing.assert_close(detector.decode(other, selection), boxes, rtol=1e-5, atol=1e-4)


# the loss


def in_training(model: nn.Module, x: list[Tensor], targets: list[dict[str, Tensor]]) -> Tensor:
    """The model's own loss, with norms and resizing as in eval mode."""
    parts = [
        model,
        *(getattr(model, part) for part in ("rpn", "roi_heads") if hasattr(model, part)),
    ]
    own = [{**t, "labels": t["labels"] + 1} for t in targets]
    if hasattr(model, "rpn"):  # of as many proposals as in eval mode
        model.rpn._pre_nms_top_n["training"], model.rpn._post_nms_top_n["training"] = 1000, 40
    for part in parts:
        part.training = True
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return torch.stack(list(model(x, own).values())).sum()
    finally:
        for part in parts:
            part.training = False


def test_the_loss_of_an_image_is_the_model_s_of_a_batch_of_one(
    detector: TorchvisionDetector,
) -> None:
    x, targets = images(3, seed=3), [objects(3, seed=1), objects(0), objects(1, seed=2)]
    found = detector.loss(detector(x), targets)
    alone = torch.stack(
        [in_training(detector.model, x[b : b + 1], targets[b : b + 1]) for b in range(3)]
    )
    torch.testing.assert_close(
        found[0::2], alone[0::2], rtol=1e-3, atol=1e-4
    )  # padding to a common size reaches an image's border
    single = torch.cat(
        [detector.loss(detector(x[b : b + 1]), targets[b : b + 1]) for b in range(3)]
    )
    torch.testing.assert_close(single, alone, rtol=1e-5, atol=1e-5)


# what is given


def test_names_and_classes() -> None:
    model = retinanet()
    assert wrap(model).classes == ("0", "1", "2", "3")
    assert wrap(model, NAMES, ["dog"]).labels.numbers == (3,)
    x = images()
    everything, dogs = wrap(model, NAMES).detect(x), wrap(model, NAMES, ["dog"]).detect(x)
    assert torch.equal(dogs.boxes, everything.boxes[everything.labels == 2])
    for given, message in (
        ({"names": ["cat"]}, "1 names, but the model has 4 classes including the background"),
        (
            {"names": NAMES, "classes": ["cat", "horse"]},
            "classes name horse, unknown to the model: it has cat, cow, dog",
        ),
        ({"threshold": 2}, "threshold must be from 0 to 1, got 2"),
        ({"images": "bgr"}, "images must be one of rgb, coco, got 'bgr'"),
    ):
        with pytest.raises(BoxcovError, match=message):
            wrap(model, **given)
    with pytest.raises(
        BoxcovError,
        match="a Linear is not supported: use RetinaNet",
    ):
        wrap(nn.Linear(1, 1))
    from torchvision.models.detection import RetinaNet_ResNet50_FPN_Weights

    names = RetinaNet_ResNet50_FPN_Weights.COCO_V1.meta["categories"]
    model.head.classification_head.num_classes = 91
    assert wrap(model, names).classes == CLASSES


def test_a_threshold_above_the_model_s() -> None:
    model, x = retinanet(), images()
    plain = wrap(model, NAMES).detect(x)
    middle = float(plain.scores.median())
    found = wrap(model, NAMES, threshold=middle).detect(x)
    assert 0 < len(found) < len(plain)
    assert torch.equal(found.boxes, plain.boxes[plain.scores > middle])
    empty = wrap(model, NAMES, threshold=1.0)
    assert ExactGLM(empty, fit(empty, [(x, [objects(1)])], prior_precision=1.0))(
        x
    ).covariance.shape == (0, 4, 4)


def test_images_as_coco_has_them() -> None:
    model, x = (
        retinanet(),
        torch.randint(0, 256, (1, 3, 64, 64), generator=torch.Generator().manual_seed(0)).float(),
    )
    assert torch.equal(
        wrap(model, NAMES, images="coco").detect(x).boxes,
        wrap(model, NAMES).detect([x[0].flip(0) / 255]).boxes,
    )
    with pytest.raises(
        BoxcovError, match=r"images must be a list of \(3, h, w\), .* got \[\(1, 64\)\]"
    ):
        wrap(model)(torch.zeros(1, 1, 64))
    with pytest.raises(BoxcovError, match=r"got \[\]"):
        wrap(model)([])
