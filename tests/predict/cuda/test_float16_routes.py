"""Tangents in float16 end where they overflow or contradict their oracle, on a pretend GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import boxcov
from boxcov.errors import NotFiniteError
from boxcov.predict.forward_mode.storage import Tangent
from helpers.centerpoint_cases import cloud, detector_of, frames, pillar_config
from helpers.pretend_gpu import pretend_gpu
from oracles.dense import relative as apart

TF32, EXACT = boxcov.EngineOptions(precision="tf32"), boxcov.EngineOptions()
METHODS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "exact, samples": lambda d, p, engine: boxcov.ExactGLM(d, p, samples=6, engine=engine),
    "mcglm": lambda d, p, engine: boxcov.MCGLM(d, p, 4, engine=engine),
}
half = Tangent.half


@pytest.fixture(scope="module")
def pillars() -> Any:
    config = pillar_config()
    reporting = replace(config.reporting, threshold=0.1, max_boxes=6)
    tasks = (("car",), ("pedestrian", "bicycle"))
    return detector_of(replace(config, tasks=tasks, reporting=reporting))


@pytest.fixture(scope="module")
def deep(pillars: Any) -> Any:
    labelled = frames(pillars.config)
    return boxcov.fit(pillars, labelled, depth="backbone", prior_precision=10.0, n_data=100)


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    with pretend_gpu():
        yield


def frame(detector: Any, seed: int) -> Any:
    return [cloud(detector.config, seed).to("cuda")]


def relative(found: Tensor, expected: Tensor) -> float:
    return apart(found.cpu(), expected.cpu())


@pytest.mark.parametrize("method", METHODS)
def test_an_overflow_of_float16_ends_its_use(pillars: Any, deep: Any, method: str) -> None:
    """No covariance is lost: the frame is computed again, with tangents in float32."""
    twin = deepcopy(pillars).to("cuda")
    model, exact = METHODS[method](twin, deep, TF32), METHODS[method](twin, deep, EXACT)
    first, second = frame(pillars, 0), frame(pillars, 1)
    model(first)
    half = model.router.propagation._directions.half
    assert half is not None
    half._scales = {key: scale and scale / 2**12 for key, scale in half._scales.items()}
    half._operands.clear()
    with pytest.warns(boxcov.BoxcovWarning, match="float16 overflow"):
        found = model(second)
    assert relative(found.covariance, exact(second).covariance) < 1e-3
    assert not model.router.propagation.in_half
    model(first)
    assert "propagated tangents" in str(model.router.route)


@pytest.mark.parametrize("method", METHODS)
def test_a_frame_that_is_never_finite_keeps_float16(
    pillars: Any, deep: Any, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = METHODS[method](deepcopy(pillars).to("cuda"), deep, TF32), frame(pillars, 0)
    expected = [model(inputs) for _ in range(3)][-1]
    with monkeypatch.context() as patch:
        patch.setattr(model, "predict", lambda point: fail())
        with pytest.raises(boxcov.BoxcovError, match="never finite"):
            model(inputs)
    assert model.router.propagation.in_half
    assert torch.equal(model(inputs).covariance, expected.covariance)


def fail() -> None:
    raise NotFiniteError("never finite")


@pytest.mark.parametrize("method", METHODS)
def test_wrong_float16_is_refused(
    pillars: Any, deep: Any, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tangent, "half", lambda tangent, scale: 2 * half(tangent, scale))
    twin = deepcopy(pillars).to("cuda")
    model, exact = METHODS[method](twin, deep, TF32), METHODS[method](twin, deep, EXACT)
    first, second = frame(pillars, 0), frame(pillars, 1)
    with pytest.warns(boxcov.BoxcovWarning, match="tangents in float16 differ"):
        model(first)
    assert relative(model(second).covariance, exact(second).covariance) < 1e-3
    assert "propagated tangents" in str(model.router.route)
