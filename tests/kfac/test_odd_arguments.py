"""Unusual arguments of fits, posteriors and predictors: correct numbers or a clear error."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import boxcov
from boxcov import (
    MCGLM,
    MCI,
    BoxcovError,
    Detections,
    FitOptions,
    Posterior,
    calibrate,
    fit,
)
from boxcov.data import shapes
from boxcov.detectors.tiny import TinyCenter
from helpers.nets import NetDetector
from helpers.odd_nets import double, item


@pytest.fixture
def detector() -> NetDetector:
    return double(
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 2, 1))
    )


@pytest.fixture
def small(detector: NetDetector) -> Posterior:
    return fit(detector, [item()], n_data=50, prior_precision=0.3)


# arguments


def test_a_model_or_a_path_is_no_detector_or_posterior(detector, small) -> None:
    model: Any = nn.Linear(2, 2)
    with pytest.raises(
        BoxcovError, match=r"expected a boxcov\.Detector, got a Linear: boxcov\.wrap"
    ):
        fit(model, [item()])
    with pytest.raises(
        BoxcovError, match=r"expected a boxcov\.Detector, got a Linear: boxcov\.wrap"
    ):
        MCGLM(model, small)
    path: Any = "posterior.safetensors"
    with pytest.raises(BoxcovError, match=r"got a str: boxcov\.Posterior\.load\(path, detector\)"):
        MCGLM(detector, path)
    with pytest.raises(
        BoxcovError, match=r"calibrate takes a method such as ExactGLM\(.* got a Net"
    ):
        calibrate(detector, [item()] * 5)


def test_a_prior_that_lacks_a_layer_names_it(small: Posterior) -> None:
    with pytest.raises(BoxcovError, match=r"net\.2"):
        small.with_prior({"net.0": 1.0})


@pytest.mark.parametrize("samples", [10.0, 2.5, "10"])
@pytest.mark.parametrize("kind", [MCGLM, MCI])
def test_samples_must_be_a_whole_number(
    detector: NetDetector, small: Posterior, kind: Any, samples: Any
) -> None:
    with pytest.raises(BoxcovError, match="samples"):
        kind(detector, small, samples=samples)


@pytest.mark.parametrize("count", [0, -1])
def test_a_posterior_gives_at_least_one_sample(small: Posterior, count: int) -> None:
    with pytest.raises(BoxcovError, match=rf"at least 1.*{count}"):
        small.sample(count)


def test_exclude_is_a_list_of_names(train_frames: list[Any]) -> None:
    with pytest.raises(BoxcovError, match=r"exclude must be a list.*head\.shared"):
        fit(TinyCenter(), train_frames[:1], options=FitOptions(exclude="head.shared"))


@pytest.mark.parametrize(
    "arguments",
    [
        {"n_data": inf},
        {"n_data": nan},
        {"n_data": "50"},
        {"prior_precision": None},
        {"prior_precision": inf},
        {"prior_precision": {"net.0": 1.0, "net.2": inf}},
    ],
    ids=str,
)
def test_numbers_of_the_posterior_are_finite_numbers(
    detector: NetDetector, arguments: dict[str, Any]
) -> None:
    (name,) = arguments
    with pytest.raises(BoxcovError, match=name):
        fit(detector, [item()], **arguments)


@pytest.mark.parametrize("tau", ["2", True, torch.ones(2)], ids=str)
@pytest.mark.parametrize("per_layer", [False, True])
def test_a_prior_precision_that_no_file_holds_is_refused(
    small: Posterior, tau: Any, per_layer: bool
) -> None:
    with pytest.raises(BoxcovError, match="prior_precision must be a number"):
        small.with_prior(dict.fromkeys(small.blocks, tau) if per_layer else tau)


@pytest.mark.parametrize(
    "rows",
    [np.int64(2), torch.tensor(2), np.array(2), torch.tensor(-2)],
    ids=lambda rows: f"{type(rows).__name__} {rows}",
)
def test_one_box_by_any_kind_of_number(rows: Any) -> None:
    found = some()
    part = found[rows]
    assert len(part) == 1
    assert torch.equal(part.boxes[0], found.boxes[2])
    assert part.covariance.shape == (1, 2, 2)


def test_no_box_by_an_empty_list() -> None:
    part = some()[[]]
    assert len(part) == 0
    assert part.boxes.shape == (0, 2)
    assert part.covariance.shape == (0, 2, 2)


def some() -> Detections:
    index = torch.arange(4)
    covariance = torch.eye(2).expand(4, 2, 2)
    return Detections(
        index[:, None].repeat(1, 2).float(),
        torch.ones(4),
        index * 0,
        index * 0,
        ("x", "y"),
        ("a",),
        covariance,
    )


@pytest.mark.parametrize(
    ("name", "kind", "call"),
    [
        ("options", "FitOptions", lambda d, p, x: fit(d, [x], options={"ekfac": True})),
        ("checkpoint", "Checkpoint", lambda d, p, x: fit(d, [x], checkpoint="fit.checkpoint")),
        ("engine", "EngineOptions", lambda d, p, x: boxcov.ExactGLM(d, p, engine="tf32")),
        ("limits", "StaticLimits", lambda d, p, x: boxcov.compile(d, x[0], 50)),
    ],
)
def test_options_of_another_type_are_refused(name, kind, call) -> None:
    detector, frame = TinyCenter(), shapes.frames(count=1)[0]
    message = rf"{name} must be a {kind}, got .*: see boxcov\..*{kind}"
    with pytest.raises(BoxcovError, match=message):
        call(detector, None, frame)
