"""Detectors that do odd things, and the check that all methods are right about them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from boxcov import GLM, MCGLM, Detector, ExactGLM, Posterior, fit
from helpers.nets import NetDetector
from oracles.dense import box_covariance, relative

METHODS: dict[str, Callable[[Detector, Posterior], Any]] = {
    "glm": GLM,
    "exact": ExactGLM,
    "mcglm": lambda detector, posterior: MCGLM(detector, posterior, samples=1500),
}
TOLERANCE = {"glm": 1e-9, "exact": 1e-9, "mcglm": 0.2}


def frames(count: int = 2, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(count, 2, 5, 5, generator=generator, dtype=torch.float64),
        torch.randn(count, 2, 25, generator=generator, dtype=torch.float64),
    )


def double(
    kind: Callable[[], nn.Module], detector: Callable[[nn.Module], NetDetector] = NetDetector
) -> NetDetector:
    torch.manual_seed(0)
    return detector(kind()).double().eval()


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 2, 1))


def posterior_of(
    detector: Detector, depth: str | list[str] = "head", item: Any = None
) -> Posterior:
    inputs, targets = item or frames()
    return fit(detector, [(inputs.clone(), targets)], depth=depth, n_data=50, prior_precision=0.3)


def check(detector: Detector, posterior: Posterior, *inputs: Any) -> None:
    """Compare all methods with the dense product, each input twice to reveal stale caches."""
    inputs = inputs or (frames()[0][:1],)
    plain = [detector.detect(copied(given)).boxes for given in inputs]
    expected = [box_covariance(detector, posterior, copied(given)) for given in inputs]
    for method, make in METHODS.items():
        model = make(detector, posterior)
        for number in (*range(len(inputs)), *range(len(inputs))):
            found = model(inputs[number])
            assert torch.equal(found.boxes, plain[number]), (method, number)
            assert relative(found.covariance, expected[number]) < TOLERANCE[method], (
                method,
                number,
            )


def copied(inputs: Any) -> Any:
    return tree_map(torch.clone, inputs)
