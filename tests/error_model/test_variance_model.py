from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from boxcov.error_model.variance_model import FieldModel, VarianceModel
from helpers.calibration_cases import draw_records


@pytest.fixture(scope="module")
def model() -> VarianceModel:
    return VarianceModel.from_records(draw_records(), "product")


def test_the_nll_is_the_normal_density(model: VarianceModel) -> None:
    from scipy.stats import norm

    field, rng = model.field(0, True), np.random.default_rng(0)
    field = replace(field, errors=np.where(np.arange(900) % 7 == 0, np.nan, field.errors))
    theta = 0.1 * rng.normal(size=field.X.shape[1])
    sd = np.sqrt(np.exp(field.X @ theta) + field.floor)
    expected = np.where(np.isnan(field.errors), 0.0, -norm(scale=sd).logpdf(field.errors))
    np.testing.assert_allclose(field.nll(theta), expected, rtol=1e-12)


@pytest.mark.parametrize("floor", [1e-7, 0.5])
def test_the_gradient_agrees_with_finite_differences(model: VarianceModel, floor: float) -> None:
    field = replace(model[:60].field(0, True), floor=floor)
    field.errors[::5] = np.nan
    theta = field.fit(3.0) + 0.01 * np.random.default_rng(0).normal(size=field.X.shape[1])
    gradient = field.objective(theta, 3.0)[1]
    step = 1e-5 * np.eye(len(theta))
    for i in range(len(theta)):
        above, below = (field.objective(theta + s * step[i], 3.0)[0] for s in (1, -1))
        assert gradient[i] == pytest.approx((above - below) / 2e-5, abs=1e-5)


@pytest.mark.parametrize("with_variances", [True, False])
@pytest.mark.parametrize("strength", [0.1, 2.0, 100.0])
def test_the_fit_is_at_a_minimum(
    model: VarianceModel, with_variances: bool, strength: float
) -> None:
    for f in range(3):
        field = model.field(f, with_variances)
        theta = field.fit(strength)
        assert np.all((theta >= field.low) & (theta <= field.high))
        gradient = field.objective(theta, strength)[1]
        at_low, at_high = theta <= field.low, theta >= field.high
        projected = np.where(at_low, np.minimum(gradient, 0), gradient)
        projected = np.where(at_high, np.maximum(projected, 0), projected)
        projected[at_low & at_high] = 0
        assert np.abs(projected).max() < 1e-3  # of a sum over 900 boxes
        again = field.fit(strength, theta + 0.3)
        np.testing.assert_allclose(again, theta, atol=2e-4)


def test_variances_of_each_class_are_found_again() -> None:
    rng = np.random.default_rng(0)
    labels = np.repeat([0, 1], 500)
    X = np.concatenate([np.ones((1000, 1)), np.eye(2)[labels]], 1)
    errors = rng.normal(size=1000) * np.array([1.0, 3.0])[labels]
    free = np.full(3, np.inf)
    theta = FieldModel(X, errors, 0.0, -free, free).fit(1e-6)
    mean_squares = [np.mean(errors[labels == c] ** 2) for c in (0, 1)]
    np.testing.assert_allclose(np.exp(theta[0] + theta[1:]), mean_squares, rtol=1e-4)
    pooled = FieldModel(X, errors, 0.0, -free, free).fit(1e9)
    np.testing.assert_allclose(np.exp(pooled[0] + pooled[1:]), np.mean(errors**2), rtol=1e-4)


def test_slopes_keep_their_sign_whatever_the_data_say() -> None:
    """Errors that grow with the score and fall with a variance: both slopes stay at 0."""
    records = draw_records(600, 3, ((-0.8, 0, 0),) * 3)
    logit = np.log(records.scores / (1 - records.scores))[:, None]
    errors = records.errors * np.exp(0.8 * logit)
    model = VarianceModel.from_records(replace(records, truth=records.boxes - errors), "product")
    names = dict(zip(model.features, model.field(0, True).fit(1.0)[3:]))
    assert names["score"] == 0
    assert names["range"] >= 0
    assert names["variance x"] == 0


def test_unseen_features_are_clipped_to_the_range_seen() -> None:
    """A variance far below all others must not make a box of an unseen frame certain."""
    records = draw_records()
    covariance = records.covariance.copy()
    covariance[0, 0, 0] = 1e-25
    model = VarianceModel.from_records(replace(records, covariance=covariance), "product")
    field = model.field(0, True)
    seen, unseen = field[15:], field[:15]
    theta = seen.fit(3.0)
    plain, clipped = unseen.nll(theta), unseen.clip_to(seen).nll(theta)
    assert clipped[0] < 50 < plain[0]
    np.testing.assert_array_equal(plain[1:], clipped[1:])
