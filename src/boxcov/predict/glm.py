"""GLM as in the paper: one backward pass for each output scalar. Kept as the honest baseline; ``ExactGLM`` gives the same numbers faster."""

from __future__ import annotations

import torch
from torch import Tensor

from boxcov.curvature.fisher import at_least_float32
from boxcov.detections import Detections
from boxcov.predict.linearise import Point
from boxcov.predict.predictor import PosteriorPredictor


class GLM(PosteriorPredictor):
    """``J Sigma J^T`` of every box, from D backward passes a box; ``calibrated`` fills ``Detections.predictive``, too.

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

    def predict(self, point: Point) -> Detections:
        with torch.enable_grad():
            weights = {name: w.requires_grad_() for name, w in point.linearised.theta().items()}
            z = point.boxes_at(weights)
            blocks = [self.posterior.quadratic(_gradients(box, weights)) for box in z]
        return point.detections(covariance=torch.stack(blocks), meta=self.settings())


def _gradients(box: Tensor, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients (D, *shape) of the D numbers of one box, one backward pass each."""
    rows = []
    for number in box:
        grads = torch.autograd.grad(number, list(weights.values()), retain_graph=True, allow_unused=True)
        rows.append([torch.zeros_like(w) if g is None else g for g, w in zip(grads, weights.values())])
    return {name: at_least_float32(torch.stack(column)) for name, column in zip(weights, zip(*rows))}
