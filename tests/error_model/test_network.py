"""The network of the error model: members, outputs and the Student-t density."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import t as student
from torch.nn import functional as F

from boxcov.error_model.network import (
    MAX_DOF,
    MIN_DOF,
    Network,
    Outputs,
    fit_student,
    missing_noise,
    student_nll,
)


def random_network(width: int, members: int = 3, inputs: int = 5, outputs: int = 7) -> Network:
    generator = torch.Generator().manual_seed(1)
    network = Network.initial(members, inputs, outputs, width, generator)
    return network.with_parameters(
        [torch.randn(p.shape, generator=generator) for p in network.parameters()]
    )


@pytest.mark.parametrize("width", [0, 6])
def test_members_equal_single_networks(width: int) -> None:
    network = random_network(width)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(2))
    together = network(x)
    assert together.shape == (3, 4, 7)
    for k in range(3):
        linear, bias, *hidden = (p[k] for p in network.parameters())
        y = x @ linear + bias
        if hidden:
            w1, b1, w2, b2, w3 = hidden
            y = y + F.silu(F.silu(x @ w1 + b1) @ w2 + b2) @ w3
        torch.testing.assert_close(together[k], y, rtol=1e-4, atol=1e-4)


def test_members_may_have_inputs_of_their_own() -> None:
    network = random_network(6)
    x = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(2))
    own = network(x)
    for k in range(3):
        torch.testing.assert_close(own[k], network(x[k])[k], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [0, 6])
def test_a_new_network_is_nearly_constant(width: int) -> None:
    network = Network.initial(2, 5, 7, width, torch.Generator().manual_seed(0))
    y = network(torch.randn(50, 5, generator=torch.Generator().manual_seed(0)))
    assert float(y.abs().max()) < 0.6
    assert len(network.parameters()) == (7 if width else 2)


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


@pytest.mark.parametrize("has_heading", [False, True])
def test_the_outputs_share_no_column(has_heading: bool) -> None:
    outputs = Outputs(thresholds=3, fields=4, has_heading=has_heading)
    y = torch.zeros(outputs.size)
    read = []
    for column in range(outputs.size):
        other = y.clone()
        other[column] = 1.0
        changed = []
        for name in ("no_object", "iou_below", "log_scale", *(["flipped"] * has_heading)):
            method = getattr(outputs, name)
            if not torch.equal(method(y), method(other)):
                changed.append(name)
        read.append(changed)
    expected = [["no_object"], *[["iou_below"]] * 4]
    expected += [["flipped"]] * has_heading + [["log_scale"]] * 4
    assert read == expected


def test_iou_below_rises_and_the_shares_sum_to_one() -> None:
    outputs = Outputs(thresholds=9, fields=2, has_heading=False)
    y = 30 * torch.randn(5, 200, outputs.size, generator=torch.Generator().manual_seed(3))
    below = outputs.iou_below(y)
    assert below.shape == (5, 200, 9)
    assert bool((below.diff(dim=-1) >= 0).all())
    assert bool(((below >= 0) & (below <= 1)).all())
    shares = y[..., 1:11].double().softmax(-1)
    torch.testing.assert_close(below.double(), shares.cumsum(-1)[..., :9], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        (below[..., -1] + shares[..., -1].float()), torch.ones(5, 200), rtol=1e-5, atol=1e-5
    )


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
