"""GLM as in the paper: one backward pass per output number. ``ExactGLM`` is the faster one."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from boxcov._torch.process_state import at_least_float32
from boxcov.detections import Detections
from boxcov.detector import Detector
from boxcov.errors import check_whole
from boxcov.posterior.posterior import Posterior
from boxcov.predict.linearize import LinearizationPoint, LinearizedDetector, logit_fields
from boxcov.predict.predictor import Predictor
from boxcov.predict.route.base import Router


class GLM(Predictor):
    """``J Sigma J^T`` of every box, from D backward passes per box: the paper's baseline.

    max_boxes: compute only so many boxes of an input, the first ones; the others are left out.
    with_logit: also return the variance of each score's logit and its covariance with the box.

    >>> import boxcov
    >>> from boxcov.data import shapes
    >>> from boxcov.detectors.tiny import TinyCenter
    >>> frames = shapes.frames(count=2)
    >>> detector = TinyCenter(threshold=0.05, most=3)
    >>> model = GLM(detector, boxcov.fit(detector, frames))
    >>> model(frames[0][0]).covariance.shape
    torch.Size([3, 5, 5])
    """

    method = "glm"
    posterior: Posterior

    def __init__(
        self,
        detector: Detector,
        posterior: Posterior,
        *,
        max_boxes: int | None = None,
        with_logit: bool = False,
    ) -> None:
        if max_boxes is not None:
            check_whole("max_boxes", max_boxes)
        self.max_boxes = max_boxes
        super().__init__(detector, posterior, with_logit=with_logit)

    def build_router(self, linearized: LinearizedDetector) -> Router:
        return Router(linearized, self.engine, "one backward pass per number")

    def predict(self, point: LinearizationPoint) -> Detections:
        with torch.enable_grad():
            weights = point.linearized.variables()
            z = point.z_at(weights)
            parts = [
                self._of_box(_gradients(box, weights), point.boxes.shape[1])
                for box in z[: self.max_boxes]
            ]
        covariance, row = (torch.stack(rows) for rows in zip(*parts))
        fields = logit_fields(row if self.with_logit else None)
        return replace(point.detections()[: self.max_boxes], covariance=covariance, **fields)

    def _of_box(self, gradients: dict[str, Tensor], D: int) -> tuple[Tensor, Tensor]:
        """The covariance of the box (D, D), and the logit's row of the joint one (D + 1,)."""
        covariance = self.posterior.quadratic({name: g[:D] for name, g in gradients.items()})
        joint = self.posterior.quadratic(gradients) if self.with_logit else covariance
        return covariance, joint[-1]


def _gradients(box: Tensor, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients (D, *shape) of the numbers of one box, one backward pass each."""
    own = list(weights.values())
    rows = [
        torch.autograd.grad(
            number, own, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        for number in box
    ]
    columns = zip(weights, zip(*rows))
    return {name: at_least_float32(torch.stack(column)) for name, column in columns}
