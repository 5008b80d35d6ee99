"""A detector that clips its boxes to the image: which sides are clipped is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from boxcov import GLM, MCGLM, ExactGLM, fit
from boxcov.detectors.yolox import YOLOX
from helpers.clipped_cases import HEIGHT, WIDTH, ClippedYOLOX
from helpers.yolox_cases import images, objects, small


@pytest.fixture(scope="module")
def detector() -> YOLOX:
    detector = small(max_boxes=20)
    detector.__class__ = ClippedYOLOX
    return detector


@pytest.mark.parametrize("method", [ExactGLM, GLM, MCGLM])
def test_sides_at_the_border_are_clipped(detector: YOLOX, method: type) -> None:
    frames = [(images(seed=i), [objects(3, seed=i)]) for i in range(2)]
    posterior = fit(detector, frames, n_data=100, prior_precision=1.0)
    inputs = images(seed=5)
    found = method(detector, posterior)(inputs)
    plain = detector.detect(inputs)
    assert torch.equal(found.boxes, plain.boxes)
    border = torch.tensor([0.0, 0.0, WIDTH, HEIGHT]).double()
    at_border = found.boxes == border
    assert 0 < int(at_border.sum()) < at_border.numel()
    assert torch.equal(found.clipped, at_border)
    assert not plain.clipped.any()  # without a covariance nothing is known
    count = int(at_border.any(1).sum())
    assert f"{count} boxes clipped at the image border: no variance" in repr(found)
    calibrated = replace(found, predictive=torch.eye(4).expand(len(found), 4, 4).double())
    assert "clipped" not in repr(calibrated)
    assert torch.equal(found[at_border.any(1)].clipped, at_border[at_border.any(1)])
