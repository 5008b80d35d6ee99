"""Fit the network of the error model: K members, each without the frames of one fold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor

from boxcov.error_model.network import Network, Outputs, student_nll

FOLDS = 5
WIDTHS = (0, 96)
EPOCHS = 60
RATE = 3e-3
LINEAR_RATE = 3e-2  # of a linear model, which 500 smaller steps would not carry to its optimum
WEIGHT_DECAY = 1e-2
TRAINING_DOF = 4.0  # heavy tails, so that a few large errors do not decide the scales
_BATCHES = 8  # at least, per epoch
_MOST_PER_BATCH = 2048
_MOST_NORM = 2.0  # of a member's gradient
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Targets:
    """What is known about n boxes after they were paired with objects."""

    paired: Tensor  # (n,) whether there is an object
    iou_below: Tensor  # (n, T) whether the IoU is below each threshold
    flipped: Tensor  # (n,) whether the heading is off by more than a quarter turn
    errors: Tensor  # (n, D) in units of the error model, NaN where unknown

    def __getitem__(self, rows: Tensor) -> Targets:
        return Targets(
            self.paired[rows], self.iou_below[rows], self.flipped[rows], self.errors[rows]
        )


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


def fit_network(
    x: Tensor, targets: Targets, folds: Tensor, outputs: Outputs, options: TrainingOptions
) -> Ensemble:
    """Return the ensemble whose width and number of epochs have the lowest held-out loss.

    x: (n, P) standardised inputs; folds: (n,) the fold of each box's frame.
    """
    best: Ensemble | None = None
    for number, width in enumerate(options.widths):
        for fitted in _epochs(x, targets, folds, outputs, width):
            if best is None or fitted.loss < best.loss:
                best = fitted
            if options.progress is not None:
                options.progress(number * EPOCHS + fitted.epochs, len(options.widths) * EPOCHS)
    assert best is not None
    return best


def _epochs(
    x: Tensor, targets: Targets, folds: Tensor, outputs: Outputs, width: int
) -> Iterator[Ensemble]:
    """Yield the ensemble after each epoch."""
    members = int(folds.max()) + 1
    generator = torch.Generator().manual_seed(0)
    network = Network.initial(members, x.shape[1], outputs.size, width, generator)
    parameters = [p.requires_grad_() for p in network.parameters()]
    rows = [(folds != k).nonzero()[:, 0] for k in range(members)]
    held_out = [(folds == k).nonzero()[:, 0] for k in range(members)]
    shortest = min(len(r) for r in rows)
    batches = max(_BATCHES, ceil(shortest / _MOST_PER_BATCH))
    optimizer, schedule = _optimizer(network, EPOCHS * batches)
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
        copies = network.with_parameters([p.detach().clone() for p in network.parameters()])
        yield Ensemble(copies, held_out_loss, epoch, width)


def _optimizer(network: Network, steps: int) -> tuple[Any, Any]:
    """AdamW with a one-cycle rate; only the weights decay."""
    rate = RATE if network.hidden else LINEAR_RATE
    parameters = network.parameters()
    groups: list[dict[str, Any]] = [
        {"params": parameters[0::2], "weight_decay": WEIGHT_DECAY},
        {"params": parameters[1::2]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rate, total_steps=steps, pct_start=0.2
    )
    return optimizer, schedule


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
            member = network.with_parameters([p[k : k + 1] for p in network.parameters()])
            own = targets[rows.unsqueeze(0)]
            total += float(_losses(member(x[rows]), own, outputs))
    return total / len(held_out)


def _log_loss(probability: Tensor, happened: Tensor) -> Tensor:
    p = probability.clamp(1e-6, 1 - 1e-6)
    loss: Tensor = -(happened * p.log() + (1 - happened) * (1 - p).log())
    return loss


def frame_folds(frame: Tensor, folds: int = FOLDS) -> Tensor:
    """Return the fold (n,) of each box: consecutive blocks of frames.

    Consecutive frames look alike, so they share a fold.

    >>> frame_folds(torch.tensor([7, 7, 8, 9, 12]), folds=2)
    tensor([0, 0, 0, 1, 1])
    """
    numbers = torch.unique(frame, return_inverse=True)[1]
    count = int(numbers.max()) + 1
    fold: Tensor = numbers * min(folds, count) // count
    return fold
