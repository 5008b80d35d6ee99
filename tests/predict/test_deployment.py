"""A compiled model gives the model's detections: the same boxes, and equal numbers for them."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any
from warnings import catch_warnings, simplefilter

import pytest
import torch

import boxcov
from boxcov import BoxcovError, BoxcovWarning, Selection
from boxcov.data import shapes
from boxcov.detectors.tiny import TinyCenter
from boxcov.predict.route.verification import relative_errors
from boxcov.static_selection import StaticLimits
from helpers.centerpoint_cases import cloud, detector_of, pillar_config
from helpers.error_models import with_error_model

ROOMY = StaticLimits(boxes=300, candidates=500, pairs=100_000)


@pytest.fixture(scope="module")
def lidar() -> tuple[Any, Any]:
    config = pillar_config()
    detector = detector_of(
        replace(config, reporting=replace(config.reporting, threshold=0.1, max_boxes=20))
    )
    frames = [([cloud(config, seed)], _objects(detector, cloud(config, seed))) for seed in (0, 1)]
    with catch_warnings():
        simplefilter("ignore")  # some tasks see no object
        return detector, boxcov.fit(detector, frames, n_data=100, prior_precision=10.0)


def _objects(detector: Any, points: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    found = detector.detect([points])[:5]
    return [{"boxes": found.boxes.detach(), "labels": found.labels}]


def assert_same(fast: Any, slow: Any, tolerance: float = 1e-4) -> None:
    for name in ("boxes", "scores", "labels", "frame"):
        assert torch.equal(getattr(fast, name), getattr(slow, name)), name
    assert (fast.covariance is None) == (slow.covariance is None)
    if slow.covariance is not None:
        assert float(relative_errors(fast.covariance, slow.covariance).max()) < tolerance


@pytest.mark.parametrize("method", [boxcov.ExactGLM, boxcov.MCGLM])
def test_centerpoint(lidar: tuple[Any, Any], method: Any) -> None:
    detector, posterior = lidar
    model = method(detector, posterior)
    example = [cloud(detector.config, 0)]
    fast = boxcov.compile(model, example, ROOMY)
    for seed in (0, 1, 2):
        inputs = [cloud(detector.config, seed)]
        found = fast(inputs)
        assert len(found)
        assert_same(found, model(inputs))
        assert found.meta["method"] == model.method
    assert fast.fallbacks == 0


def test_batches_and_empty_clouds(lidar: tuple[Any, Any]) -> None:
    detector, posterior = lidar
    model = boxcov.ExactGLM(detector, posterior)
    example = [cloud(detector.config, 0), cloud(detector.config, 1)]
    fast = boxcov.compile(model, example, ROOMY)
    assert_same(fast(example), model(example))
    half_empty = [example[0][:0], example[1]]
    assert_same(fast(half_empty), model(half_empty))


def test_plain_detector(lidar: tuple[Any, Any]) -> None:
    detector, _ = lidar
    fast = boxcov.compile(detector, [cloud(detector.config, 0)], ROOMY)
    inputs = [cloud(detector.config, 3)]
    assert_same(fast(inputs), detector.detect(inputs))


def test_error_model_is_inside() -> None:
    frames = shapes.frames(count=2)
    detector = TinyCenter(threshold=0.05, most=4).eval()
    posterior = boxcov.fit(detector, frames)
    plain = boxcov.ExactGLM(detector, posterior)
    model = boxcov.ExactGLM(detector, with_error_model(plain, posterior, frames[0][0], "exact"))
    fast = boxcov.compile(model, frames[0][0])
    found, expected = fast(frames[1][0]), model(frames[1][0])
    assert_same(found, expected)
    for name in ("risk", "scale", "predictive", "region_widths", "signals"):
        torch.testing.assert_close(
            getattr(found, name), getattr(expected, name), rtol=1e-4, atol=1e-6, msg=name
        )
    assert found.meta["error_model"] == expected.meta["error_model"]


def test_a_frame_beyond_the_limits_is_computed_by_the_model(lidar: tuple[Any, Any]) -> None:
    detector, posterior = lidar
    model = boxcov.ExactGLM(detector, posterior)
    full = [cloud(detector.config, 0)]
    fast = boxcov.compile(model, full, ROOMY)
    fast.function.limits = StaticLimits(3, 500, 100_000)
    with pytest.warns(BoxcovWarning, match="more boxes or candidates than"):
        assert_same(fast(full), model(full))
    assert_same(fast(full), model(full))
    assert_same(fast(full * 2), model(full * 2))  # another shape
    assert fast.fallbacks == 3


def test_what_cannot_be_compiled_is_refused(lidar: tuple[Any, Any]) -> None:
    detector, posterior = lidar
    example = [cloud(detector.config, 0)]
    with pytest.raises(BoxcovError, match="does not support with_logit=True"):
        boxcov.compile(boxcov.MCGLM(detector, posterior, with_logit=True), example)
    with pytest.raises(BoxcovError, match="takes ExactGLM or MCGLM, not Conv2d, or a boxcov"):
        boxcov.compile(torch.nn.Conv2d(1, 1, 1), example)  # type: ignore[arg-type]
    with pytest.raises(BoxcovError, match="takes ExactGLM or MCGLM, not MCI"):
        boxcov.compile(boxcov.MCI(detector, dropout=0.1, samples=3), example)
    with pytest.raises(BoxcovError, match="is beyond StaticLimits"):
        boxcov.compile(detector, example, StaticLimits(boxes=1))


def test_compiled_inside_inference_mode() -> None:
    detector, (image, _) = TinyCenter(threshold=0.05, most=3).eval(), shapes.frames(count=1)[0]
    model = boxcov.ExactGLM(detector, boxcov.fit(detector, shapes.frames(count=2)))
    with torch.inference_mode():
        compiled = boxcov.compile(model, image)
    assert torch.equal(compiled(image).boxes, model(image).boxes)


def test_what_a_detector_of_ones_own_lacks_is_named() -> None:
    detector = TinyCenter(threshold=0.05, most=3).eval()
    image = shapes.frames(count=1)[0][0]

    class Reversed(TinyCenter):
        def select(self, raw: Any) -> Selection:
            found = super().select(raw)
            where = tuple(rows.flip(0) for rows in found.where)
            rows = (found.frame.flip(0), found.scores.flip(0), found.labels.flip(0))
            return Selection(*rows, where)

    other = Reversed(threshold=0.05, most=3).eval()
    with pytest.raises(BoxcovError, match=r"\(boxes differ by up to \d.*, in the same order\?"):
        boxcov.compile(other, image)
    detector.static_inputs = lambda inputs: None
    with pytest.raises(BoxcovError, match=r"needs a subclass of boxcov\.Detector in which it"):
        boxcov.compile(detector, image)


class Unstaged(TinyCenter):
    def stages(self, raw: Any, selection: Any) -> None:
        return None


def test_equal_weights_in_new_tensors_keep_the_covariance() -> None:
    """As after load_state_dict(assign=True): the covariance of their directions was 0."""
    frames = shapes.frames(count=2)
    detector = Unstaged(threshold=0.05, most=3).eval()
    model = boxcov.MCGLM(detector, boxcov.fit(detector, frames), 4)
    fast = boxcov.compile(model, frames[0][0])
    state = {name: tensor.clone() for name, tensor in detector.state_dict().items()}
    detector.load_state_dict(state, assign=True)
    assert_same(fast(frames[1][0]), model(frames[1][0]))


def test_a_module_that_was_exchanged_is_run() -> None:
    image = shapes.frames(count=1)[0][0]
    detector = TinyCenter(threshold=0.05, most=3).eval()
    fast = boxcov.compile(detector, image)
    detector.head = TinyCenter(seed=1).eval().head
    assert_same(fast(image), detector.detect(image))


def test_changed_weights_are_noticed() -> None:
    frames = shapes.frames(count=2)
    detector = TinyCenter(threshold=0.05, most=3).eval()
    model = boxcov.ExactGLM(detector, boxcov.fit(detector, frames))
    fast = boxcov.compile(model, frames[0][0])
    with torch.no_grad():
        next(detector.parameters()).mul_(1.1)
    with pytest.raises(BoxcovError, match="fingerprint"):
        fast(frames[0][0])


def alike(found: Any, expected: Any) -> None:
    """The same boxes up to rounding: detections of a fused network."""
    assert torch.equal(found.labels, expected.labels)
    torch.testing.assert_close(found.boxes, expected.boxes, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found.scores, expected.scores, rtol=1e-3, atol=1e-3)
    if expected.covariance is not None:
        assert float(relative_errors(found.covariance, expected.covariance).max()) < 1e-2


@pytest.mark.parametrize("method", [boxcov.ExactGLM, boxcov.MCGLM])
def test_fused(lidar: tuple[Any, Any], method: Any) -> None:
    detector, posterior = lidar
    model = method(detector, posterior)
    example = [cloud(detector.config, 0)]
    fast = boxcov.compile(model, example, ROOMY, fused=True)
    plain = boxcov.compile(detector, example, ROOMY, fused=True)
    for seed in (0, 1, 2):
        inputs = [cloud(detector.config, seed)]
        found = fast(inputs)
        assert len(found)
        alike(found, model(inputs))
        assert torch.equal(found.boxes, plain(inputs).boxes)
    assert fast.fallbacks == 0
    with pytest.warns(BoxcovWarning, match="more points than the fused network holds"):
        alike(
            fast([cloud(detector.config, 0, count=2000)]), model([cloud(detector.config, 0, 2000)])
        )
    assert len(fast([example[0][:0]])) == len(model([example[0][:0]]))


def test_fused_with_an_error_model(lidar: tuple[Any, Any]) -> None:
    detector, posterior = lidar
    inputs, plain = [cloud(detector.config, 1)], boxcov.ExactGLM(detector, posterior)
    model = boxcov.ExactGLM(detector, with_error_model(plain, posterior, inputs, "exact"))
    found = boxcov.compile(model, [cloud(detector.config, 0)], ROOMY, fused=True)(inputs)
    torch.testing.assert_close(found.risk, model(inputs).risk, rtol=1e-2, atol=1e-3)


def test_fused_notices_changed_weights(lidar: tuple[Any, Any]) -> None:
    detector, _ = lidar
    twin = deepcopy(detector)
    inputs = [cloud(detector.config, 0)]
    fast = boxcov.compile(twin, inputs, ROOMY, fused=True)
    twin.head.shared[0].weight.data.mul_(1.1)
    with pytest.raises(BoxcovError, match="weights or settings have changed since"):
        [fast(inputs) for _ in range(16)]


@pytest.mark.parametrize("plain", [True, False])
def test_fused_notices_a_changed_threshold(lidar: tuple[Any, Any], plain: bool) -> None:
    detector, posterior = lidar
    twin = deepcopy(detector)
    inputs = [cloud(detector.config, 0)]
    model = twin if plain else boxcov.ExactGLM(twin, posterior)
    fast = boxcov.compile(model, inputs, ROOMY, fused=True)
    reporting = replace(twin.config.reporting, threshold=0.9)
    twin.config = replace(twin.config, reporting=reporting)
    with pytest.raises(BoxcovError, match="weights or settings have changed since"):
        fast(inputs)


def test_fused_needs_a_network_and_a_head() -> None:
    frames = shapes.frames(count=2)
    with pytest.raises(BoxcovError, match=r"has no fused_network\(\)"):
        boxcov.compile(TinyCenter().eval(), frames[0][0], fused=True)


def test_inputs_that_are_not_finite(lidar: tuple[Any, Any]) -> None:
    detector, _ = lidar
    inputs = [cloud(detector.config, 0)]
    fast = boxcov.compile(detector, inputs, ROOMY, fused=True)
    broken = [inputs[0].clone()]
    broken[0][3, 1] = torch.nan
    with pytest.raises(BoxcovError, match="1 NaN or infinite values"):
        fast(broken)


def test_results_out_of_range_are_refused(lidar: tuple[Any, Any]) -> None:
    detector, posterior = lidar
    inputs, model = [cloud(detector.config, 0)], boxcov.ExactGLM(detector, posterior)
    fast = boxcov.compile(model, inputs, ROOMY)
    covariance = fast.function.covariance
    assert covariance is not None
    fast.function.covariance = lambda point, static: -covariance(point, static)
    with pytest.raises(BoxcovError, match="is not positive semi-definite"):
        fast(inputs)


class CachingCenter(TinyCenter):
    """Keeps what it last computed, as detectors do that reuse anchors."""

    def forward(self, inputs: Any) -> Any:
        self.last_outputs = super().forward(inputs)
        return self.last_outputs

    def static_inputs(self, inputs: Any) -> torch.Tensor:
        self.last_inputs = super().static_inputs(inputs)
        return self.last_inputs


def test_what_a_detector_keeps_of_a_frame_needs_no_new_graph() -> None:
    detector = CachingCenter().eval()
    inputs, _ = shapes.frames(count=1)[0]
    fast = boxcov.compile(detector, inputs)
    function = fast.function
    for _ in range(2):
        assert torch.equal(fast(inputs).boxes, detector.detect(inputs).boxes)
    assert fast.function is function
    detector.threshold = 0.9
    assert torch.equal(fast(inputs).boxes, detector.detect(inputs).boxes)
    assert fast.function is not function
