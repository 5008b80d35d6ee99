"""The covariance of every box against the dense J Sigma J^T, in float64."""

from __future__ import annotations

import pytest
import torch

from boxcov import GLM, ExactGLM, FitOptions, Selection, fit
from boxcov.data import shapes
from boxcov.detectors.tiny import TinyCenter
from helpers.nets import CASES, Case
from oracles.dense import (
    box_covariance,
    box_jacobian,
    dense_covariance,
    eigenbasis_covariance,
    relative,
    transform_covariance,
)

TOLERANCE = 1e-9


@pytest.mark.parametrize("form", ["eigen", "paper"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_glm_and_exact_equal_the_dense_product(case: Case, form: str) -> None:
    detector = case.detector()
    inputs, targets = case.frames(detector, count=5)
    # the empirical Fisher of five frames is rank-deficient: the paper's form leans on its jitter
    posterior = fit(
        detector,
        [(inputs, targets)],
        options=FitOptions(form=form, jitter=1e-2),
        n_data=50,
        prior_precision=0.3,
    )
    expected = box_covariance(detector, posterior, inputs[:2])
    for model in (GLM(detector, posterior), ExactGLM(detector, posterior)):
        found = model(inputs[:2])
        assert relative(found.covariance, expected) < TOLERANCE
        assert torch.equal(found.boxes, detector.detect(inputs[:2]).boxes)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_posterior_covariance_is_the_inverse(case: Case) -> None:
    detector = case.detector()
    posterior = fit(detector, [case.frames(detector)], n_data=50, prior_precision=0.3)
    for name in posterior.blocks:
        found, expected = eigenbasis_covariance(posterior, name), dense_covariance(posterior, name)
        assert relative(found, expected) < TOLERANCE


class EveryCell(TinyCenter):
    """The reference detector with a box in every cell, also at every border."""

    def select(self, raw: dict[str, torch.Tensor]) -> Selection:
        heat = raw["heatmap"].sigmoid().amax(1)
        where = torch.ones_like(heat).nonzero(as_tuple=True)
        return Selection(where[0], heat[where], torch.zeros_like(where[0]), where)


@pytest.fixture(scope="module")
def small() -> TinyCenter:
    torch.manual_seed(3)
    detector = EveryCell(seed=3, width=4).double().eval()
    for module in detector.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.normal_(module.running_mean, 0, 0.3)
            torch.nn.init.uniform_(
                module.bias, 0.1, 0.8
            )  # so that what lies beyond the border is not zero by luck
    return detector


@pytest.fixture(scope="module")
def frames() -> list:
    images = [
        (inputs[:, :, :16, :12].double(), targets)
        for inputs, targets in shapes.frames(count=6, seed=3)
    ]
    # one object on the small map in each frame
    return [
        (
            x,
            [
                {
                    "boxes": torch.tensor([[2.0 + i / 3, 3.0, 1.5, 3.0, 0.4 * i]]),
                    "labels": torch.tensor([i % 2]),
                }
            ],
        )
        for i, (x, _) in enumerate(images)
    ]


@pytest.fixture(scope="module")
def jacobian(small: TinyCenter, frames: list) -> dict[str, torch.Tensor]:
    return box_jacobian(small, torch.cat([frames[0][0], frames[1][0]]))


@pytest.mark.parametrize("depth", ["head", "neck", "backbone"])
@pytest.mark.parametrize("form", ["eigen", "paper"])
def test_batched_instances_equal_the_dense_product(
    small: TinyCenter, frames: list, jacobian: dict[str, torch.Tensor], depth: str, form: str
) -> None:
    posterior = fit(
        small,
        frames,
        options=FitOptions(form=form, jitter=1e-2),
        depth=depth,
        n_data=100,
        prior_precision=0.5,
    )
    inputs = torch.cat([frames[0][0], frames[1][0]])
    expected = transform_covariance(jacobian, posterior)
    model = ExactGLM(small, posterior)
    below = []
    rest = model.router._part_below
    model.router._part_below = lambda *given: below.extend(given[1].layers_below) or rest(*given)
    found = model(inputs)
    assert len(found) == 2 * 8 * 6
    assert relative(found.covariance, expected) < TOLERANCE
    assert not any(
        name.startswith("head") for name in below
    )  # not the way around through the whole map
    assert bool(below) == (depth != "head")
    assert relative(GLM(small, posterior)(inputs).covariance, expected) < TOLERANCE
