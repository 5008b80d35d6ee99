from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from boxcov import BoxcovError, Calibration
from boxcov.error_model import fit as fit_module
from boxcov.error_model.fit import (
    apply_calibration,
    choose_fields,
    fit_calibration,
    region_coverage,
)
from boxcov.error_model.variance_model import FieldModel, VarianceModel
from boxcov.evaluate.covariance_metrics import gaussian_fit
from boxcov.evaluate.records import Records
from boxcov.posterior.calibration import box_features, variance_features
from helpers.calibration_cases import FIELDS, POWERS, draw_records, make_records


@pytest.fixture(scope="module")
def records() -> Records:
    return draw_records()


@pytest.fixture(scope="module")
def found(records: Records) -> Calibration:
    return fit_calibration(records, estimator="exact", strength=1.0)


def nll(records: Records, calibration: Calibration) -> np.ndarray:
    return gaussian_fit(records.errors, apply_calibration(records, calibration).predictive).nll


def heavy_tailed(count: int, seed: int) -> Records:
    """Student-t errors of unit variance; a velocity that is sometimes unknown."""
    rng = np.random.default_rng(seed)
    truth = np.zeros((count, 3))
    truth[rng.random(count) < 0.3, 2] = np.nan
    errors = rng.standard_t(3, (count, 3)) / np.sqrt(3)
    return make_records(errors, truth, ("x", "y", "vx"))


def test_the_powers_of_the_variances_are_found_again(found: Calibration) -> None:
    assert found.features == ("score", "range", *variance_features(FIELDS))
    powers = np.array(found.slopes)[:, 2:] / np.array(found.spread)[2:]
    assert [found.provenance["variances"][name]["used"] for name in FIELDS] == [True, False, True]
    assert np.all(powers >= 0)
    assert np.all(powers[1] == 0)  # y does not use the variances
    # standard error of a power: sqrt(2 / 900) = 0.05
    np.testing.assert_allclose(powers, POWERS, atol=0.15)


def test_the_slope_of_the_score_is_found_again(found: Calibration) -> None:
    slopes = np.array(found.slopes)[:, 0] / found.spread[0]
    np.testing.assert_allclose(slopes, -0.3, atol=0.15)


def test_product_beats_score_only_if_the_variances_tell() -> None:
    for powers, gains in (((0.8, 0.0, 0.0), True), ((0.0, 0.0, 0.0), False)):
        fitted, unseen = draw_records(600, 1, (powers,) * 3), draw_records(600, 2, (powers,) * 3)
        product, score = (
            nll(unseen, fit_calibration(fitted, kind, estimator="exact", strength=3.0))
            for kind in ("product", "score")
        )
        assert (score.mean() - product.mean() > 0.1) == gains
        assert gains or product.mean() == pytest.approx(score.mean(), abs=0.02)


def test_coverage_after_calibration() -> None:
    fitted, unseen = draw_records(1500, 4), draw_records(1500, 5)
    after = apply_calibration(unseen, fit_calibration(fitted, estimator="exact", strength=3.0))
    inside = gaussian_fit(after.errors, after.predictive).probability
    for level in (0.5, 0.9, 0.95):
        assert np.mean(inside < level) == pytest.approx(level, abs=0.04)


def test_a_field_whose_error_falls_with_a_variance_skips_it() -> None:
    powers = ((-0.8, 0, 0), (0, 0, 0), (0, 0, 0))
    found = fit_calibration(draw_records(600, 3, powers), estimator="exact", strength=3.0)
    assert not any(entry["used"] for entry in found.provenance["variances"].values())
    assert np.all(np.array(found.slopes)[:, 2:] == 0)


def test_arrays_tensors_and_files_agree(records: Records, found: Calibration) -> None:
    some = records[:20]
    expected = apply_calibration(some, found).predictive
    tensors = [torch.from_numpy(a) for a in (some.covariance, some.boxes, some.scores, some.labels)]
    again = Calibration.from_json(found.to_json())
    np.testing.assert_allclose(again.predictive(*tensors).numpy(), expected, rtol=1e-12)
    seen = box_features(found.features, FIELDS, some.boxes, some.scores, some.covariance)
    limits, slopes = np.array(found.limits), np.array(found.slopes) / np.array(found.spread)
    by_hand = (
        np.array(found.log_residual)[some.labels]
        + (np.clip(seen, *limits.T) - np.array(found.centre)) @ slopes.T
    )
    variances = np.exp(by_hand) + np.array(found.floor)
    np.testing.assert_allclose(np.diagonal(expected, axis1=1, axis2=2), variances, rtol=1e-12)


def test_a_zero_variance_counts_as_the_smallest_seen(records: Records, found: Calibration) -> None:
    one = records[:1]
    smallest = np.exp(np.array(found.limits)[2:, 0])
    zero, low = (replace(one, covariance=v * np.eye(3)[None]) for v in (0.0, smallest))
    np.testing.assert_allclose(
        apply_calibration(zero, found).predictive,
        apply_calibration(low, found).predictive,
        rtol=1e-9,
    )


def test_a_box_far_away_counts_as_the_farthest_seen(records: Records, found: Calibration) -> None:
    far, farther = (
        replace(records[:1], boxes=records.boxes[:1] + np.array([x, 0, 0])) for x in (1e3, 1e6)
    )
    np.testing.assert_allclose(
        apply_calibration(far, found).predictive, apply_calibration(farther, found).predictive
    )


def test_one_frame_gives_nothing_to_choose_by(records: Records) -> None:
    one = replace(records[:30], frame=np.zeros(30, int))
    found = fit_calibration(one, estimator="exact")
    assert not any(entry["used"] for entry in found.provenance["variances"].values())
    assert np.isfinite(nll(one, found)).all()


@pytest.mark.parametrize("kind", ["score", "product"])
def test_one_box_is_enough(records: Records, kind) -> None:
    after = apply_calibration(records[:1], fit_calibration(records[:1], kind, estimator="exact"))
    assert np.isfinite(after.predictive).all()
    assert np.linalg.eigvalsh(after.predictive).min() > 0


def test_a_field_known_for_some_boxes_is_fitted_to_those(records: Records) -> None:
    truth = records.truth.copy()
    truth[300:, 1] = np.nan
    found = fit_calibration(replace(records, truth=truth), estimator="exact", strength=3.0)
    alone = fit_calibration(records[:300], estimator="exact", strength=3.0)
    boxes = (np.array(c.log_residual)[:, 1] for c in (found, alone))
    np.testing.assert_allclose(*boxes, atol=0.1)


def test_a_small_or_unseen_class_follows_the_others(records: Records) -> None:
    inflated = np.where(records.labels == 1, 3.0, 1.0)[:, None]
    records = replace(
        records, truth=records.boxes - inflated * records.errors, classes=("car", "bus", "cone")
    )
    keep = (records.labels == 0) | (np.cumsum(records.labels == 1) <= 1)  # a single bus
    few, many = (
        np.array(fit_calibration(some, "score", estimator="exact", strength=10.0).log_residual)
        for some in (records[keep], records)
    )
    assert np.all(many[1] - many[0] > 1.5)  # log 9 = 2.2
    assert np.all(np.abs(few[1] - few[0]) < 0.5 * (many[1] - many[0]))
    low, high = np.minimum(many[0], many[1]), np.maximum(many[0], many[1])
    assert np.all((many[2] >= low - 1e-9) & (many[2] <= high + 1e-9))


def test_singular_covariances_are_calibrated(records: Records) -> None:
    u = np.random.default_rng(0).normal(size=(900, 3, 1))
    for covariance in (u @ u.transpose(0, 2, 1), np.zeros((900, 3, 3))):
        given = replace(records, covariance=covariance)
        found = fit_calibration(given, estimator="exact", strength=1.0)
        assert np.linalg.eigvalsh(apply_calibration(given, found).predictive).min() > 0
        assert found.provenance["nll_before"] == np.inf
        assert np.isfinite(found.provenance["nll_after"])


def test_zero_errors_leave_a_positive_variance(records: Records) -> None:
    perfect = replace(records[:30], truth=records.boxes[:30].copy())
    found = fit_calibration(perfect, estimator="exact", strength=1.0)
    assert np.linalg.eigvalsh(apply_calibration(perfect, found).predictive).min() > 0


def test_boxes_without_an_object_do_not_count(records: Records) -> None:
    some = replace(records, l2=np.where(np.arange(900) < 150, 0.0, np.nan))
    fits = (fit_calibration(r, estimator="exact", strength=1.0) for r in (some, records[:150]))
    first, second = (f.log_residual for f in fits)
    assert first == second


def test_provenance_says_what_was_fitted(records: Records) -> None:
    found = fit_calibration(records, estimator="mcglm, 10 samples", data="simulated:clear test")
    about = found.provenance
    assert (about["boxes"], about["frames"], about["data"]) == (900, 60, "simulated:clear test")
    assert sum(about["boxes_by_class"].values()) == 900
    assert about["nll_after"] < about["nll_before"]
    assert set(about["strength"].values()) <= set(fit_module.STRENGTHS)
    assert found.estimator == "mcglm, 10 samples"
    assert found.kind == "product"


def test_mistakes_are_refused(records: Records) -> None:
    with pytest.raises(BoxcovError, match="unknown calibration 'magic': choose from score, produc"):
        fit_calibration(records, "magic", estimator="exact")
    with pytest.raises(BoxcovError, match="strength must be above 0"):
        fit_calibration(records, estimator="exact", strength=0.0)
    unpaired = replace(records, l2=np.full(900, np.nan))
    with pytest.raises(BoxcovError, match="none of 900 boxes is paired"):
        fit_calibration(unpaired, estimator="exact")
    with pytest.raises(BoxcovError, match="none of 0 boxes"):
        fit_calibration(records[:0], estimator="exact")
    with pytest.raises(BoxcovError, match="no covariance to calibrate"):
        fit_calibration(replace(records, covariance=None), estimator="exact")
    with pytest.raises(BoxcovError, match="not finite"):
        fit_calibration(
            replace(records, covariance=np.full((900, 3, 3), np.nan)), estimator="exact"
        )
    unknown = records.truth.copy()
    unknown[:, 2] = np.nan
    with pytest.raises(BoxcovError, match="the error of yaw is unknown for every box"):
        fit_calibration(replace(records, truth=unknown), estimator="exact")


def test_few_frames_do_not_make_a_gain(records: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean gain made by 3 of 60 frames does not count; the same gain over most frames does."""
    model = VarianceModel.from_records(records, "product")
    frames = np.unique(records.frame, return_inverse=True)[1]
    variance_column = 1 + len(model.classes) + model.features.index("variance x")
    for gaining, used in ((range(3), False), (range(45), True)):
        gain = np.where(np.isin(frames, gaining), 60 / len(gaining), -0.01)

        def losses(field: FieldModel, frames, strengths, gain=gain) -> dict:
            with_variances = field.high[variance_column] > 0
            return {s: -gain if with_variances else np.zeros(len(frames)) for s in strengths}

        monkeypatch.setattr(fit_module, "held_out_nll", losses)
        assert [c.with_variances for c in choose_fields(model, frames, "product")] == [used] * 3


def test_a_heavy_tailed_field_never_uses_the_variances() -> None:
    """The variances tell its errors, but a few boxes make up most of their squares."""
    rng = np.random.default_rng(3)
    variance = rng.gamma(1.0, size=(800, 2))
    errors = rng.normal(size=(800, 2)) * np.sqrt(variance)
    errors[::160, 1] *= 100
    records = make_records(
        errors, np.zeros((800, 2)), ("x", "vx"), covariance=variance[:, :, None] * np.eye(2)
    )
    model = VarianceModel.from_records(records, "product")
    choices = choose_fields(model, records.frame, "product")
    assert [c.with_variances for c in choices] == [True, False]


def test_regions_hold_their_share_of_heavy_tailed_errors() -> None:
    found = fit_calibration(heavy_tailed(4000, 0), "score", estimator="exact")
    held_out = apply_calibration(heavy_tailed(4000, 1), found)
    for level in (0.5, 0.9, 0.95):
        assert abs(region_coverage(held_out, found, level) - level) < 0.02
    assert region_coverage(held_out, replace(found, regions=()), 0.5) > 0.55  # a plain Gaussian
    assert Calibration.from_json(found.to_json()) == found


def test_regions_of_few_boxes_leave_out_high_levels() -> None:
    found = fit_calibration(heavy_tailed(20, 0), "score", estimator="exact", strength=1.0)
    assert max(level for level, _ in found.regions) == 0.95
    assert found.radius(0.99) > found.radius(0.95)


def test_axes_wrap_errors_to_a_quarter_turn() -> None:
    records = draw_records(200)
    turned = replace(records, truth=records.truth + np.array([0.0, 0.0, np.pi]))
    errors = turned.as_axes().errors
    assert np.abs(errors[:, 2]).max() <= np.pi / 2 + 1e-9
    np.testing.assert_allclose(
        np.cos(2 * errors[:, 2]), np.cos(2 * records.errors[:, 2]), atol=1e-9
    )
    np.testing.assert_array_equal(errors[:, :2], records.errors[:, :2])
    plain = replace(records, fields=("x", "y", "z"))
    assert plain.as_axes() is plain
