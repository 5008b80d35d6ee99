"""The detector's boxes stay bit for bit the same and its state is unchanged, also after errors."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from boxcov import GLM, MCGLM, MCI, BoxcovError, Detector, ExactGLM, fit
from boxcov.detectors.tiny import TinyCenter

METHODS = {
    "mcglm": lambda d, p: MCGLM(d, p),
    "mcglm fd": lambda d, p: MCGLM(d, p, derivative="fd", epsilon=3e-5),
    "glm": lambda d, p: GLM(d, p),
    "exact": lambda d, p: ExactGLM(d, p),
    "exact, mc below": lambda d, p: ExactGLM(d, p, samples=4),
    "mci dropout": lambda d, p: MCI(d),
    "mci laplace": lambda d, p: MCI(d, p.with_prior(1e4)),
}


def snapshot(detector: nn.Module) -> dict[str, Any]:
    """All state of a detector that a call could change."""
    return {
        "state": {name: tensor.clone() for name, tensor in detector.state_dict().items()},
        "objects": [id(p) for p in detector.parameters()] + [id(b) for b in detector.buffers()],
        "versions": [t._version for t in (*detector.parameters(), *detector.buffers())],
        "requires_grad": [p.requires_grad for p in detector.parameters()],
        "grads": [p.grad for p in detector.parameters()],
        "modes": [m.training for m in detector.modules()],
        "hooks": [
            len(v)
            for m in detector.modules()
            for k, v in sorted(m.__dict__.items())
            if k.endswith("_hooks")
        ],
        "attributes": [sorted(m.__dict__) for m in detector.modules()],
        "rng": torch.get_rng_state(),
        "grad mode": torch.is_grad_enabled(),
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    return bool(a == b)


def prepared(tiny: TinyCenter, kind: type[TinyCenter] = TinyCenter) -> TinyCenter:
    """A detector in an unusual state: partly frozen, partly in train mode, with a user's hook."""
    detector = kind()
    detector.load_state_dict(tiny.state_dict())
    detector.train()
    detector.backbone.eval()
    for p in detector.backbone.parameters():
        p.requires_grad_(False)
    detector.head.register_forward_hook(lambda module, inputs, output: None)
    return detector


@pytest.mark.parametrize("method", METHODS)
def test_success_leaves_the_detector_unchanged(tiny, posterior, image, method: str) -> None:
    detector = prepared(tiny)
    plain = tiny.detect(image)  # in eval mode
    before = snapshot(detector)
    found = METHODS[method](detector, posterior)(image)
    assert same(snapshot(detector), before)
    assert len(found) > 0
    assert torch.equal(found.scores, plain.scores)
    assert torch.equal(found.labels, plain.labels)
    assert torch.equal(found.boxes, plain.boxes) != method.startswith("mci")


def test_fitting_leaves_the_detector_unchanged(tiny, train_frames) -> None:
    detector = prepared(tiny)
    before = snapshot(detector)
    fit(detector, train_frames[:4], depth="backbone")
    assert same(snapshot(detector), before)
    fit(detector, train_frames[:4], fisher="mc")
    assert same(snapshot(detector), before)


class Shifting(TinyCenter):
    """Its loss shifts the boxes of the targets in place."""

    def loss(self, raw, targets):
        for target in targets:
            target["boxes"] += 0.1
        return super().loss(raw, targets)


def test_fitting_leaves_the_targets_unchanged(train_frames) -> None:
    frames = [train_frames[0], train_frames[1]]
    before = [target["boxes"].clone() for _, targets in frames for target in targets]
    once = fit(Shifting(), frames)
    after = [target["boxes"] for _, targets in frames for target in targets]
    assert all(map(torch.equal, after, before))
    assert fit(Shifting(), frames).loss == once.loss


class Failing(TinyCenter):
    """Raises in the middle of the n-th pass through its neck or head."""

    fuse: int = 10**9

    def decode(self, raw, selection):
        self._burn()
        return super().decode(raw, selection)

    def loss(self, raw, targets):
        self._burn()
        return super().loss(raw, targets)

    def _burn(self) -> None:
        Failing.fuse -= 1
        if Failing.fuse <= 0:
            raise ZeroDivisionError("in the middle of a pass")


@pytest.mark.parametrize("fuse", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_failure_leaves_the_detector_unchanged(
    tiny, posterior, image, method: str, fuse: int
) -> None:
    detector = prepared(tiny, Failing)
    model = METHODS[method](detector, posterior)
    before = snapshot(detector)
    Failing.fuse = fuse
    try:
        with pytest.raises(ZeroDivisionError):
            model(image)
        assert same(snapshot(detector), before)
        # and the model is not broken: the same frame now gives what a new model gives
        Failing.fuse = 10**9
        again, new = model(image), METHODS[method](detector, posterior)(image)
        assert method == "mci dropout" or torch.equal(again.covariance, new.covariance)
    finally:
        Failing.fuse = 10**9


def test_failure_leaves_the_grad_mode(tiny, train_frames, image, monkeypatch) -> None:
    model = ExactGLM(tiny, fit(tiny, train_frames[:2], depth="neck"))
    model(image)
    monkeypatch.setattr("boxcov.Posterior.quadratic", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        model(image)
    assert torch.is_grad_enabled()
    del caught  # and the generator that the traceback held
    gc.collect()
    assert torch.is_grad_enabled()


def test_a_failing_fit_leaves_the_detector_unchanged(tiny, train_frames) -> None:
    detector = prepared(tiny, Failing)
    before = snapshot(detector)
    Failing.fuse = 3
    try:
        with pytest.raises(ZeroDivisionError):
            fit(detector, train_frames[:4])
    finally:
        Failing.fuse = 10**9
    assert same(snapshot(detector), before)


@pytest.mark.parametrize("method", METHODS)
def test_no_boxes_give_an_empty_result_of_the_right_shape(
    tiny, posterior, method: str, recwarn
) -> None:
    found = METHODS[method](tiny, posterior)(torch.zeros(1, 1, 64, 64))
    assert found.boxes.shape == (0, 5)
    assert found.covariance.shape == (0, 5, 5)
    assert found.uncertainty.shape == (0,)
    assert not recwarn.list


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_inputs_are_refused(tiny, posterior, image, value: float) -> None:
    bad = image.clone()
    bad[0, 0, 3, 4] = value
    with pytest.raises(BoxcovError, match="inputs holds 1 NaN or infinite values of 4096"):
        MCGLM(tiny, posterior)(bad)


@pytest.mark.parametrize("method", METHODS)
def test_non_finite_weights_are_refused(tiny, posterior, method: str) -> None:
    detector = prepared(tiny)
    detector.head.shared[0].weight.data[0, 0, 0, 0] = float("nan")
    with pytest.raises(BoxcovError, match=r"head\.shared\.0\.weight \(1 of"):
        METHODS[method](detector, posterior)


@pytest.mark.parametrize("method", ["mcglm", "glm", "exact", "mci laplace"])
def test_a_posterior_for_another_detector_is_refused(posterior, method: str) -> None:
    with pytest.raises(BoxcovError, match="fingerprint"):
        METHODS[method](TinyCenter(seed=5), posterior)
    with pytest.raises(BoxcovError, match="fingerprint"):
        METHODS[method](TinyCenter(width=4), posterior)


@pytest.mark.parametrize("method", METHODS)
def test_inside_inference_mode(tiny, posterior, image, method: str) -> None:
    plain = METHODS[method](tiny, posterior)(image)
    with torch.inference_mode():
        found = METHODS[method](tiny, posterior)(image * 1)
    assert torch.equal(found.covariance, plain.covariance)


def test_threads_sharing_one_model_give_the_numbers_of_one(tiny, posterior, train_frames) -> None:
    from concurrent.futures import ThreadPoolExecutor

    model = ExactGLM(tiny, posterior)
    images = [inputs for inputs, _ in train_frames[:8]]
    alone = [model(image).covariance for image in images]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda image: model(image).covariance, images))
    assert all(torch.equal(a, b) for a, b in zip(alone, together))


# the trunk


class Passes:
    passes = 0


class Counting(nn.Module):
    """Counts its passes."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.count = Passes()

    def forward(self, x: Tensor) -> Tensor:
        self.count.passes += 1
        return self.inner(x)


@pytest.mark.parametrize("method", METHODS)
def test_the_trunk_runs_once_per_frame_for_a_head_posterior(
    tiny, image, train_frames, method: str
) -> None:
    detector = TinyCenter()
    detector.load_state_dict(tiny.state_dict())
    detector.backbone, detector.deep = Counting(detector.backbone), Counting(detector.deep)
    posterior = fit(detector.eval(), train_frames[:4])
    model = METHODS[method](detector, posterior)
    for _ in range(2):
        before = detector.backbone.count.passes, detector.deep.count.passes
        model(image)
        assert (detector.backbone.count.passes, detector.deep.count.passes) == (
            before[0] + 1,
            before[1] + 1,
        )


class InPlace(TinyCenter):
    """Changes the head's input in place: caching it without a copy would be wrong."""

    def forward(self, inputs):
        x = self.backbone(inputs)
        features = torch.cat([self.lateral(x), self.up(self.deep(x.clone()))], 1)
        x = self.body(features)
        x += 1.0
        return {"features": x, **self.head(x)}

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Identity()


@pytest.mark.parametrize("method", [m for m in METHODS if "dropout" not in m])
def test_the_trunk_cache_survives_in_place_changes(tiny, image, train_frames, method: str) -> None:
    detector = InPlace()
    detector.load_state_dict(tiny.state_dict())
    posterior = fit(detector.eval(), train_frames[:4], prior_precision=1.0)
    model = METHODS[method](detector, posterior)
    first, second = model(image), model(image)
    assert torch.equal(first.boxes, detector.detect(image).boxes) != method.startswith("mci")
    assert torch.equal(first.covariance, second.covariance)
    reference = GLM(detector, posterior)(image)
    if method in ("glm", "exact"):
        assert torch.allclose(
            first.covariance,
            reference.covariance,
            rtol=1e-4,
            atol=1e-4 * float(reference.covariance.abs().max()),
        )


def test_detector_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Detector()  # type: ignore[abstract]
