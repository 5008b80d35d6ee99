"""The Student-t distribution of the errors, and the noise that it misses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import t as student

from boxcov.error_model.student_t import (
    MAX_DOF,
    MIN_DOF,
    fit_student,
    missing_noise,
    student_nll,
)


@pytest.mark.parametrize("dof", [2.1, 4.0, 50.0])
def test_student_nll_is_that_of_scipy(dof: float) -> None:
    errors = torch.linspace(-30, 30, 41, dtype=torch.float64)
    for scale in (0.01, 1.0, 7.0):
        nll = student_nll(
            errors,
            torch.full_like(errors, scale).log(),
            torch.tensor(dof, dtype=torch.float64),
        )
        expected = -student.logpdf(errors.numpy(), dof, scale=scale)
        np.testing.assert_allclose(nll.numpy(), expected, rtol=1e-10)


def test_dof_and_scale_of_known_distributions_are_recovered() -> None:
    rng = np.random.default_rng(0)
    dof, scale = np.array([2.6, 3.0, 4.0, 8.0, 20.0]), np.array([1.0, 0.5, 2.0, 1.3, 0.8])
    values = scale * rng.standard_t(dof, (20000, 5))
    found = fit_student(torch.from_numpy(values))
    for d in range(5):
        best_dof, _, best_scale = student.fit(values[:, d], floc=0)
        assert float(found[0][d]) == pytest.approx(best_dof, rel=2e-3)
        assert float(found[1][d]) == pytest.approx(best_scale, rel=1e-3)
        assert best_dof == pytest.approx(dof[d], rel=0.02 * dof[d])


def test_dof_and_scale_have_bounds_and_leave_out_unknown_values() -> None:
    rng = np.random.default_rng(1)
    values = torch.from_numpy(rng.standard_t(3.0, (5000, 4)))
    expected = fit_student(values)
    more = torch.cat([values, torch.full((300, 4), torch.nan)])
    torch.testing.assert_close(fit_student(more), expected, rtol=1e-3, atol=0.0)
    more[:, 1] = torch.nan  # no value at all
    more[: len(values) // 10 * 9, 2] = 0.0  # no most likely scale
    more[:, 3] = torch.randn(len(more), generator=torch.Generator().manual_seed(0))
    dof, scale = fit_student(more)
    assert bool((dof >= MIN_DOF - 1e-6).all() & (dof <= MAX_DOF + 1e-3).all())
    assert float(scale[1]) == 1.0
    assert 0.2 <= float(scale[2]) < 0.21
    assert float(dof[3]) > 20  # normal
    torch.testing.assert_close(dof[0], expected[0][0], rtol=1e-3, atol=0.0)


def test_noise_makes_squared_errors_as_large_as_variances() -> None:
    generator = torch.Generator().manual_seed(0)
    deviations = 0.1 + torch.rand(4000, 3, generator=generator)
    errors = deviations * torch.randn(4000, 3, generator=generator)
    errors[:, 1] *= 0.5  # too certain already
    errors[::50, 2] += 20.0  # a few objects that move
    errors[::7, 0] = torch.nan
    labels = torch.zeros(4000).long()
    (noise,) = missing_noise(errors, deviations, labels, 1)
    nees = (errors.square() / (deviations.square() + noise.square())).nanmean(0)
    assert float(noise[1]) == 0
    assert float(nees[2]) == pytest.approx(1, abs=1e-4)
    assert float(nees[0]) <= 1 + 1e-4
    assert float(noise[2]) > 2
    assert missing_noise(errors[:0], deviations[:0], labels[:0], 2).tolist() == [[0] * 3] * 2


def test_noise_is_that_of_the_class_and_a_rare_one_borrows() -> None:
    """Class 0 stands still, class 1 moves at times, class 2 has one box, class 3 none."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.tensor([0] * 2000 + [1] * 2000 + [2])
    errors = 1e-4 * torch.randn(4001, 1, generator=generator)
    errors[2000:4000:20] = 1.0  # mean square of the class 0.05, of all boxes 0.025
    noise = missing_noise(errors, torch.full((4001, 1), 1e-4), labels, 4)[:, 0].square()
    own = (2000 * 0.05 + 5 * 0.025) / 2005
    assert noise.tolist() == pytest.approx([5 * 0.025 / 2005, own, 0.0208, 0.025], rel=0.02)
