from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from boxcov.errors import BoxcovError
from boxcov.evaluate.covariance_metrics import (
    calibration_error,
    covariance_metrics,
    coverage,
    ence,
    gaussian_fit,
    probability_metrics,
)

NAN = float("nan")


def sample(rng, n: int, D: int, unknown: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Errors drawn from their own covariances, of very different units."""
    root = rng.normal(size=(n, D, D + 2)) * np.geomspace(1e-3, 1e3, D)[:, None]
    covariance = root @ root.transpose(0, 2, 1)
    errors = np.stack([rng.multivariate_normal(np.zeros(D), C) for C in covariance])
    errors[rng.random((n, D)) < unknown] = NAN
    return errors, covariance


@pytest.mark.parametrize("unknown", [0.0, 0.4])
def test_rows_agree_with_scipy(unknown: float) -> None:
    errors, covariance = sample(np.random.default_rng(0), 60, 5, unknown)
    errors[3] = NAN
    fit = gaussian_fit(errors, covariance)
    rows = ~np.isnan(errors).all(1)
    assert rows.sum() == len(fit.nll) < 60
    for i, (e, C) in enumerate(zip(errors[rows], covariance[rows])):
        known = ~np.isnan(e)
        assert fit.dims[i] == known.sum()
        e, C = e[known], C[np.ix_(known, known)]
        unit = 1 / np.sqrt(np.diag(C))  # scipy takes differing units for a singular matrix
        density = (
            stats.multivariate_normal(cov=C * unit[:, None] * unit).pdf(e * unit) * unit.prod()
        )
        assert fit.nll[i] == pytest.approx(-np.log(density), rel=1e-8)
        assert fit.nees[i] == pytest.approx(e @ np.linalg.solve(C, e), rel=1e-8)
        assert fit.probability[i] == pytest.approx(
            stats.chi2.cdf(fit.nees[i], known.sum()), abs=1e-9
        )


def test_metrics_tell_right_from_wrong_covariances() -> None:
    errors, covariance = sample(np.random.default_rng(0), 3000, 3, 0.2)
    right = covariance_metrics(errors, covariance)
    low, high = stats.chi2.ppf([0.025, 0.975], total := (~np.isnan(errors)).sum()) / total
    assert low < right["ANEES"] < high
    for level, inside in right["coverage"].items():
        assert inside == pytest.approx(float(level), abs=0.03)
    assert right["ENCE"] < 0.1
    small, large = (
        covariance_metrics(errors, covariance / 4),
        covariance_metrics(errors, covariance * 4),
    )
    assert small["ANEES"] == pytest.approx(4 * right["ANEES"])
    assert small["coverage"]["0.9"] < 0.7 < 0.99 < large["coverage"]["0.9"]
    assert min(small["NLL"], large["NLL"]) > right["NLL"]
    assert small["ENCE"] == pytest.approx(1, abs=0.1)
    assert large["ENCE"] == pytest.approx(0.5, abs=0.05)


def test_coverage_equals_counting() -> None:
    fit = gaussian_fit(*sample(np.random.default_rng(0), 50, 3))
    levels = np.linspace(0, 1, 21)
    expected = [np.mean([fit.nees[i] <= stats.chi2.ppf(p, 3) for i in range(50)]) for p in levels]
    assert coverage(fit, levels).tolist() == expected
    assert coverage(gaussian_fit(np.zeros((1, 2)), np.eye(2)[None]), [0.0]).tolist() == [
        1.0
    ]  # on the border is inside


@pytest.mark.parametrize(
    "covariance",
    [
        np.zeros((2, 2)),
        np.diag([1.0, 0.0]),
        np.ones((2, 2)),
        np.diag([1.0, -1.0]),
        np.array([[1, 2], [2, 1.0]]),
        np.diag([np.inf, 1]),
        np.full((2, 2), NAN),
    ],
)
def test_singular_covariances(covariance: np.ndarray) -> None:
    errors, both = np.array([[0.1, 0.2], [0.1, 0.2]]), np.stack([np.eye(2), covariance])
    fit = gaussian_fit(errors, both)
    assert fit.nll[1] == fit.nees[1] == np.inf
    assert np.isfinite(fit.nll[0])
    found = covariance_metrics(errors, both)
    assert found["singular"] == 1
    assert found["NLL"] == found["ANEES"] == np.inf
    assert found["coverage"] == {"0.5": 0.5, "0.9": 0.5, "0.95": 0.5}


def test_small_units_are_not_singular() -> None:
    covariance = np.diag([1e-20, 1e20])[None]
    assert gaussian_fit(np.array([[1e-10, 1e10]]), covariance).nees[0] == pytest.approx(2)


@pytest.mark.parametrize("k", [2, 5, 9])
def test_too_few_samples_in_float32_are_singular(k: int) -> None:
    """Rounding makes the eigenvalues that should be 0 positive in half of the rows."""
    samples = np.random.default_rng(0).normal(size=(500, 9, k)).astype(np.float32)
    samples -= samples.mean(2, keepdims=True)
    assert np.isinf(
        gaussian_fit(np.ones((500, 9)), samples @ samples.transpose(0, 2, 1)).nees
    ).all()


def slow_ence(errors, variance, bins: int) -> float:
    order = sorted(range(len(errors)), key=lambda i: variance[i])
    cuts = [variance[order[len(order) * k // bins]] for k in range(1, bins)]
    groups: dict[int, list[int]] = {}
    for i in range(len(errors)):
        groups.setdefault(sum(variance[i] >= cut for cut in cuts), []).append(i)
    parts = []
    for rows in groups.values():
        rmv, rmse = (
            np.mean([variance[i] for i in rows]) ** 0.5,
            np.mean([errors[i] ** 2 for i in rows]) ** 0.5,
        )
        parts.append(abs(rmv - rmse) / rmv)
    return float(np.mean(parts))


@pytest.mark.parametrize("n", [1, 3, 10, 57, 200])
def test_ence_equals_brute_force(n: int) -> None:
    rng = np.random.default_rng(n)
    for variance in (rng.gamma(1, 1, n), rng.integers(1, 4, n).astype(float), np.ones(n)):
        errors = rng.normal(size=n)
        assert ence(errors, variance) == pytest.approx(slow_ence(errors, variance, 10))
        shuffle = rng.permutation(n)
        assert ence(errors[shuffle], variance[shuffle]) == pytest.approx(ence(errors, variance))


def test_ece_of_equal_probabilities_ignores_their_order() -> None:
    rng = np.random.default_rng(0)
    happened = np.repeat([0.0, 1.0], 100)
    assert calibration_error(np.full(200, 0.5), happened) == 0
    probability = rng.choice([0.2, 0.5, 1.0], 200)
    alone = [probability == value for value in (0.2, 0.5, 1.0)]
    gaps = [abs((probability - happened)[rows].sum()) for rows in alone]
    for shuffle in (np.arange(200), rng.permutation(200)):
        found = calibration_error(probability[shuffle], happened[shuffle])
        assert found == pytest.approx(sum(gaps) / 200)


@pytest.mark.filterwarnings("error")
def test_probabilities_of_no_boxes() -> None:
    none = np.zeros(0)
    assert math.isnan(calibration_error(none, none))
    found = probability_metrics(none, none.astype(bool), none, none.astype(int))
    assert all(map(math.isnan, found.values()))


def test_a_gain_over_a_baseline_by_hand() -> None:
    probability, bad = np.array([0.8, 0.1, 0.7, 0.2]), np.array([True, False, True, False])
    found = probability_metrics(probability, bad, np.full(4, 0.5), np.array([0, 0, 1, 1]))
    assert (found["AUROC"], found["baseline"], found["low"]) == (1.0, 0.5, 0.5)
    assert calibration_error(np.array([0.1, 0.1, 0.9, 0.9]), np.array([0, 0, 1, 1]), bins=2) == 0.1


def test_ence_edges() -> None:
    assert math.isnan(ence(np.zeros(0), np.zeros(0)))
    assert math.isnan(ence(np.array([NAN]), np.ones(1)))
    assert ence(np.zeros(2), np.zeros(2)) == 0
    assert ence(np.ones(2), np.zeros(2)) == np.inf
    assert ence(np.array([NAN, 1.0]), np.ones(2)) == 0


def test_no_rows() -> None:
    for errors in (np.zeros((0, 2)), np.full((3, 2), NAN)):
        found = covariance_metrics(errors, np.zeros((len(errors), 2, 2)))
        assert found["rows"] == 0
        assert all(math.isnan(found[name]) for name in ("NLL", "ENCE", "ANEES"))
        assert all(math.isnan(x) for x in found["coverage"].values())
    with pytest.raises(BoxcovError, match="covariance has shape"):
        covariance_metrics(np.zeros((2, 2)), np.zeros((2, 3, 3)))
