from __future__ import annotations

import numpy as np
import pytest
from scipy import special, stats

from boxcov.evaluate.special import (
    chi_square,
    chi_square_quantile,
    digamma,
    incomplete_gamma,
    log_minus_digamma,
    trigamma,
)

SHAPES = [1e-6, 1e-3, 0.04, 0.5, 1, 1.5, 2, 4.5, 9.99, 10, 37.3, 99.9, 100, 101, 1e3, 12345.6, 1e6]


def test_digamma_and_trigamma_as_scipy() -> None:
    x = np.concatenate([np.geomspace(1e-8, 1e12, 2001), np.arange(1, 30)])
    np.testing.assert_allclose(digamma(x), special.digamma(x), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(trigamma(x), special.polygamma(1, x), rtol=1e-12)


def test_log_minus_digamma_keeps_its_digits() -> None:
    x = np.geomspace(1e-6, 1e15, 500)
    expected = np.where(
        x < 50, np.log(x) - special.digamma(x), 1 / (2 * x) + 1 / (12 * x**2) - 1 / (120 * x**4)
    )
    np.testing.assert_allclose(log_minus_digamma(x), expected, rtol=1e-10)


@pytest.mark.parametrize("a", SHAPES)
def test_incomplete_gamma_as_scipy(a: float) -> None:
    spread = a + np.linspace(-15, 15, 301) * a**0.5
    x = np.concatenate(
        [spread[spread > 0], np.geomspace(1e-300, 1e300, 121), [0, a, a + 1, np.inf]]
    )
    np.testing.assert_allclose(incomplete_gamma(a, x), special.gammainc(a, x), atol=1e-10, rtol=0)
    assert incomplete_gamma(a, 0.0).shape == ()


@pytest.mark.parametrize(
    "a", [1e8, 1e10, 1e12]
)  # scipy is wrong here in the tails, in the sixth digit; Edgeworth's series to 1 / a is not
def test_incomplete_gamma_of_a_very_large_shape(a: float) -> None:
    z = np.linspace(-8, 8, 161)
    skew, excess = 2 / a**0.5, 6 / a
    terms = (
        skew / 6 * (z**2 - 1)
        + excess / 24 * (z**3 - 3 * z)
        + skew**2 / 72 * (z**5 - 10 * z**3 + 15 * z)
    )
    x = np.round(a + z * a**0.5)
    z = (x - a) / a**0.5
    np.testing.assert_allclose(
        incomplete_gamma(a, x), stats.norm.cdf(z) - stats.norm.pdf(z) * terms, atol=1e-8
    )


@pytest.mark.parametrize("d", [1, 2, 3, 9, 50, 199, 201, 5000, 450_000])
def test_chi_square_as_scipy(d: int) -> None:
    for p in (1e-6, 0.025, 0.5, 0.9, 0.975, 1 - 1e-9):
        assert chi_square_quantile(p, d) == pytest.approx(stats.chi2.ppf(p, d), rel=1e-8)
        assert float(chi_square(stats.chi2.ppf(p, d), d)) == pytest.approx(p, abs=1e-10)
    assert chi_square_quantile(0, d) == 0
    assert chi_square_quantile(1, d) == np.inf
