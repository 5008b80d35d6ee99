"""The network of the error model, an ensemble of small MLPs, and its training.

All K members are evaluated at once; each is fitted without the frames of one fold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from math import ceil, log
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from boxcov.error_model.student_t import student_nll

MIN_LOG_SCALE, MAX_LOG_SCALE = log(0.01), log(400)  # of the unit of a field
FOLDS = 5
WIDTHS = (0, 128)
EPOCHS = 40
RATE = 3e-3
LINEAR_RATE = 3e-2  # of a linear model, which 500 smaller steps would not carry to its optimum
LINEAR_DECAY, WEIGHT_DECAY = 1e-2, 0.5  # of the linear map and of the weights of the MLP
STRONG_DECAY = 2.0  # of a linear model for few boxes, tried as well
TRAINING_DOF = 4.0  # heavy tails, so that a few large errors do not decide the scales
_BATCHES = 8  # at least, per epoch
_MOST_PER_BATCH = 2048
_MOST_NORM = 2.0  # of a member's gradient
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Outputs:
    """Which columns of the network's output mean what."""

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

        Bounded: objects at rest have next to no velocity errors, but a tracker needs an invertible
        covariance; beyond the calibration boxes a scale must not explode.
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
        def zeros(rows: int, columns: int) -> Tensor:
            return torch.zeros(members, rows, columns, dtype=torch.float32)

        def normal(rows: int, columns: int) -> Tensor:
            return zeros(rows, columns).normal_(generator=generator) / rows**0.5

        linear, bias = zeros(inputs, outputs), zeros(1, outputs)
        if not width:
            return Network(linear, bias)
        first, second = normal(inputs, width), normal(width, width)
        last = 0.1 * normal(width, outputs)
        return Network(linear, bias, (first, zeros(1, width), second, zeros(1, width), last))

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

    def member(self, k: int) -> Network:
        return self.with_parameters([p[k : k + 1] for p in self.parameters()])


# training


@dataclass(frozen=True)
class Targets:
    """What is known about n boxes after they were paired with objects."""

    paired: Tensor  # (n,) whether there is an object
    iou_below: Tensor  # (n, T) whether the IoU is below each threshold
    flipped: Tensor  # (n,) whether the heading is off by more than a quarter turn
    errors: Tensor  # (n, D) in units of the error model, NaN where unknown

    def __getitem__(self, rows: Tensor | slice) -> Targets:
        return Targets(*(getattr(self, f.name)[rows] for f in fields(self)))

    def __add__(self, other: Targets) -> Targets:
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return Targets(*map(torch.cat, pairs))


@dataclass(frozen=True)
class TrainingOptions:
    """How an error model is fitted."""

    widths: tuple[int, ...] = WIDTHS  # hidden widths to choose from; 0 is a linear model
    exclude: tuple[str, ...] = ()  # prefixes of inputs to leave out, for ablations ("variance")
    progress: Progress | None = None  # called with the number of epochs done and their total


@dataclass(frozen=True)
class Ensemble:
    """An ensemble and its held-out loss."""

    network: Network
    loss: float  # mean over the members, on the frames they were not fitted on
    epochs: int
    width: int
    copies: int  # boxes of copies that it learned from


def fit_network(
    x: Tensor,
    targets: Targets,
    folds: Tensor,
    outputs: Outputs,
    options: TrainingOptions,
    own: int | None = None,
) -> Ensemble:
    """Return the ensemble whose width, decay and number of epochs have the lowest held-out loss.

    x: (n, P) standardised inputs; folds: (n,) the fold of each box's frame. own: boxes beyond these
    are of copies of the frames. Networks that learn from them, too, are tried beside those that do
    not; losses are of the others.
    """
    best: Ensemble | None = None
    own = len(x) if own is None else own
    decays = [(width, LINEAR_DECAY) for width in options.widths]
    if 0 in options.widths:
        decays.append((0, STRONG_DECAY))
    tried = [(*pair, n) for n in sorted({len(x), own}) for pair in decays]
    for number, (width, decay, n) in enumerate(tried):
        for fitted in _epochs(x[:n], targets[:n], folds[:n], outputs, width, decay, own):
            if best is None or fitted.loss < best.loss:
                best = fitted
            if options.progress is not None:
                options.progress(number * EPOCHS + fitted.epochs, len(tried) * EPOCHS)
    assert best is not None
    return best


def _epochs(
    x: Tensor,
    targets: Targets,
    folds: Tensor,
    outputs: Outputs,
    width: int,
    decay: float,
    own: int,
) -> Iterator[Ensemble]:
    """Yield the ensemble after each epoch; decay: of the linear map; own: as in fit_network."""
    members = int(folds.max()) + 1
    generator = torch.Generator().manual_seed(0)
    network = Network.initial(members, x.shape[1], outputs.size, width, generator)
    parameters = [p.requires_grad_() for p in network.parameters()]
    rows = [(folds != k).nonzero()[:, 0] for k in range(members)]
    held_out = [(folds[:own] == k).nonzero()[:, 0] for k in range(members)]
    shortest = min(len(r) for r in rows)
    batches = max(_BATCHES, ceil(shortest / _MOST_PER_BATCH))
    optimizer, schedule = _optimizer(network, EPOCHS * batches, decay)
    for epoch in range(1, EPOCHS + 1):
        shuffled = [r[torch.randperm(len(r), generator=generator)[:shortest]] for r in rows]
        for batch in torch.stack(shuffled).split(ceil(shortest / batches), 1):
            loss = _losses(network(x[batch]), targets[batch], outputs).sum()
            optimizer.zero_grad()
            loss.backward()
            _clip_gradients(parameters)
            optimizer.step()
            schedule.step()
        held_out_loss = _held_out_loss(network, x, targets, held_out, outputs)
        frozen = network.with_parameters([p.detach().clone() for p in network.parameters()])
        yield Ensemble(frozen, held_out_loss, epoch, width, len(x) - own)


def _optimizer(network: Network, steps: int, decay: float) -> tuple[Any, Any]:
    """AdamW with a one-cycle rate; only the weights decay."""
    rate = RATE if network.hidden else LINEAR_RATE
    groups: list[dict[str, Any]] = [
        {"params": [network.linear], "weight_decay": decay},
        {"params": list(network.hidden[0::2]), "weight_decay": WEIGHT_DECAY},
        {"params": [network.bias, *network.hidden[1::2]]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=rate, weight_decay=0.0)
    one_cycle = torch.optim.lr_scheduler.OneCycleLR
    return optimizer, one_cycle(optimizer, rate, total_steps=steps, pct_start=0.2)


def _clip_gradients(parameters: list[Tensor]) -> None:
    """Limit the norm of each member's gradient by itself: no member may learn from another."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    squares = torch.stack([g.square().flatten(1).sum(1) for g in gradients])  # (parameters, K)
    shrink = (_MOST_NORM / squares.sum(0).sqrt()).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(shrink[:, None, None])


def _losses(y: Tensor, targets: Targets, outputs: Outputs) -> Tensor:
    """Return the loss (K,) of each member; y (K, n, O), targets (K, n, ...).

    The sum of four means: the log losses of no_object, of the IoU thresholds and of flipped, and
    the Student-t NLL of the fields. All but the first are over boxes with an object.
    """
    paired = targets.paired.float()
    count = paired.sum(1).clamp(min=1)
    no_object = _log_loss(outputs.no_object(y), 1 - paired).mean(1)
    per_box = _log_loss(outputs.iou_below(y), targets.iou_below).mean(2)
    if outputs.has_heading:
        per_box = per_box + _log_loss(outputs.flipped(y), targets.flipped)
    known = ~targets.errors.isnan()
    dof = y.new_tensor(TRAINING_DOF)
    nll = student_nll(targets.errors.nan_to_num(), outputs.log_scale(y), dof)
    per_box = per_box + (nll * known).sum(2) / outputs.fields
    return no_object + (per_box * paired).sum(1) / count


def _held_out_loss(
    network: Network, x: Tensor, targets: Targets, held_out: list[Tensor], outputs: Outputs
) -> float:
    """Return the mean over the members of their loss on their own fold."""
    total = 0.0
    with torch.no_grad():
        for k, rows in enumerate(held_out):
            own = targets[rows.unsqueeze(0)]
            total += float(_losses(network.member(k)(x[rows]), own, outputs))
    return total / len(held_out)


def _log_loss(probability: Tensor, happened: Tensor) -> Tensor:
    p = probability.clamp(1e-6, 1 - 1e-6)
    return -(happened * p.log() + (1 - happened) * (1 - p).log())


def frame_folds(frame: Tensor, folds: int = FOLDS) -> Tensor:
    """Return the fold (n,) of each box: blocks of consecutive frames, which look alike."""
    numbers = torch.unique(frame, return_inverse=True)[1]
    count = int(numbers.max()) + 1
    return numbers * min(folds, count) // count
