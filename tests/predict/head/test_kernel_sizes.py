"""Heads with branches of every depth and kernel size, on small maps, against a backward pass."""

from __future__ import annotations

import pytest
import torch

import boxcov
from helpers.deep_head import head_on
from oracles.dense import relative

NO_GRAPHS = boxcov.EngineOptions(cuda_graphs=False)


@pytest.mark.parametrize("size", [(1, 7), (5, 4)])
@pytest.mark.parametrize(
    ("stem", "branches"),
    [([3], [3, 3]), ([1], [1, 3, 3]), ([5, 1], [3, 1, 3]), ([3], [5]), ([1, 3], [3, 3, 3, 1])],
)
def test_kernels_at_the_border(stem: list[int], branches: list[int], size: tuple[int, int]) -> None:
    """Frames and kinds are mixed, and some windows are wider than the map."""
    detector = head_on(size, stem, branches)
    frames = [(torch.randn(2, 8, *size), None) for _ in range(3)]
    posterior = boxcov.fit(detector, frames, n_data=100, prior_precision=1.0)
    model, inputs = boxcov.ExactGLM(detector, posterior, engine=NO_GRAPHS), frames[0][0]
    engine = model.router.staged_head
    with torch.no_grad():
        point = model.linearized.at(inputs)
        found = engine.run(point)
        assert found is not None
        staged = point.shadow.stages(point.raw, point.selection)
        padded, _ = engine._on_gpu(engine.weights, staged, None)  # its plan, on a CPU
    expected = boxcov.GLM(detector, posterior)(inputs).covariance
    assert relative(found.head, expected) < 1e-4
    assert relative(padded, expected) < 1e-4
