from __future__ import annotations

import math
import sys

import numpy as np
import pytest
from scipy import optimize, stats

from boxcov.errors import BoxcovError
from boxcov.evaluate.quality import curves, quantiles

NAN = float("nan")


@pytest.mark.parametrize("shape", [0.05, 0.3, 1.0, 2.7, 40.0, 1e4])
@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_fit_and_quantiles_agree_with_scipy(shape: float, scale: float) -> None:
    u = np.random.default_rng(0).gamma(shape, scale, 500)
    u = u[u > 0]
    a, _, theta = stats.gamma.fit(u, floc=0)
    np.testing.assert_allclose(quantiles(u), stats.gamma.cdf(u, a, scale=theta), atol=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_the_fit_is_the_most_likely(seed: int) -> None:
    u = np.exp(np.random.default_rng(seed).normal(scale=2, size=200))
    found = optimize.minimize(
        lambda log: -stats.gamma.logpdf(u, np.exp(log[0]), scale=np.exp(log[1])).sum(),
        np.zeros(2),
        method="Nelder-Mead",
        options={"xatol": 1e-8, "fatol": 1e-8},
    )
    shape, scale = np.exp(found.x)
    np.testing.assert_allclose(quantiles(u), stats.gamma.cdf(u, shape, scale=scale), atol=1e-6)


def test_nearly_equal_uncertainties() -> None:
    for spread in (1e-3, 1e-5, 1e-7):
        u = 5 * (1 + spread * np.random.default_rng(0).normal(size=400))
        q = quantiles(u)
        np.testing.assert_allclose(q, stats.norm.cdf((u - u.mean()) / u.std()), atol=2e-3)


def test_huge_range() -> None:
    u = np.geomspace(1e-12, 1e12, 401)
    q = quantiles(np.random.default_rng(0).permutation(u))
    assert np.isfinite(q).all()
    assert (np.diff(quantiles(u)) > 0).all()
    assert ((q > 0) & (q < 1)).all()
    np.testing.assert_allclose(quantiles(1e290 * u), quantiles(u), atol=1e-9)


def test_zeros_constants_empty_and_infinity() -> None:
    with_zeros = quantiles(np.array([0.0, 1.0, 2.0, 0.0, 4.0]))
    assert with_zeros[[0, 3]].tolist() == [0, 0]
    np.testing.assert_array_equal(with_zeros[[1, 2, 4]], quantiles(np.array([1.0, 2.0, 4.0])))
    assert quantiles(np.full(3, 0.1)).tolist() == [0.5] * 3
    assert quantiles(np.zeros(2)).tolist() == [0.5] * 2
    assert quantiles(np.array([7.0])).tolist() == [0.5]
    assert quantiles(np.array([0.0, 7.0])).tolist() == [0.0, 0.5]
    assert quantiles(np.array([1.0, 2.0, np.inf]))[2] == 1
    assert quantiles(np.zeros(0)).shape == (0,)
    for wrong in ([1.0, -1.0], [1.0, NAN]):
        with pytest.raises(BoxcovError, match="0 or more"):
            quantiles(np.array(wrong))


@pytest.mark.parametrize("seed", range(4))
def test_curves_equal_counting(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = 60
    iou, l2, u = (
        rng.random(n).round(1),
        np.where(rng.random(n) < 0.3, NAN, rng.random(n)),
        rng.gamma(1, 1, n).round(1),
    )
    found = curves(iou, l2, u, points=11)
    positive = u[u > 0]
    a, _, theta = stats.gamma.fit(positive, floc=0)
    q = stats.gamma.cdf(u, a, scale=theta)
    for j, t in enumerate(found.thresholds):
        for error in ("IoU", "l2"):
            rows = [i for i in range(n) if error == "IoU" or not math.isnan(l2[i])]
            good = {
                i: bool(iou[i] >= 0.4 if error == "IoU" else l2[i] < np.nanmean(l2)) for i in rows
            }
            certain = {i: bool(q[i] < t) for i in rows}
            AC = sum(good[i] and certain[i] for i in rows)
            IU = sum(not good[i] and not certain[i] for i in rows)
            C, I = sum(certain.values()), len(rows) - sum(good.values())
            expected = {
                "AvU": (AC + IU) / len(rows),
                "P(A|C)": AC / C if C else NAN,
                "P(U|I)": IU / I if I else NAN,
            }
            for metric, value in expected.items():
                assert found.values[metric][error][j] == pytest.approx(value, nan_ok=True)


def test_ends_of_the_curves() -> None:
    found = curves(np.array([0.9, 0.1, 0.5]), np.array([0.1, 0.9, NAN]), np.array([1.0, 3.0, 2.0]))
    assert found.values["P(U|I)"]["IoU"][[0, -1]].tolist() == [1, 0]
    assert math.isnan(found.values["P(A|C)"]["l2"][0])
    assert (
        found.values["P(A|C)"]["IoU"][-1] == found.values["P(A)"]["IoU"][-1] == pytest.approx(2 / 3)
    )
    none = curves(np.zeros(0), np.zeros(0), np.zeros(0))
    assert np.isnan(none.values["AvU"]["IoU"]).all()


def test_missing_scipy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    with pytest.raises(BoxcovError, match="scipy is not installed: pip install scipy"):
        quantiles(np.array([1.0, 2.0]))
