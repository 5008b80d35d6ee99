"""The route of GLM: always backward passes."""

from __future__ import annotations

from boxcov.predict.linearize import LinearizedDetector
from boxcov.predict.route.router import EngineOptions, Router


class GLMRouter(Router):
    """One backward pass per number, with the trunk cached: there is nothing to choose."""

    def __init__(self, linearized: LinearizedDetector, options: EngineOptions) -> None:
        super().__init__(linearized, options)
        self.settle("one backward pass per number", "the same")
