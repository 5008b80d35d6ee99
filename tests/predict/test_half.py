"""CenterPoint and YOLOX in half precision have factors and covariances in float32."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_map_only

from boxcov import MCGLM, ExactGLM, fit
from helpers.centerpoint_cases import detector_of, frames, pillar_config
from helpers.yolox_cases import images, objects, small
from oracles.dense import relative


def centerpoint():
    config = pillar_config()
    return detector_of(config), frames(config)


def yolox():
    return small().float(), [(images(1, seed=i).float(), [objects(3, seed=i)]) for i in range(2)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [centerpoint, yolox])
def test_a_half_precision_detector_has_a_covariance_in_float32(case, dtype) -> None:
    detector, data = case()
    whole = fit(detector, data, n_data=100, prior_precision=1e3)
    half = detector.to(dtype)
    items = [
        (tree_map_only(torch.Tensor, lambda t: t.to(dtype), inputs), targets)
        for inputs, targets in data
    ]
    posterior = fit(half, items, n_data=100, prior_precision=1e3)
    for name, block in posterior.blocks.items():
        assert {block.Q.vectors.dtype, block.H.values.dtype} == {torch.float32}
        # the input factor is a mean of squares of what half precision rounds to 2 to 3 digits
        assert relative(block.Q.matrix, whole.blocks[name].Q.matrix) < 0.1, name
    inputs = items[0][0]
    plain, exact = half.detect(inputs), ExactGLM(half, posterior)(inputs)
    assert torch.equal(exact.boxes, plain.boxes)
    assert len(exact) > 1
    assert exact.covariance.dtype == torch.float32
    assert bool((exact.uncertainty > 0).all())
    found = MCGLM(half, posterior, samples=100)(inputs)
    assert found.covariance.dtype == torch.float32
    ratio = found.uncertainty / exact.uncertainty
    assert 0.5 < float(ratio.median()) < 2
