from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.stats import chi2, multivariate_normal

from boxcov import BoxcovError, BoxcovWarning
from boxcov.error_model.fit import calibrated, fit, within
from boxcov.error_model.likelihood import Errors, evaluate, penalty
from boxcov.error_model.newton import minimise
from boxcov.error_model.variances import VarianceModel
from boxcov.evaluate.covariance_metrics import gaussian_fit
from boxcov.evaluate.records import Records
from boxcov.posterior.calibration import Calibration, features

FIELDS = ("x", "y", "w", "l", "yaw", "vx", "vy")
CLASSES = ("car", "bus", "cone")


def drawn(
    n: int = 1500,
    seed: int = 0,
    a: float = 0.3,
    fields=FIELDS,
    classes=CLASSES,
    residual=None,
    per_frame: int = 15,
) -> Records:
    """Records whose errors are drawn from a Sigma + diag(residual(records)), with no unknown field."""
    rng = np.random.default_rng(seed)
    D = len(fields)
    A = rng.normal(size=(n, D, D)) * rng.lognormal(0, 0.5, (n, 1, 1))
    boxes = rng.normal(0, 20, (n, D))
    for side in ("w", "l"):
        if side in fields:
            boxes[:, fields.index(side)] = rng.lognormal(0.8, 0.4, n)
    if "yaw" in fields:
        boxes[:, fields.index("yaw")] = rng.uniform(-3, 3, n)
    records = Records(
        fields=fields,
        classes=classes,
        boxes=boxes,
        uncertainty=np.ones(n),
        scores=rng.uniform(0.1, 0.95, n),
        labels=rng.integers(0, len(classes), n),
        frame=np.arange(n) // per_frame,
        truth=np.zeros((n, D)),
        iou=np.ones(n),
        l2=np.zeros(n),
        covariance=A @ A.transpose(0, 2, 1) / D,
    )
    C = a * records.covariance
    if residual is not None:
        C = C + residual(records)[:, :, None] * np.eye(D)
    errors = np.einsum("nij,nj->ni", np.linalg.cholesky(C), rng.normal(size=(n, D)))
    return replace(records, truth=records.boxes - errors)


def flat(records: Records) -> np.ndarray:
    return np.tile(0.02 * np.arange(1, 1 + len(records.fields)), (len(records), 1))


def log_linear(records: Records) -> np.ndarray:
    """Falls with the score, rises with the range, differs by class."""
    seen = features(("score", "range"), records.fields, records.boxes, records.scores)
    D = len(records.fields)
    by_class = np.array([-3.0, -2.0, -4.0])[records.labels]
    return np.exp(
        by_class[:, None] + 0.1 * np.arange(D) - 0.5 * seen[:, :1] + 0.7 * (seen[:, 1:] - 3)
    )


def mean_nll(records: Records) -> float:
    return float(gaussian_fit(records.errors, records.predictive).nll.mean())


# exact answers


def test_the_scale_is_the_mean_squared_distance() -> None:
    records = drawn(300, classes=("car",))
    found = fit(records, "scale", estimator="exact")
    q = [e @ np.linalg.solve(C, e) for e, C in zip(records.errors, records.covariance)]
    assert np.exp(found.log_scale[0]) == pytest.approx(np.mean(q) / len(FIELDS), rel=1e-6)
    # variance of log a: that of a chi-squared over its degrees of freedom
    assert found.error_scale[0] == pytest.approx(np.sqrt(2 / (300 * len(FIELDS))), rel=0.3)


def test_each_class_has_its_own_scale_unless_it_is_small() -> None:
    records = drawn(600, a=0.5)
    inflated = np.where(records.labels == 1, 3.0, 1.0)[:, None]
    records = replace(records, truth=records.boxes - inflated * records.errors)
    keep = (records.labels != 2) | (np.cumsum(records.labels == 2) <= 1)  # one cone
    records = records[keep]
    q = gaussian_fit(records.errors, records.covariance).nees
    apart = np.array([q[records.labels == c].mean() / 7 for c in range(3)])
    found = np.exp(fit(records, "scale", estimator="exact", strength=1e-6).log_scale)
    np.testing.assert_allclose(found, apart, rtol=1e-4)
    pooled = np.exp(fit(records, "scale", estimator="exact", strength=1e9).log_scale)
    np.testing.assert_allclose(pooled, q.mean() / 7, rtol=1e-4)
    shrunk = np.exp(fit(records, "scale", estimator="exact", strength=10.0).log_scale)
    weight = [
        abs(np.log(shrunk[c]) - np.log(apart[c])) / abs(np.log(pooled[0]) - np.log(apart[c]))
        for c in (0, 1, 2)
    ]
    assert weight[2] > 3 * max(
        weight[:2]
    )  # the lonely cone follows the others, they follow themselves


def test_an_unseen_class_gets_what_all_have_in_common() -> None:
    records = drawn(300, residual=flat)
    found = fit(records[records.labels < 2], "affine", estimator="exact", strength=5.0)
    assert min(found.log_scale[:2]) - 1e-9 <= found.log_scale[2] <= max(found.log_scale[:2]) + 1e-9
    assert found.error_scale[2] > max(found.error_scale[:2])
    assert found.provenance["boxes_by_class"]["cone"] == 0


@pytest.mark.parametrize("loss", ["gaussian", "robust"])
def test_a_and_b_are_found_again(loss) -> None:
    found = fit(drawn(2000, residual=flat), "affine", estimator="exact", loss=loss, strength=100.0)
    assert np.all(
        np.abs(np.array(found.log_scale) - np.log(0.3)) < 3.5 * np.array(found.error_scale)
    )
    truth = np.log(0.02 * np.arange(1, 8))
    assert (
        np.mean(np.abs(np.array(found.log_residual) - truth) < 3 * np.array(found.error_residual))
        > 0.9
    )
    assert max(found.error_scale) < 0.2


def test_intervals_hold_what_they_say() -> None:
    inside = []
    for seed in range(20):
        found = fit(
            drawn(400, seed, classes=("car",), residual=flat),
            "affine",
            estimator="exact",
            strength=1.0,
        )
        off = np.array(
            [
                found.log_scale[0] - np.log(0.3),
                *(np.array(found.log_residual[0]) - np.log(0.02 * np.arange(1, 8))),
            ]
        )
        inside.append(
            np.abs(off) < 1.96 * np.array([found.error_scale[0], *found.error_residual[0]])
        )
    assert 0.85 < np.mean(inside) <= 1.0


def test_the_log_linear_residual_is_found_again() -> None:
    records = drawn(2000, residual=log_linear)
    found = fit(records, "residual", estimator="exact", strength=1.0)
    assert found.features == ("score", "size", "range", "speed")
    slopes = np.array(found.slopes) / np.array(found.spread)
    errors = np.array(found.error_slopes) / np.array(found.spread)
    expected = np.tile([-0.5, 0.0, 0.7, 0.0], (7, 1))
    assert np.mean(np.abs(slopes - expected) < 2.5 * errors) > 0.9
    assert np.exp(found.log_scale[0]) == pytest.approx(0.3, rel=0.15)
    right = 0.3 * records.covariance + log_linear(records)[:, :, None] * np.eye(7)
    assert mean_nll(calibrated(records, found)) == pytest.approx(
        gaussian_fit(records.errors, right).nll.mean(), abs=0.06
    )


def test_residual_beats_score_alone_exactly_where_sigma_tells_something() -> None:
    for a, gain in ((0.3, True), (0.0, False)):
        fitted, unseen = (
            drawn(1500, 1, a, residual=log_linear),
            drawn(1500, 2, a, residual=log_linear),
        )
        nll = {
            kind: mean_nll(calibrated(unseen, fit(fitted, kind, estimator="exact", strength=3.0)))
            for kind in ("residual", "score")
        }
        assert (nll["score"] - nll["residual"] > 0.05) == gain


def test_a_useless_sigma_gets_no_weight() -> None:
    found = fit(
        drawn(1500, 3, 0.0, residual=log_linear), "residual", estimator="exact", strength=3.0
    )
    assert np.exp(found.log_scale[0]) < 1e-3


def test_coverage_after_calibration() -> None:
    fitted, unseen = drawn(1500, 4, residual=log_linear), drawn(1500, 5, residual=log_linear)
    after = calibrated(unseen, fit(fitted, "residual", estimator="exact", strength=3.0))
    inside = gaussian_fit(after.errors, after.predictive).probability
    for level in (0.5, 0.9, 0.95):
        assert np.mean(inside < level) == pytest.approx(level, abs=0.04)


# the optimum


@pytest.mark.parametrize("loss", ["gaussian", "robust"])
@pytest.mark.parametrize("kind", ["scale", "affine", "residual", "score"])
def test_scipy_finds_nothing_better(kind, loss) -> None:
    records = drawn(200, 6, fields=("x", "y", "w", "yaw"), classes=("car", "bus"), residual=flat)
    records.truth[::7, 1] = np.nan
    model = VarianceModel.of(records, kind, loss)
    theta = model.fitted(2.0)
    low, high = model.bounds()
    ours = model.objective(theta, 2.0)[0]
    for start in (theta, np.clip(model._start(0.1), low, high)):
        theirs = minimize(
            lambda t: model.objective(t, 2.0)[:2],
            start,
            jac=True,
            method="L-BFGS-B",
            bounds=list(zip(low, high)),
        )
        assert ours <= theirs.fun + 1e-5 * (1 + abs(ours))


@pytest.mark.parametrize("loss", ["gaussian", "robust"])
def test_slopes_and_curvatures_are_those_of_the_loss(loss) -> None:
    records = drawn(40, 7, residual=flat)
    records.truth[::3, 5:] = np.nan
    records.truth[1, :] += 30  # a wrong pair
    errors = Errors.of(records.errors, records.covariance, floor=1e-3)
    at = np.concatenate([np.full((40, 1), -1.0), np.log(flat(records))], 1)

    def local(point):
        return evaluate(errors, point[:, 0], point[:, 1:], loss)

    here = local(at)
    for j in range(8):
        step = np.zeros(8)
        step[j] = 1e-5
        up, down = local(at + step), local(at - step)
        np.testing.assert_allclose(
            (up.loss - down.loss) / 2e-5, here.slope[:, j], rtol=1e-5, atol=1e-6
        )
        np.testing.assert_allclose(
            (up.slope - down.slope) / 2e-5, here.curvature[:, j], rtol=1e-4, atol=1e-5
        )
    assert np.linalg.eigvalsh(here.information).min() > -1e-9


def test_the_gaussian_loss_is_the_density_of_what_is_known() -> None:
    records = drawn(5, 8, residual=flat)
    records.truth[2, [0, 5]] = np.nan
    loss = evaluate(
        Errors.of(records.errors, records.covariance),
        np.log(np.full(5, 0.3)),
        np.log(flat(records)),
        "gaussian",
    ).loss
    C = 0.3 * records.covariance + flat(records)[:, :, None] * np.eye(7)
    for i, (error, cov) in enumerate(zip(records.errors, C)):
        known = ~np.isnan(error)
        assert loss[i] == pytest.approx(
            -multivariate_normal(cov=cov[np.ix_(known, known)]).logpdf(error[known])
        )


@pytest.mark.parametrize("d", [1, 2, 9])
def test_the_robust_weights_leave_gaussian_errors_as_they_are(d: int) -> None:
    q = chi2(d).ppf((np.arange(200_000) + 0.5) / 200_000)
    _, weight, _ = penalty(q, np.full(len(q), d), "robust")
    assert np.mean(weight * q) == pytest.approx(d, rel=1e-3)
    assert np.all(np.diff(weight) <= 0)


def test_wrong_pairs_do_not_move_the_robust_fit() -> None:
    records = drawn(800, 9, residual=flat, classes=("car",))
    wrong = np.arange(800) % 20 == 0
    spoilt = replace(records, truth=records.truth + 5 * wrong[:, None])
    clean, robust, plain = (
        np.diagonal(
            calibrated(
                one, fit(one, "affine", estimator="exact", loss=loss, strength=3.0)
            ).predictive,
            axis1=1,
            axis2=2,
        ).mean(0)
        for one, loss in ((records, "gaussian"), (spoilt, "robust"), (spoilt, "gaussian"))
    )
    assert np.all(robust < 1.5 * clean)
    assert np.all(
        (plain > 2.5 * clean)[np.array(FIELDS) != "yaw"]
    )  # which goes round: 5 rad off are not far


def test_the_minimum_of_a_quadratic_under_bounds() -> None:
    rng = np.random.default_rng(0)
    A = rng.normal(size=(5, 5))
    H, b = A @ A.T + np.eye(5), rng.normal(size=5)
    low, high = np.full(5, -0.1), np.full(5, 0.2)
    found = minimise(lambda x: (float(x @ H @ x / 2 - b @ x), H @ x - b, H), np.zeros(5), low, high)
    theirs = minimize(
        lambda x: x @ H @ x / 2 - b @ x,
        np.zeros(5),
        bounds=list(zip(low, high)),
        method="L-BFGS-B",
        tol=1e-12,
    )
    np.testing.assert_allclose(found, theirs.x, atol=1e-5)
    with pytest.raises(BoxcovError, match="not finite"):
        minimise(lambda x: (np.inf, x, np.eye(1)), np.zeros(1), low[:1], high[:1])


# what must hold


def test_the_residual_falls_with_the_score_and_rises_with_the_range_even_if_the_data_say_otherwise() -> (
    None
):
    def upside_down(records: Records) -> np.ndarray:
        seen = features(("score", "range"), records.fields, records.boxes, records.scores)
        return np.exp(
            -3 + np.zeros((len(records), 7)) + 0.8 * seen[:, :1] - 0.8 * (seen[:, 1:] - 3)
        )

    found = fit(drawn(800, 10, 0.0, residual=upside_down), "score", estimator="exact", strength=1.0)
    score, _, distance, _ = np.array(found.slopes).T
    assert np.all(score <= 0)
    assert np.all(distance >= 0)


def test_features_beyond_those_seen_count_as_the_last_one_seen() -> None:
    records = drawn(300, 11, residual=log_linear)
    found = fit(records, "residual", estimator="exact", strength=3.0)
    far, farthest = (
        replace(records[:1], boxes=np.where(np.array(FIELDS) == "x", x, records.boxes[:1]))
        for x in (1e3, 1e6)
    )
    np.testing.assert_allclose(
        calibrated(far, found).predictive, calibrated(farthest, found).predictive
    )


@pytest.mark.parametrize("kind", ["scale", "affine", "residual", "score"])
def test_one_box_is_enough(kind) -> None:
    records = drawn(1, 12, residual=flat, classes=("car",))
    after = calibrated(records, fit(records, kind, estimator="exact"))
    assert np.isfinite(after.predictive).all()
    assert np.linalg.eigvalsh(after.predictive).min() > 0


def test_no_pair_is_an_error() -> None:
    records = replace(drawn(5), l2=np.full(5, np.nan))
    with pytest.raises(BoxcovError, match="none of 5 boxes was paired"):
        fit(records, "scale", estimator="exact")
    with pytest.raises(BoxcovError, match="none of 0 boxes"):
        fit(records[:0], "scale", estimator="exact")


def test_boxes_without_a_pair_do_not_count() -> None:
    records = drawn(100, 13, residual=flat)
    more = replace(records, l2=np.where(np.arange(100) < 50, 0.0, np.nan))
    assert (
        fit(more, "affine", estimator="exact", strength=1.0).log_scale
        == fit(records[:50], "affine", estimator="exact", strength=1.0).log_scale
    )


def test_singular_covariances() -> None:
    records = drawn(300, 14, residual=flat)
    u = np.random.default_rng(0).normal(size=(300, 7, 1))
    thin = replace(records, covariance=u @ u.transpose(0, 2, 1))
    with pytest.raises(
        BoxcovError, match="300 of 300 boxes are singular, and no factor mends that"
    ):
        fit(thin, "scale", estimator="exact")
    none = replace(records, covariance=np.zeros((300, 7, 7)))
    for given in (thin, none):
        for kind in ("affine", "residual"):
            found = fit(given, kind, estimator="exact", strength=1.0)
            assert np.linalg.eigvalsh(calibrated(given, found).predictive).min() > 0
            assert found.provenance["nll_before"] == np.inf
            assert np.isfinite(found.provenance["nll_after"])


def test_unknown_velocities_are_left_out() -> None:
    records = drawn(2000, 15, residual=flat, classes=("car",))
    some = replace(records, truth=records.truth.copy())
    some.truth[::2, 5:] = np.nan
    found = fit(some, "affine", estimator="exact", strength=1.0)
    assert np.all(
        np.abs(np.array(found.log_residual[0]) - np.log(0.02 * np.arange(1, 8)))
        < 3.5 * np.array(found.error_residual[0])
    )
    none = replace(some, truth=np.where(np.arange(7) >= 5, np.nan, records.truth))
    with pytest.warns(BoxcovWarning, match="error of vx, vy is known of no box"):
        found = fit(none, "affine", estimator="exact", strength=1.0)
    assert found.log_residual[0][5:] == (-np.inf, -np.inf)
    after = calibrated(none, found).predictive
    np.testing.assert_allclose(
        after[:, 5, 5], np.exp(found.log_scale[0]) * none.covariance[:, 5, 5]
    )
    with pytest.raises(BoxcovError, match="vx, vy is known of no box, and kind 'score'"):
        fit(none, "score", estimator="exact")


def test_errors_that_are_all_zero_leave_a_positive_variance() -> None:
    records = drawn(30, 16)
    found = fit(
        replace(records, truth=records.boxes.copy()), "affine", estimator="exact", strength=1.0
    )
    assert np.linalg.eigvalsh(calibrated(records, found).predictive).min() > 0


def test_what_is_written_down() -> None:
    found = fit(
        drawn(300, 17, residual=flat),
        "affine",
        estimator="mcglm, 10 samples",
        data="simulated:clear test",
    )
    about = found.provenance
    assert (about["boxes"], about["frames"], about["data"], about["loss"]) == (
        300,
        20,
        "simulated:clear test",
        "gaussian",
    )
    assert about["nll_after"] < about["nll_before"]
    assert about["strength"] == float(
        min(about["cross_validation"], key=about["cross_validation"].get)
    )
    assert found.estimator == "mcglm, 10 samples"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "magic"}, "no kind of calibration 'magic'"),
        ({"strength": 0.0}, "strength must be above 0"),
        ({"loss": "huber"}, "loss must be one of gaussian, robust"),
        (
            {"features": ["weather"]},
            "no feature weather: boxes of x y w l yaw vx vy have score, size, range, speed",
        ),
    ],
)
def test_what_is_refused(change, message) -> None:
    with pytest.raises(BoxcovError, match=message):
        fit(drawn(20, residual=flat), **{"kind": "residual", "estimator": "exact", **change})


def test_records_without_or_with_broken_covariance_are_refused() -> None:
    records = drawn(20)
    with pytest.raises(BoxcovError, match="no covariance to calibrate"):
        fit(replace(records, covariance=None), "scale", estimator="exact")
    with pytest.raises(BoxcovError, match="not finite"):
        fit(replace(records, covariance=np.full((20, 7, 7), np.nan)), "scale", estimator="exact")
    found = fit(records, "scale", estimator="exact", strength=1.0)
    with pytest.raises(BoxcovError, match="the records has x y"):
        calibrated(drawn(5, fields=("x", "y")), found)


def heavy(count: int, seed: int) -> Records:
    """Errors with Student's tails, of the variance that the covariance says; a velocity that is sometimes unknown."""
    rng = np.random.default_rng(seed)
    errors = rng.standard_t(3, (count, 3)) / np.sqrt(3)
    truth = np.zeros((count, 3))
    truth[rng.random(count) < 0.3, 2] = np.nan
    return Records(
        fields=("x", "y", "vx"),
        classes=("car",),
        boxes=errors,
        uncertainty=np.ones(count),
        scores=np.full(count, 0.5),
        labels=np.zeros(count, int),
        frame=np.arange(count) // 10,
        truth=truth,
        iou=np.ones(count),
        l2=np.zeros(count),
        covariance=np.tile(np.eye(3), (count, 1, 1)),
    )


def test_regions_hold_their_share_of_errors_with_heavy_tails() -> None:
    found = fit(heavy(4000, 0), "scale", estimator="exact")
    held_out = calibrated(heavy(4000, 1), found)
    for level in (0.5, 0.9, 0.95):
        assert abs(within(held_out, found, level) - level) < 0.02
    gaussian = within(held_out, replace(found, regions=()), 0.5)
    assert gaussian > 0.55  # what regions mend
    assert Calibration.from_json(found.to_json()) == found


def test_regions_of_few_boxes_leave_out_what_they_cannot_tell() -> None:
    found = fit(heavy(20, 0), "scale", estimator="exact", strength=1.0)
    assert max(level for level, _ in found.regions) == 0.95
    assert found.radius(0.99) > found.radius(0.95)


@pytest.mark.parametrize("level", [0, 1, -0.5, float("nan")])
def test_a_level_that_is_no_share_is_refused(level: float) -> None:
    with pytest.raises(BoxcovError, match="level must lie between 0 and 1"):
        fit(heavy(20, 0), "scale", estimator="exact", strength=1.0).radius(level)
