from __future__ import annotations

from typing import Any

import pytest

from boxcov import ExactGLM, Posterior, calibrate, fit
from boxcov.data import batched, shapes
from boxcov.detectors.tiny import TinyCenter, train
from boxcov.error_model import network
from boxcov.error_model.labelled_frames import predict_frames
from boxcov.evaluate.ground_truth import match_detections
from boxcov.predict.predictor import Predictor


@pytest.fixture(scope="session")
def small() -> TinyCenter:
    """A smaller detector than the reference, trained for a second: it makes mistakes to learn."""
    return train(TinyCenter(seed=0, width=8), shapes.frames(count=80, seed=0), epochs=4)


@pytest.fixture(scope="session")
def small_posterior(small: TinyCenter) -> Posterior:
    return fit(small, batched(shapes.frames(count=16, seed=0), 8), n_data=80)


@pytest.fixture(scope="session")
def calibration_frames() -> list:
    return list(shapes.frames(count=60, seed=11))


@pytest.fixture(scope="session")
def calibrated(
    small: TinyCenter, small_posterior: Posterior, calibration_frames: list
) -> Predictor:
    """The detector's exact covariances with an error model."""
    return calibrate(ExactGLM(small, small_posterior), calibration_frames)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "EPOCHS", 2)


@pytest.fixture(scope="module")
def collected(small: TinyCenter, small_posterior: Posterior, calibration_frames: list) -> Any:
    """Detections and records of the calibration frames."""
    found, truth = predict_frames(ExactGLM(small, small_posterior), calibration_frames)
    return found, match_detections(found, truth, threshold=-1.0)
