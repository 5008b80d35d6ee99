"""``boxcov demo``: everything once, small: train a detector, fit its posterior, compare the methods, draw a picture."""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import pi
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from boxcov.curvature.fit import fit
from boxcov.curvature.posterior import Posterior
from boxcov.data import batched, shapes
from boxcov.detections import Detections
from boxcov.detectors.tiny import TinyCenter, train
from boxcov.predict.exact import ExactGLM
from boxcov.predict.glm import GLM
from boxcov.predict.held_out import gaussian_nll, held_out_nll
from boxcov.predict.mcglm import MCGLM
from boxcov.predict.mci import MCI
from boxcov.predict.predictor import Predictor


@dataclass(frozen=True)
class Row:
    """One method: how long a frame takes, how far its covariances are from the exact ones, how well they explain the boxes' errors."""

    method: str
    milliseconds: float
    off: float  # median over boxes of the relative Frobenius distance
    nll: float  # mean negative log-likelihood of the errors of paired boxes


def prepare(train_count: int = 240, epochs: int = 7) -> tuple[TinyCenter, list[Any]]:
    """A trained detector and the frames that it was trained on."""
    frames = list(shapes.frames(count=train_count, seed=0))
    return train(TinyCenter(), frames, epochs=epochs), frames


def posterior_of(detector: TinyCenter, frames: list[Any]) -> Posterior:
    """Of the whole network, the prior precision tuned on frames that neither training nor test has seen."""
    posterior = fit(detector, batched(frames, 8), depth="backbone")
    return posterior.tune_prior_precision(held_out_nll(detector, list(shapes.frames(count=10, seed=1)), pair, samples=10))


def pair(found: Detections, targets: Any) -> tuple[Tensor, Tensor]:
    """Boxes with a ground truth within 2 m, and their errors, the heading's the short way round.

    >>> _, targets = shapes.frames(count=1)[0]
    >>> truth = targets[0]["boxes"]
    >>> n = torch.zeros(len(truth))
    >>> index, errors = pair(Detections(truth + 0.1, n, n, n, ("x", "y", "w", "l", "yaw"), ("car",)), targets)
    >>> len(index) == len(truth), round(float(errors.max()), 2)
    (True, 0.1)
    """
    boxes = targets[0]["boxes"]
    if not len(boxes) or not len(found):
        return torch.zeros(0, dtype=torch.long), torch.zeros(0, 5)
    distance, nearest = torch.cdist(found.boxes[:, :2], boxes[:, :2]).min(1)
    index = (distance < 2).nonzero()[:, 0]
    errors = found.boxes[index] - boxes[nearest[index]]
    errors[:, 4] = torch.remainder(errors[:, 4] + pi, 2 * pi) - pi
    return index, errors


def compare(detector: TinyCenter, posterior: Posterior, count: int = 20, slow: int = 3) -> list[Row]:
    """All methods on the same frames; GLM, one backward pass a number, on the first ``slow`` of them only."""
    frames = list(shapes.frames(count=count, seed=2))
    exact = ExactGLM(detector, posterior)
    reference = [exact(inputs) for inputs, _ in frames]
    models: list[tuple[str, Predictor, int]] = [
        ("MCI, dropout, k = 10", MCI(detector), count),
        ("MCI, Laplace, k = 10", MCI(detector, posterior), count),
        (f"GLM ({slow} frames)", GLM(detector, posterior), slow),
        ("MC-GLM, k = 10", MCGLM(detector, posterior, samples=10), count),
        ("MC-GLM, k = 100", MCGLM(detector, posterior, samples=100), count),
        ("exact head + MC rest, k = 10", ExactGLM(detector, posterior, samples=10), count),
        ("exact", exact, count),
    ]
    return [_row(name, model, frames[:number], reference) for name, model, number in models]


def _row(name: str, model: Predictor, frames: list[Any], reference: list[Detections]) -> Row:
    model(frames[0][0])  # warm
    start = time.perf_counter()
    results = [model(inputs) for inputs, _ in frames]
    spent = (time.perf_counter() - start) / len(frames)
    off, nll = [], []
    for found, exact, (_, targets) in zip(results, reference, frames):
        assert found.covariance is not None
        assert exact.covariance is not None
        off.append((found.covariance - exact.covariance).flatten(1).norm(dim=1) / exact.covariance.flatten(1).norm(dim=1))
        index, errors = pair(found, targets)
        # a covariance of rank k - 1 < D, or none at all, has no density: a centimetre of noise gives it one
        nll.append(gaussian_nll(errors, found.covariance[index], residual=1e-4))
    return Row(name, 1e3 * spent, float(torch.cat(off).median()), float(torch.cat(nll).mean()))


def draw(detector: TinyCenter, posterior: Posterior, path: Path) -> None:
    """Three scenes, the last one crowded and with twice the noise."""
    from boxcov.report.bev import picture

    model = ExactGLM(detector, posterior)
    scenes = [shapes.frames(count=2, seed=5)[0], shapes.frames(count=2, seed=5)[1], shapes.frames(count=1, seed=6, noise=0.2, objects=9)[0]]
    rows = [(inputs[0, 0].numpy(), model(inputs), targets[0]["boxes"].numpy()) for inputs, targets in scenes]
    picture(path, rows, shapes.METRES)
