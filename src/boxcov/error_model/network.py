"""The network of the error model: an ensemble of small MLPs, evaluated at once."""

from __future__ import annotations

from dataclasses import dataclass
from math import log, pi

import torch
from torch import Tensor
from torch.nn import functional as F

MIN_DOF, MAX_DOF = 2.5, 50.0  # the variance of an error is at most five times its squared scale
MIN_LOG_SCALE, MAX_LOG_SCALE = log(0.01), log(400)  # of the unit of a field


@dataclass(frozen=True)
class Outputs:
    """Which columns of the network's output mean what.

    >>> Outputs(thresholds=9, fields=7, has_heading=True).size
    19
    """

    thresholds: int  # T of the IoU
    fields: int  # D of a box
    has_heading: bool

    @property
    def size(self) -> int:
        return 1 + self.thresholds + 1 + self.has_heading + self.fields

    def no_object(self, y: Tensor) -> Tensor:
        """Return P(there is no object), of the shape of ``y`` without its last dimension."""
        return y[..., 0].sigmoid()

    def iou_below(self, y: Tensor) -> Tensor:
        """Return P(IoU below each threshold | there is an object) (..., T), rising.

        The network gives the logits of the T + 1 intervals between the thresholds.
        """
        shares = y[..., 1 : 2 + self.thresholds].softmax(-1)
        return shares.cumsum(-1)[..., :-1].clamp(0, 1)

    def flipped(self, y: Tensor) -> Tensor:
        """Return P(the heading is off by half a turn)."""
        return y[..., 2 + self.thresholds].sigmoid()

    def log_scale(self, y: Tensor) -> Tensor:
        """Return the log scales (..., D) of the errors, in the units of the error model.

        They have bounds: objects at rest have velocity errors of next to nothing, and a tracker
        needs an invertible covariance; beyond the calibration boxes a scale must not explode.
        """
        return y[..., -self.fields :].clamp(MIN_LOG_SCALE, MAX_LOG_SCALE)


@dataclass(frozen=True)
class Network:
    """K members with the same shape: a linear map plus an MLP with two hidden layers.

    With a hidden width of 0 a member is the linear map alone.
    """

    linear: Tensor  # (K, P, O)
    bias: Tensor  # (K, 1, O)
    hidden: tuple[Tensor, ...] = ()  # weights and biases of both hidden layers, and of the output

    @staticmethod
    def initial(
        members: int, inputs: int, outputs: int, width: int, generator: torch.Generator
    ) -> Network:
        def normal(*shape: int) -> Tensor:
            values: Tensor = torch.randn(*shape, generator=generator) / float(shape[1]) ** 0.5
            return values

        linear, bias = torch.zeros(members, inputs, outputs), torch.zeros(members, 1, outputs)
        if not width:
            return Network(linear, bias)
        first, second = torch.zeros(members, 1, width), torch.zeros(members, 1, width)
        return Network(
            *(linear, bias),
            (
                *(normal(members, inputs, width), first),
                *(normal(members, width, width), second),
                0.1 * normal(members, width, outputs),
            ),
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Return the outputs (K, m, O) of inputs (m, P), or of (K, m, P), one set per member."""
        x = x.expand(len(self.linear), -1, -1)
        y = torch.baddbmm(self.bias, x, self.linear)
        if not self.hidden:
            return y
        w1, b1, w2, b2, w3 = self.hidden
        x = F.silu(torch.baddbmm(b1, x, w1))
        x = F.silu(torch.baddbmm(b2, x, w2))
        return torch.baddbmm(y, x, w3)

    def parameters(self) -> list[Tensor]:
        return [self.linear, self.bias, *self.hidden]

    def with_parameters(self, parameters: list[Tensor]) -> Network:
        return Network(parameters[0], parameters[1], tuple(parameters[2:]))


def student_nll(errors: Tensor, log_scale: Tensor, dof: Tensor) -> Tensor:
    """Return the negative log density of errors under Student-t distributions, elementwise.

    >>> from scipy.stats import t
    >>> nll = student_nll(torch.tensor(0.3), torch.tensor(2.0).log(), torch.tensor(4.0))
    >>> round(float(nll + t.logpdf(0.3, 4, scale=2)), 5)
    0.0
    """
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


def missing_noise(errors: Tensor, deviations: Tensor) -> Tensor:
    """Return the noise (D,) that makes squared errors as large as their variances say, on average.

    The mean of ``error^2 / (deviation^2 + noise^2)`` is then 1; the noise is 0 where it is below 1
    already. Errors (n, D) may be NaN. Objects at rest, for example, have tiny velocity errors,
    until one of them moves.

    >>> errors = torch.tensor([[0.0], [0.0], [0.0], [2.0]])
    >>> missing_noise(errors, torch.full((4, 1), 1e-3))
    tensor([1.0000])
    """
    if not len(errors):
        return errors.new_zeros(errors.shape[1])
    squares, variances = errors.double().square(), deviations.double().square()
    low, high = torch.zeros(errors.shape[1]).double(), squares.nan_to_num().amax(0)
    for _ in range(100):
        middle = (low + high) / 2
        is_above = (squares / (variances + middle)).nanmean(0) > 1
        low, high = torch.where(is_above, middle, low), torch.where(is_above, high, middle)
    needed = (squares / variances).nanmean(0) > 1
    return torch.where(needed, high.sqrt(), 0).float()
