"""Held-out likelihood of box errors: a score for choosing the prior precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import log, pi
from typing import Any

import torch
from torch import Tensor

from boxcov.detections import Detections
from boxcov.detector import Detector
from boxcov.errors import BoxcovError
from boxcov.posterior.posterior import Posterior
from boxcov.predict.exact import ExactGLM

Pairing = Callable[[Detections, Any], tuple[Tensor, Tensor]]
"""``pair(detections, targets)`` returns the rows (p,) of boxes with an object, and their errors
(p, D), box minus object."""


def held_out_nll(
    detector: Detector,
    frames: Iterable[Any],
    pair: Pairing,
    residual: Tensor | float = 0.0,
    samples: int | None = None,
) -> Callable[[Posterior], float]:
    """A function that scores a posterior by the errors of held-out boxes; lower is better.

    The score is the mean negative log-likelihood of the errors under the exact covariance.

    residual: variances (D,) of sensor and label noise, added to every covariance.
    samples: as in ``ExactGLM``, for a posterior that reaches below the head.

    >>> import boxcov
    >>> from boxcov.data import shapes
    >>> from boxcov.detectors.tiny import TinyCenter
    >>> def pair(found, targets):  # a toy: every box against the first object
    ...     return torch.arange(len(found)), found.boxes - targets[0]["boxes"][:1]
    >>> frames = shapes.frames(count=2)
    >>> detector = TinyCenter(threshold=0.05, most=3)
    >>> score = held_out_nll(detector, frames, pair)
    >>> posterior = boxcov.fit(detector, frames)
    >>> score(posterior.with_prior(1e8)) > score(posterior)  # too narrow for these errors
    True
    """
    frames = list(frames)

    def score(posterior: Posterior) -> float:
        model = ExactGLM(detector, posterior, samples)
        total, count = 0.0, 0
        for inputs, targets in frames:
            found = model(inputs)
            index, errors = pair(found, targets)
            if len(index):
                assert found.covariance is not None
                total += float(gaussian_nll(errors, found.covariance[index], residual).sum())
                count += len(index)
        if not count:
            raise BoxcovError(
                f"none of the boxes in {len(frames)} held-out frames is paired with an object"
            )
        return total / count

    return score


def gaussian_nll(errors: Tensor, covariance: Tensor, residual: Tensor | float = 0.0) -> Tensor:
    """-log N(error; 0, covariance + diag(residual)) of each row (p,), in float64.

    It is infinite where the covariance is singular.

    >>> gaussian_nll(torch.zeros(1, 2), torch.eye(2)[None])
    tensor([1.8379], dtype=torch.float64)
    """
    errors, C = errors.double(), covariance.double()
    D = errors.shape[1]
    C = C + torch.diag(torch.as_tensor(residual, dtype=torch.float64, device=C.device).expand(D))
    L, bad = torch.linalg.cholesky_ex(C)
    white = torch.linalg.solve_triangular(L, errors.unsqueeze(2), upper=False).squeeze(2)
    nll = 0.5 * (white.square().sum(1) + D * log(2 * pi)) + L.diagonal(dim1=1, dim2=2).log().sum(1)
    return torch.where(bad > 0, torch.full_like(nll, float("inf")), nll)
