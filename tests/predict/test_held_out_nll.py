from __future__ import annotations

from math import pi

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal

from boxcov import BoxcovError, Detections, held_out_nll
from boxcov.data import shapes
from boxcov.predict.held_out_nll import gaussian_nll


def pair(found: Detections, targets: list) -> tuple[torch.Tensor, torch.Tensor]:
    """Boxes with an object within 2 m, and their errors, headings wrapped."""
    boxes = targets[0]["boxes"]
    if not len(boxes) or not len(found):
        return torch.zeros(0, dtype=torch.long), torch.zeros(0, 5)
    distance, nearest = torch.cdist(found.boxes[:, :2], boxes[:, :2]).min(1)
    index = (distance < 2).nonzero()[:, 0]
    errors = found.boxes[index] - boxes[nearest[index]]
    errors[:, 4] = torch.remainder(errors[:, 4] + pi, 2 * pi) - pi
    return index, errors


def test_nll_equals_scipy() -> None:
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(6, 3, 3, generator=generator, dtype=torch.float64)
    C, errors = A @ A.transpose(1, 2), torch.randn(6, 3, generator=generator, dtype=torch.float64)
    residual = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    for extra in (0.0, residual):
        found = gaussian_nll(errors, C, extra)
        added = np.diag(np.broadcast_to(np.asarray(extra), 3))
        expected = [
            -multivariate_normal(np.zeros(3), c.numpy() + added).logpdf(e.numpy())
            for c, e in zip(C, errors)
        ]
        assert np.allclose(found.numpy(), expected)


def test_a_singular_covariance_has_infinite_nll() -> None:
    assert gaussian_nll(torch.zeros(1, 2), torch.zeros(1, 2, 2)).item() == float("inf")


def test_tuning_by_held_out_boxes_beats_its_neighbours(tiny, posterior) -> None:
    score = held_out_nll(tiny, list(shapes.frames(count=6, seed=11)), pair)
    tuned = posterior.optimize_prior_precision(score)
    best = score(tuned)
    for factor in (0.1, 10.0):
        assert score(posterior.with_prior(factor * tuned.prior_precision)) > best


def test_no_matched_boxes_are_refused(tiny, posterior) -> None:
    score = held_out_nll(tiny, list(shapes.frames(count=2, seed=11, objects=0)), pair)
    with pytest.raises(
        BoxcovError, match="none of the boxes in 2 held-out frames is paired with an object"
    ):
        score(posterior)
