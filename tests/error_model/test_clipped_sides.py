"""The error model of boxes that the detector clips at the image border."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from boxcov.detections import Detections
from boxcov.error_model.calibrate import fit_error_model
from boxcov.error_model.inputs import box_inputs
from boxcov.error_model.model import ErrorModel
from boxcov.error_model.network import TrainingOptions
from boxcov.evaluate.records import Records
from helpers.clipped_cases import as_detections, clipped_boxes

ABOUT = {"estimator": "exact", "fingerprint": "", "options": TrainingOptions(widths=(0,))}


def with_known_scales(n: int, seed: int) -> tuple[Records, Detections, np.ndarray]:
    """Records, detections, and the standard deviation of each latent error."""
    records = clipped_boxes(n, seed=seed)
    sd = np.sqrt(np.diagonal(records.predictive, axis1=1, axis2=2))
    # one scale for all sides of a box: a clipped side can know its scale from the others
    records = replace(
        records, truth=records.boxes - (records.boxes - records.truth) / sd * sd[:, :1]
    )
    free = ~records.clipped
    covariance = sd[:, :1, None] ** 2 * np.eye(4) * free[:, :, None] * free[:, None, :]
    records = replace(records, covariance=covariance)
    return records, as_detections(records), np.repeat(sd[:, :1], 4, 1)


@pytest.fixture(scope="module")
def fitted() -> ErrorModel:
    records, found, _ = with_known_scales(6000, seed=0)
    return fit_error_model(found, records, **ABOUT)


def test_scales_of_clipped_sides_are_those_of_the_latent_error(fitted: ErrorModel) -> None:
    records, found, sd = with_known_scales(1000, seed=1)
    deviations = fitted.apply(found).predictive.diagonal(dim1=1, dim2=2).sqrt().numpy()
    assert np.isfinite(deviations).all()
    for rows in (records.clipped, ~records.clipped):
        ratio = np.log(deviations / sd)[rows]
        assert abs(float(ratio.mean())) < 0.12
        assert float(ratio.std()) < 0.15


@pytest.mark.parametrize("level", [0.5, 0.9])
def test_regions_hold_the_errors_of_clipped_sides(fitted: ErrorModel, level: float) -> None:
    records, found, _ = with_known_scales(6000, seed=2)
    inside = np.abs(records.errors) <= fitted.apply(found).region(level).numpy()
    known = ~np.isnan(records.errors)
    for rows in (records.clipped & known, ~records.clipped):
        assert float(inside[rows].mean()) == pytest.approx(level, abs=0.04)


def test_a_clipped_side_is_an_input_and_hides_no_variance() -> None:
    records = clipped_boxes(400)
    found = as_detections(records)
    inputs = box_inputs(found)
    for column, name in enumerate(found.fields):
        clipped = torch.tensor(records.clipped[:, column])
        assert torch.equal(inputs[f"clipped {name}"], clipped.float())
        logs = inputs[f"variance {name}"]
        free = torch.tensor(~records.clipped)
        expected = found.covariance.diagonal(dim1=1, dim2=2).clamp(min=1e-30).log()
        assert torch.equal(logs[~clipped], expected[~clipped, column])
        mean = (expected * free).sum(1) / free.sum(1)
        torch.testing.assert_close(logs[clipped], mean[clipped])
    assert not any(name.startswith("clipped") for name in box_inputs(lidar(found)))


def lidar(found: Detections) -> Detections:
    return replace(found, fields=("x", "y", "w", "l"))
