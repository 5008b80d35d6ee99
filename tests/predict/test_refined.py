"""Exact covariances under EKFAC."""

from __future__ import annotations

import pytest
import torch

from boxcov import GLM, MCGLM, ExactGLM, FitOptions, Posterior, fit
from boxcov.predict.route.verification import State
from helpers.nets import CASES, Case
from oracles.dense import box_jacobian, eigenbasis_covariance, flat, relative


@pytest.fixture(scope="module")
def corrected(tiny, train_frames) -> Posterior:
    options = FitOptions(ekfac=True)
    return fit(tiny, train_frames[:60], n_data=2000, prior_precision=1.0, options=options)


def test_exact_equals_glm(tiny, corrected, image) -> None:
    model = ExactGLM(tiny, corrected)
    expected = GLM(tiny, corrected)(image).covariance
    assert len(expected) > 2
    assert relative(model(image).covariance, expected) < 1e-5
    assert relative(model(image).covariance, expected) < 1e-5  # a second time, on trust
    assert model.router.stages_check.state is State.VERIFIED


def test_the_correction_changes_the_covariance(tiny, corrected, train_frames, image) -> None:
    plain = fit(tiny, train_frames[:60], n_data=2000, prior_precision=1.0)
    found, before = (ExactGLM(tiny, each)(image).covariance for each in (corrected, plain))
    assert relative(found, before) > 0.01


def test_samples_agree(tiny, corrected, image) -> None:
    exact = ExactGLM(tiny, corrected)(image).covariance
    assert relative(MCGLM(tiny, corrected, samples=1000)(image).covariance, exact) < 0.1


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_exact_equals_the_dense_product(case: Case) -> None:
    detector = case.detector()
    inputs, targets = case.frames(detector)
    frames = [(inputs, targets)]
    options = FitOptions(ekfac=True)
    posterior = fit(detector, frames, n_data=50, prior_precision=0.3, options=options)
    J = box_jacobian(detector, inputs[:2])
    expected = sum(
        flat(block, J) @ eigenbasis_covariance(posterior, name) @ flat(block, J).transpose(1, 2)
        for name, block in posterior.blocks.items()
    )
    for model in (GLM(detector, posterior), ExactGLM(detector, posterior)):
        assert relative(model(inputs[:2]).covariance, expected) < 1e-9


def test_no_boxes(tiny, corrected) -> None:
    empty = torch.zeros(1, 1, 64, 64)
    assert ExactGLM(tiny, corrected)(empty).covariance.shape[1:] == (5, 5)
