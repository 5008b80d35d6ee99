from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from boxcov import BoxcovError, BoxcovWarning, Calibration
from boxcov.error_model.fit import calibrated, fit
from boxcov.error_model.product import Unseen, chosen, fitted
from boxcov.error_model.variances import VarianceModel
from boxcov.evaluate.covariance_metrics import gaussian_fit
from boxcov.evaluate.records import Records
from boxcov.posterior.calibration import features, variance_features

FIELDS = ("x", "y", "yaw")


def drawn(
    n: int = 900,
    seed: int = 0,
    powers=((0.8, 0.0, 0.0), (0.0, 0.0, 0.0), (0.5, 0.0, 0.0)),
    base: float = -2.0,
) -> Records:
    """Errors whose log variance is ``base + powers @ log variances - 0.3 log odds of the score``."""
    rng = np.random.default_rng(seed)
    variances = rng.lognormal(0, 1.0, (n, 3))
    boxes = np.concatenate([rng.normal(0, 20, (n, 2)), rng.uniform(-3, 3, (n, 1))], 1)
    scores = rng.uniform(0.1, 0.95, n)
    log_r = (
        base + np.log(variances) @ np.array(powers).T - 0.3 * np.log(scores / (1 - scores))[:, None]
    )
    return Records(
        fields=FIELDS,
        classes=("car", "bus"),
        boxes=boxes,
        uncertainty=variances.sum(1),
        scores=scores,
        labels=rng.integers(0, 2, n),
        frame=np.arange(n) // 15,
        truth=boxes - rng.normal(size=(n, 3)) * np.exp(0.5 * log_r),
        iou=np.ones(n),
        l2=np.zeros(n),
        covariance=variances[:, :, None] * np.eye(3),
    )


@pytest.fixture(scope="module")
def records() -> Records:
    return drawn()


@pytest.fixture(scope="module")
def found(records: Records) -> Calibration:
    return fit(records, "product", estimator="exact", strength=1.0)


def nll(records: Records, calibration: Calibration) -> np.ndarray:
    return gaussian_fit(records.errors, calibrated(records, calibration).predictive).nll


def test_the_powers_are_found_again(found: Calibration) -> None:
    assert found.features == ("score", "range", *variance_features(FIELDS))
    powers, errors = (
        np.array(table)[:, 2:] / np.array(found.spread)[2:]
        for table in (found.slopes, found.error_slopes)
    )
    expected = np.array([[0.8, 0.0, 0.0], [0.0, 0.0, 0.0], [0.5, 0.0, 0.0]])
    assert [found.provenance["variances"][name]["used"] for name in FIELDS] == [True, False, True]
    assert np.all(powers >= 0)
    assert np.all(powers[1] == 0)
    assert np.all(errors[1] == 0)  # y was told nothing of them
    told = [0, 2]
    assert np.all(np.abs(powers - expected)[told] < 3 * errors[told])
    assert np.all(errors[told] > 0)
    assert np.all(errors[told] < 0.2)


def test_each_field_is_at_its_own_optimum_and_so_is_the_whole(records: Records) -> None:
    model = VarianceModel.of(records, "product", "gaussian")
    frames = np.unique(records.frame, return_inverse=True)[1]
    whole, theta, strengths = fitted(model, chosen(model, frames, 3.0))
    at_once = whole.fitted(strengths)
    np.testing.assert_allclose(theta, at_once, atol=2e-4)


def test_gradient_and_curvature_against_finite_differences(records: Records) -> None:
    model = replace(VarianceModel.of(records[:60], "product", "gaussian"), told=(True, False, True))
    strengths, rng = np.array([1.0, 3.0, 10.0]), np.random.default_rng(0)
    theta = model.fitted(strengths) + 0.01 * rng.normal(size=3 * model.X.shape[1])
    _, gradient, curvature = model.objective(theta, strengths)
    step = 1e-5
    for i in range(len(theta)):
        e = step * np.eye(len(theta))[i]
        (above, up, _), (below, down, _) = (
            model.objective(theta + e, strengths),
            model.objective(theta - e, strengths),
        )
        assert gradient[i] == pytest.approx((above - below) / (2 * step), abs=1e-5)
        np.testing.assert_allclose(curvature[i], (up - down) / (2 * step), atol=1e-4)


def test_it_beats_score_exactly_where_the_variances_tell_something() -> None:
    for powers, gains in (((0.8, 0.0, 0.0), True), ((0.0, 0.0, 0.0), False)):
        some = drawn(600, 1, (powers,) * 3), drawn(600, 2, (powers,) * 3)
        product, score = (
            nll(some[1], fit(some[0], kind, estimator="exact", strength=3.0))
            for kind in ("product", "score")
        )
        assert (score.mean() - product.mean() > 0.1) == gains
        assert gains or product.mean() == pytest.approx(score.mean(), abs=0.02)


def test_more_variance_never_means_less_error() -> None:
    """Errors that fall with a variance: the slope rests at zero, so the field does without."""
    found = fit(
        drawn(600, 3, ((-0.8, 0, 0), (0, 0, 0), (0, 0, 0))),
        "product",
        estimator="exact",
        strength=3.0,
    )
    assert not any(entry["used"] for entry in found.provenance["variances"].values())
    assert np.all(np.array(found.slopes)[:, 2:] == 0)


def test_arrays_tensors_and_files_agree(records: Records, found: Calibration) -> None:
    some = records[:20]
    expected = calibrated(some, found).predictive
    tensors = [torch.from_numpy(a) for a in (some.covariance, some.boxes, some.scores, some.labels)]
    again = Calibration.from_json(found.to_json())
    np.testing.assert_allclose(again.predictive(*tensors).numpy(), expected, rtol=1e-12)
    seen = features(found.features, FIELDS, some.boxes, some.scores, some.covariance)
    limits, slopes = np.array(found.limits), np.array(found.slopes) / np.array(found.spread)
    by_hand = (
        np.array(found.log_residual)[some.labels]
        + (np.clip(seen, *limits.T) - np.array(found.centre)) @ slopes.T
    )
    np.testing.assert_allclose(
        np.diagonal(expected, axis1=1, axis2=2), np.exp(by_hand) + np.array(found.floor), rtol=1e-12
    )


def test_a_variance_of_zero_counts_as_the_least_that_was_seen(
    records: Records, found: Calibration
) -> None:
    one = records[:1]
    least = np.exp(np.array(found.limits)[2:, 0])
    none, low = (replace(one, covariance=v * np.eye(3)[None]) for v in (0.0, least))
    np.testing.assert_allclose(
        calibrated(none, found).predictive, calibrated(low, found).predictive, rtol=1e-9
    )


def test_one_frame_is_nothing_to_choose_by(records: Records) -> None:
    one = replace(records[:30], frame=np.zeros(30, int))
    found = fit(one, "product", estimator="exact")
    assert not any(entry["used"] for entry in found.provenance["variances"].values())
    assert np.isfinite(nll(one, found)).all()


def test_a_field_known_of_some_boxes_alone(records: Records) -> None:
    truth = records.truth.copy()
    truth[300:, 1] = np.nan
    found = fit(replace(records, truth=truth), "product", estimator="exact", strength=3.0)
    alone = fit(records[:300], "product", estimator="exact", strength=3.0)
    boxes = (np.array(c.log_residual)[:, 1] for c in (found, alone))
    np.testing.assert_allclose(*boxes, atol=0.1)


def test_what_it_cannot_do(records: Records) -> None:
    with pytest.raises(
        BoxcovError, match="fitted field by field, and loss 'robust' weighs whole boxes"
    ):
        fit(records, "product", estimator="exact", loss="robust")
    unknown = records.truth.copy()
    unknown[:, 2] = np.nan
    with pytest.raises(
        BoxcovError,
        match="the error of yaw is known of no box, and kind 'product' has nothing else to go by",
    ):
        fit(replace(records, truth=unknown), "product", estimator="exact")


def test_it_is_the_usual_kind_unless_that_cannot_be(records: Records) -> None:
    some = records[:45]
    assert fit(some, estimator="exact", strength=3.0).kind == "product"
    assert fit(some, estimator="exact", strength=3.0, loss="robust").kind == "residual"
    unknown = some.truth.copy()
    unknown[:, 2] = np.nan
    with pytest.warns(BoxcovWarning, match="the error of yaw is known of no box"):
        assert fit(replace(some, truth=unknown), estimator="exact", strength=3.0).kind == "residual"


def test_axes_halve_the_turn() -> None:
    records = drawn(200)
    turned = replace(records, truth=records.truth + np.array([0.0, 0.0, np.pi]))
    errors = turned.as_axes().errors
    assert np.abs(errors[:, 2]).max() <= np.pi / 2 + 1e-9
    np.testing.assert_allclose(
        np.cos(2 * errors[:, 2]), np.cos(2 * records.errors[:, 2]), atol=1e-9
    )
    np.testing.assert_array_equal(errors[:, :2], records.errors[:, :2])
    plain = replace(records, fields=("x", "y", "z"))
    assert plain.as_axes() is plain


def test_unseen_boxes_count_as_at_the_limit_of_the_seen(records: Records) -> None:
    """One variance far below all others must not make a box of an unseen frame certain."""
    covariance = records.covariance.copy()
    covariance[0, 0, 0] = 1e-25
    model = VarianceModel.of(replace(records, covariance=covariance), "product", "gaussian")
    seen, unseen = model[15:], model[:15]
    theta = seen.field(0, True).fitted(3.0)
    losses = [m.field(0, True).local(theta, "gaussian").loss for m in (unseen, unseen.beside(seen))]
    assert losses[1][0] < 50 < losses[0][0]
    np.testing.assert_array_equal(losses[0][1:], losses[1][1:])


def test_few_frames_do_not_make_a_gain(records: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean gain that three of sixty frames make is no reason to tell a field of the variances; the same gain over most frames is."""
    model = VarianceModel.of(records, "product", "gaussian")
    frames = np.unique(records.frame, return_inverse=True)[1]
    for gaining, told in ((range(3), False), (range(45), True)):
        gain = np.where(np.isin(frames, gaining), 60 / len(gaining), -0.01)

        def losses(
            m: VarianceModel,
            frames: np.ndarray,
            strengths: tuple[float, ...],
            gain: np.ndarray = gain,
        ) -> dict:
            return {
                s: Unseen(
                    -gain if m.told == (True,) else np.zeros(len(frames)), np.ones(len(frames))
                )
                for s in strengths
            }

        monkeypatch.setattr("boxcov.error_model.product.held_out", losses)
        assert [one.told for one in chosen(model, frames)] == [told] * 3


def test_a_field_of_heavy_tails_is_never_told() -> None:
    """Its variances tell its errors, but a few boxes make up most of their squares: a mean over them says nothing of the next frame."""
    rng = np.random.default_rng(3)
    n = 800
    variance = rng.gamma(1.0, size=(n, 2))
    errors = rng.normal(size=(n, 2)) * np.sqrt(variance)
    errors[::160, 1] *= 100
    heavy = Records(
        fields=("x", "vx"),
        classes=("car",),
        boxes=errors,
        uncertainty=np.ones(n),
        scores=np.full(n, 0.5),
        labels=np.zeros(n, int),
        frame=np.arange(n) // 10,
        truth=np.zeros((n, 2)),
        iou=np.ones(n),
        l2=np.zeros(n),
        covariance=variance[:, :, None] * np.eye(2),
    )
    choices = chosen(VarianceModel.of(heavy, "product", "gaussian"), heavy.frame)
    assert [one.told for one in choices] == [True, False]
