"""A compiled frame never waits for the device: no shape and no branch depends on a value.

This needs no GPU: the frame runs on a device that holds no values. A CUDA graph can only be
captured from such code.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import boxcov
from boxcov._torch.modules import ready
from boxcov.data import shapes, simulated
from boxcov.detectors import centerpoint
from boxcov.detectors.tiny import TinyCenter
from boxcov.static_selection import StaticLimits
from helpers.centerpoint_cases import cloud, detector_of, pillar_config, voxel_config
from helpers.centerpoint_cases import frames as labelled
from helpers.valueless import DEVICE, without_values

LIMITS = StaticLimits(boxes=400, candidates=500, pairs=100_000)


def check_without_values(model: Any, inputs: Any, fused: bool = False) -> tuple[torch.Tensor, ...]:
    """What a compiled model computes on the device without values."""
    compiled = boxcov.compile(model, inputs, LIMITS, fused=fused)
    given = compiled._static_inputs(ready(inputs, compiled.device))
    expected = compiled._compute(*given)
    for may_copy in (True, False):
        with without_values(may_copy) as mode:
            found = compiled._compute(*map(mode.move, given))
    assert mode.operations > 100
    assert [tensor.shape for tensor in found] == [tensor.shape for tensor in expected]
    return found


@pytest.mark.parametrize("fused", [False, True])
def test_centerpoint_with_its_error_model(fused: bool) -> None:
    detector = centerpoint.load("small")
    model = boxcov.ExactGLM(detector, boxcov.Posterior.load("small", detector))
    inputs = simulated.frames("clear", seed=11, count=1, sweeps=1)[0][0]
    for tensor in check_without_values(model, inputs, fused):
        assert tensor.device == DEVICE


@pytest.mark.parametrize("config", [pillar_config(), voxel_config()], ids=["pillar", "voxel"])
@pytest.mark.parametrize("method", [boxcov.ExactGLM, boxcov.MCGLM])
def test_batches(config: Any, method: Any) -> None:
    reporting = replace(config.reporting, threshold=0.1, max_boxes=20)
    detector = detector_of(replace(config, reporting=reporting))
    posterior = boxcov.fit(detector, labelled(config), prior_precision=10.0)
    points = cloud(config, 0)
    inputs = [points, points[:100], points[:0]]
    check_without_values(method(detector, posterior), inputs, fused=True)


def test_tiny_detector() -> None:
    frames = shapes.frames(count=2)
    detector = TinyCenter(threshold=0.05, most=5).eval()
    check_without_values(boxcov.ExactGLM(detector, boxcov.fit(detector, frames)), frames[0][0])


class WaitingCenter(TinyCenter):
    """Reads a value of the device, or copies one to it, before it selects."""

    def __init__(self, wait: Any) -> None:
        super().__init__(threshold=0.05, most=5)
        self.wait = wait

    def select_static(self, raw: Any, limits: StaticLimits) -> Any:
        self.wait(raw["heatmap"])
        return super().select_static(raw, limits)


@pytest.mark.parametrize(
    "wait",
    [
        lambda heat: float(heat.max()),
        lambda heat: heat[heat > 0],
        lambda heat: heat + torch.arange(heat.shape[-1]),
        lambda heat: torch.arange(3).to(heat.device),
        lambda heat: heat[..., [1, 0]],
    ],
    ids=["value", "mask", "mixed", "copy", "list"],
)
def test_code_that_waits_is_noticed(wait: Any) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        check_without_values(WaitingCenter(wait).eval(), shapes.frames(count=1)[0][0])
