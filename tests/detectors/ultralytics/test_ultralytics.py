"""A small random Ultralytics YOLO under the contract; skipped without ultralytics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

try:
    from ultralytics import YOLO
    from ultralytics.nn.tasks import DetectionModel, SegmentationModel
    from ultralytics.utils.loss import v8DetectionLoss
    from ultralytics.utils.nms import non_max_suppression
except Exception as error:
    pytest.skip(
        f"ultralytics cannot be imported: {type(error).__name__}: {str(error)[:80]}",
        allow_module_level=True,
    )

import boxcov
from boxcov import GLM, MCGLM, BoxcovError, ExactGLM, Posterior, fit
from boxcov.detectors.ultralytics import Yolo, wrap
from boxcov.predict.route import exact
from oracles.dense import relative

NAMES = {0: "cat", 1: "cow", 2: "dog"}
VERSIONS = ("yolov8n.yaml", "yolo11n.yaml")


def yolo(version: str, kind: type = DetectionModel) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind(version, nc=3, verbose=False).eval()
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name.endswith("running_var"):
                    buffer.copy_(0.5 + torch.rand(buffer.shape))
            for p in model.model[-1].cv3.parameters():
                p.add_(0.1 * torch.randn(p.shape))
            for level in model.model[-1].cv3:
                level[-1].bias.zero_()
    model.names = NAMES
    return model


def images(count: int = 1, seed: int = 0) -> Tensor:
    return torch.rand(count, 3, 64, 96, generator=torch.Generator().manual_seed(seed))


def objects(count: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    low = torch.rand(count, 2, generator=generator) * torch.tensor([60.0, 30.0])
    boxes = torch.cat([low, low + 8 + 20 * torch.rand(count, 2, generator=generator)], 1)
    return {"boxes": boxes, "labels": torch.randint(3, (count,), generator=generator)}


@pytest.fixture(scope="module", params=VERSIONS)
def detector(request: pytest.FixtureRequest) -> Yolo:
    return wrap(yolo(request.param), threshold=0.5, max_boxes=8)


@pytest.fixture(scope="module")
def frames() -> list:
    return [(images(seed=i), [objects(3 - i, seed=i)]) for i in range(3)]


@pytest.fixture(scope="module")
def posterior(detector: Yolo, frames: list) -> Posterior:
    return fit(detector, frames, n_data=100, prior_precision=1.0)


def test_boxes_are_those_of_its_own_nms_bit_for_bit(detector: Yolo) -> None:
    x = images(2, seed=5)
    with torch.no_grad():
        theirs = non_max_suppression(detector.model(x)[0], 0.5, 0.7, max_det=8)
    found = detector.detect(x)
    for b, one in enumerate(found.frames(2)):
        assert len(one) > 1
        assert torch.equal(one.boxes, theirs[b][:, :4])
        assert torch.equal(one.scores, theirs[b][:, 4])
        assert torch.equal(one.labels, theirs[b][:, 5].long())
    brought = wrap(detector.model, threshold=0.5, max_boxes=8, coco=True).detect(255 * x.flip(1))
    torch.testing.assert_close(brought.boxes, found.boxes, rtol=1e-3, atol=1e-3)


def test_the_object_of_ultralytics_itself() -> None:
    whole = YOLO("yolov8n.yaml", verbose=False)
    whole.model = yolo("yolov8n.yaml")
    x = images(2, seed=5)
    expected = wrap(whole.model, threshold=0.25).detect(x)
    assert len(expected) > 0
    for model in (whole, whole.model):
        found = boxcov.wrap(model)
        assert isinstance(found, Yolo)
        assert torch.equal(found.detect(x).boxes, expected.boxes)
    assert boxcov.wrap(whole, classes=["dog"]).classes == ("dog",)


def test_exact_is_one_backward_pass_a_number(
    detector: Yolo, posterior: Posterior, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*given: Any) -> None:
        raise AssertionError("not by instance")

    monkeypatch.setattr(exact, "autograd_covariance", slow)
    x = images(1, seed=1)
    found, expected = (
        ExactGLM(detector, posterior, with_logit=True)(x),
        GLM(detector, posterior, with_logit=True)(x),
    )
    assert len(found) > 3
    for part in ("covariance", "score_variance"):
        assert relative(getattr(found, part), getattr(expected, part)) < 1e-4, part
        assert float(getattr(found, part).norm()) > 0


def test_boxes_and_the_model_stay_as_they_are(
    detector: Yolo, frames: list, posterior: Posterior
) -> None:
    x = images()
    plain = detector.detect(x)
    before = {key: tensor.clone() for key, tensor in detector.state_dict().items()}
    attributes = [(m.training, sorted(m.__dict__)) for m in detector.modules()]
    fit(detector, frames[:1], prior_precision=1.0)
    for model in (MCGLM(detector, posterior, samples=4), ExactGLM(detector, posterior)):
        found = model(x)
        assert all(
            torch.equal(getattr(found, part), getattr(plain, part))
            for part in ("boxes", "scores", "labels", "frame")
        )
    assert all(torch.equal(tensor, before[key]) for key, tensor in detector.state_dict().items())
    assert attributes == [(m.training, sorted(m.__dict__)) for m in detector.modules()]


def test_layers_of_all_parts_are_in_the_posterior(detector: Yolo, frames: list) -> None:
    posterior = fit(detector, frames[:1], depth="backbone", prior_precision=1.0, fisher="identity")
    products = {
        n.removesuffix(".weight")
        for n, p in detector.named_parameters()
        if p.dim() > 1 and ".dfl." not in n
    }
    assert set(posterior.blocks) == products


def test_the_loss_of_an_image_is_the_model_s_of_a_batch_of_one(detector: Yolo) -> None:
    from ultralytics.utils import DEFAULT_CFG

    x, targets = images(3, seed=3), [objects(3, seed=1), objects(0), objects(1, seed=2)]
    found = detector.loss(detector(x), targets)
    assert not hasattr(detector.model, "args")
    detector.model.args = DEFAULT_CFG
    try:
        alone = []
        for b, target in enumerate(targets):
            low, high = (target["boxes"] / torch.tensor([96.0, 64, 96, 64])).split(2, 1)
            batch = {
                "batch_idx": torch.zeros(len(low)),
                "cls": target["labels"],
                "bboxes": torch.cat([(low + high) / 2, high - low], 1),
            }
            alone.append(
                v8DetectionLoss(detector.model)(detector.model(x[b : b + 1]), batch)[0].sum()
            )
    finally:
        del detector.model.args
    torch.testing.assert_close(found, torch.stack(alone), rtol=1e-4, atol=1e-4)


def test_what_is_refused() -> None:
    model = yolo("yolov8n.yaml")
    for given, message in (
        ({"classes": ["horse"]}, "classes name horse, unknown to the model: it has cat, cow, dog"),
        ({"threshold": 2}, r"threshold must lie in \[0, 1\]"),
    ):
        with pytest.raises(BoxcovError, match=message):
            wrap(model, **given)
    with pytest.raises(BoxcovError, match="a YOLO for classify is not a detection model of Ultra"):
        wrap(YOLO("yolov8n-cls.yaml", verbose=False))
    with pytest.raises(BoxcovError, match="the model ends in a Segment; only Detect is supported"):
        wrap(yolo("yolov8n-seg.yaml", SegmentationModel))
    with pytest.raises(BoxcovError, match=r"with sides divisible by 32, got \(1, 3, 60, 64\)"):
        wrap(model)(torch.zeros(1, 3, 60, 64))
    ended = yolo("yolo26n.yaml")
    ended.end2end = True
    with pytest.raises(BoxcovError, match=r"set model\.end2end = False to use the one-to-many"):
        wrap(ended)
    ended.end2end = False
    assert len(wrap(ended, threshold=0.0, max_boxes=4).detect(images())) == 4
