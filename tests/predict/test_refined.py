"""Exact covariances under corrected and whole Fishers."""

from __future__ import annotations

import pytest
import torch

from boxcov import GLM, MCGLM, EngineOptions, ExactGLM, FitOptions, Posterior, fit
from boxcov.kfac.ekfac import apply_ekfac
from boxcov.predict.route import State
from helpers.nets import CASES, Case
from oracles.dense import box_jacobian, flat, relative

HEAD_LAST = ["head.branches.offset.3", "head.branches.size.3", "head.branches.rot.3"]


@pytest.fixture(scope="module")
def kinds(tiny, train_frames) -> dict[str, Posterior]:
    frames = train_frames[:60]
    plain = fit(tiny, frames, n_data=2000, prior_precision=1.0)
    weighed = fit(
        tiny, frames, prior_precision=1.0, options=FitOptions(locations="gradient"), n_data=2000
    )
    return {
        "corrected": apply_ekfac(plain, tiny, frames),
        "full": apply_ekfac(
            plain, tiny, frames, options=FitOptions(ekfac=False, full_layers=HEAD_LAST)
        ),
        "gradient": weighed,
        "gradient and corrected": apply_ekfac(weighed, tiny, frames),
        "all": apply_ekfac(
            weighed, tiny, frames, options=FitOptions(ekfac=True, full_layers=HEAD_LAST)
        ),
    }


@pytest.mark.parametrize("kind", ["corrected", "full", "gradient", "gradient and corrected", "all"])
def test_exact_equals_glm(tiny, kinds, image, kind: str) -> None:
    model = ExactGLM(tiny, kinds[kind])
    expected = GLM(tiny, kinds[kind])(image).covariance
    assert len(expected) > 2
    assert relative(model(image).covariance, expected) < 1e-5
    assert relative(model(image).covariance, expected) < 1e-5  # a second time, on trust
    is_staged = model.router.stages_check.state is State.VERIFIED
    assert is_staged == (kind in ("corrected", "gradient", "gradient and corrected"))


def test_the_correction_changes_the_covariance(tiny, kinds, train_frames, image) -> None:
    plain = ExactGLM(tiny, fit(tiny, train_frames[:60], n_data=2000, prior_precision=1.0))(
        image
    ).covariance
    for posterior in kinds.values():
        assert relative(ExactGLM(tiny, posterior)(image).covariance, plain) > 0.01


def test_samples_agree(tiny, kinds, image) -> None:
    exact = ExactGLM(tiny, kinds["all"])(image).covariance
    assert (
        relative(
            MCGLM(tiny, kinds["all"], samples=4000, engine=EngineOptions(chunk=200))(
                image
            ).covariance,
            exact,
        )
        < 0.1
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_exact_equals_the_dense_product(case: Case) -> None:
    detector = case.detector()
    inputs, targets = case.frames(detector)
    frames = [(inputs, targets)]
    for options in (FitOptions(ekfac=True), FitOptions(full_layers="last")):
        posterior = fit(detector, frames, n_data=50, prior_precision=0.3, options=options)
        J = box_jacobian(detector, inputs[:2])
        expected = sum(
            flat(block, J) @ posterior.covariance(name) @ flat(block, J).transpose(1, 2)
            for name, block in posterior.blocks.items()
        )
        for model in (GLM(detector, posterior), ExactGLM(detector, posterior)):
            assert relative(model(inputs[:2]).covariance, expected) < 1e-9


def test_no_boxes(tiny, kinds) -> None:
    empty = torch.zeros(1, 1, 64, 64)
    for posterior in kinds.values():
        assert ExactGLM(tiny, posterior)(empty).covariance.shape[1:] == (5, 5)
