"""The Student-t distribution of the errors: its density, its fit, and the noise it misses."""

from __future__ import annotations

from math import log, pi

import torch
from torch import Tensor

MIN_DOF, MAX_DOF = 2.5, 50.0  # the variance of an error is at most five times its squared scale
_POOLED = 5.0  # boxes of a class that the mean over all boxes counts as


def student_nll(errors: Tensor, log_scale: Tensor, dof: Tensor) -> Tensor:
    """Return the negative log density of errors under Student-t distributions, elementwise."""
    square = (errors * (-log_scale).exp()).square()
    constant = torch.lgamma(dof / 2) - torch.lgamma((dof + 1) / 2) + 0.5 * (dof * pi).log()
    return log_scale + 0.5 * (dof + 1) * torch.log1p(square / dof) + constant


def fit_student(ratios: Tensor) -> tuple[Tensor, Tensor]:
    """Return the most likely degrees of freedom and scale (D,) of Student-t values (n, D).

    Values may be NaN. The degrees of freedom are at least ``MIN_DOF``: nearer to 2 the tails alone
    decide the variance. The scale lies between 1/5 and 5: many zeros have no most likely one.
    """
    known = ~ratios.isnan()
    values, weights = ratios.nan_to_num().double(), known / known.sum(0).clamp(min=1)
    free = torch.zeros(2, ratios.shape[1], dtype=torch.float64, requires_grad=True)

    def dof_and_log_scale() -> tuple[Tensor, Tensor]:
        share = free[0].sigmoid()
        return (share * log(MAX_DOF) + (1 - share) * log(MIN_DOF)).exp(), log(5) * free[1].tanh()

    def closure() -> Tensor:
        optimizer.zero_grad()
        dof, log_scale = dof_and_log_scale()
        loss = (student_nll(values, log_scale, dof) * weights).sum()
        loss.backward()
        return loss

    optimizer = torch.optim.LBFGS(
        *([free], 1.0, 100), tolerance_change=1e-12, line_search_fn="strong_wolfe"
    )
    optimizer.step(closure)
    dof, log_scale = dof_and_log_scale()
    return dof.detach().float(), log_scale.exp().detach().float()


def missing_noise(errors: Tensor, deviations: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return the noise (C, D) that makes squared errors as large as their variances say.

    The mean of ``error^2 / (deviation^2 + noise^2)`` over the boxes of a class is then 1; the noise
    is 0 where it is below 1 already. Errors (n, D) may be NaN. Objects at rest, for example, have
    tiny velocity errors, until one of them moves. The mean over all boxes counts as ``_POOLED``
    boxes of the class: a rare class has too few to meet its own large errors.
    """
    if not len(errors):
        return errors.new_zeros(classes, errors.shape[1])
    known = ~errors.isnan()
    squares, variances = errors.nan_to_num().double().square(), deviations.double().square()

    def noise_of(label: int) -> Tensor:
        weights = ((labels == label) + _POOLED / len(labels))[:, None] * known
        weights = weights.double() / weights.sum(0).clamp(min=1e-9)

        def ratio(noise: Tensor) -> Tensor:
            return (weights * squares / (variances + noise)).nansum(0)

        low, high = torch.zeros(errors.shape[1]).double(), squares.amax(0)
        for _ in range(60):
            middle = (low + high) / 2
            is_above = ratio(middle) > 1
            low, high = torch.where(is_above, middle, low), torch.where(is_above, high, middle)
        return torch.where(ratio(torch.zeros_like(low)) > 1, high.sqrt(), 0)

    return torch.stack([noise_of(label) for label in range(classes)]).float()
