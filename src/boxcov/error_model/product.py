"""Which fields' errors the epistemic variances tell of, and how stiff the fit of each field must be: by frames that the fit has not seen.

Calibrations of the kinds "score" and "product" have no ``a Sigma``, so their fields are independent and each is fitted by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcov.error_model.variances import VarianceModel

Array = NDArray[Any]
STRENGTHS = (
    100.0,
    30.0,
    10.0,
    3.0,
    1.0,
    0.3,
    0.1,
)  # of the L2 penalty; 1 weighs as much as two boxes of a class do for one of its variances
SURE = 1.0  # standard errors over frames by which the variances must gain, in the mean and in frames gained less frames lost
HEAVY = 0.5  # share of a field's squared errors, by their variances, that a hundredth of its boxes may make up at most
_FOLDS = 5


@dataclass(frozen=True)
class Choice:
    """Of one field: the strength of its penalty, whether it is told of the variances, and what they gain over doing without, with the standard
    error over frames (nats a box)."""

    strength: float
    told: bool
    gain: float
    error: float


def chosen(model: VarianceModel, frames: Array, strength: float | None = None) -> list[Choice]:
    """One choice a field; frames (n,) are numbered from 0. Without a second frame there is nothing to choose by: no field is told.

    Fields that are not told share one strength, the best for all together: a field of heavy tails alone chooses by its few worst boxes. And such
    a field, as the velocities of objects of which most stand still, is never told: what gains for the boxes seen may lose anything by the next one.

    >>> from boxcov.evaluate.records import Records
    >>> rng = np.random.default_rng(0)
    >>> variance = rng.gamma(1.0, size=(600, 2))
    >>> boxes = rng.normal(size=(600, 2)) * np.sqrt(np.stack([variance[:, 0], np.ones(600)], 1))  # y does not err as its variance says
    >>> drawn = Records(
    ...     fields=("x", "y"), classes=("car",), boxes=boxes, uncertainty=np.ones(600), scores=np.full(600, 0.5), labels=np.zeros(600, int),
    ...     frame=np.arange(600) // 10, truth=np.zeros((600, 2)), iou=np.ones(600), l2=np.zeros(600),
    ...     covariance=variance[:, :, None] * np.eye(2),
    ... )
    >>> [one.told for one in chosen(VarianceModel.of(drawn, "product", "gaussian"), drawn.frame)]
    [True, False]
    """
    strengths = STRENGTHS if strength is None else (strength,)
    without = [held_out(model.field(f, False), frames, strengths) for f in range(len(model.fields))]
    common = min(strengths, key=lambda s: sum(float(unseen[s].loss.sum()) for unseen in without))
    kept_out = Choice(common, False, 0.0, 0.0)
    if model.kind == "score":
        return [kept_out for _ in without]
    return [
        kept_out
        if heavy(unseen[common].squares)
        else _choice(model.field(f, True), unseen[common].loss, frames, strengths, common)
        for f, unseen in enumerate(without)
    ]


def heavy(squares: Array) -> bool:
    """Whether few of the squared errors (n,) make up most of their sum: the worst hundredth, one at least.

    >>> rng = np.random.default_rng(0)
    >>> heavy(rng.normal(size=2000) ** 2), heavy(rng.standard_cauchy(size=2000) ** 2)
    (False, True)
    """
    worst = np.sort(squares)[::-1][: -(-len(squares) // 100)]
    return bool(len(squares) >= 100 and worst.sum() > HEAVY * squares.sum())


def fitted(model: VarianceModel, choices: list[Choice]) -> tuple[VarianceModel, Array, Array]:
    """The model with what was chosen, its optimum theta, and the strengths (D,)."""
    told = replace(model, told=tuple(one.told for one in choices))
    parts = [model.field(f, one.told).fitted(one.strength) for f, one in enumerate(choices)]
    return told, np.concatenate(parts), np.array([one.strength for one in choices])


def _choice(
    model: VarianceModel, without: Array, frames: Array, strengths: tuple[float, ...], common: float
) -> Choice:
    unseen = held_out(model, frames, strengths)
    strength = min(strengths, key=lambda s: float(unseen[s].loss.sum()))
    gain = np.bincount(frames, without - unseen[strength].loss)  # of each frame
    error = float(gain.std(ddof=1) * np.sqrt(len(gain))) if len(gain) > 1 else float("inf")
    wins = int((gain > 0).sum()) - int(
        (gain < 0).sum()
    )  # few frames of heavy tails may make a mean gain by chance
    told = bool(gain.sum() > SURE * error and wins > SURE * np.sqrt(len(gain)))
    boxes = max(int(model.errors.known.sum()), 1)
    return Choice(strength if told else common, told, float(gain.sum()) / boxes, error / boxes)


@dataclass(frozen=True)
class Unseen:
    """Of each box, under a fit that has not seen its frame; 0 where the field is unknown, or where there is but one frame."""

    loss: Array  # (n,)
    squares: Array  # (n,) of its error, in its variances


def held_out(
    model: VarianceModel, frames: Array, strengths: tuple[float, ...]
) -> dict[float, Unseen]:
    """By strength, what the boxes (n,) of a model of one field lose."""
    count = int(frames.max()) + 1
    folds = min(_FOLDS, count)
    losses = {
        strength: Unseen(np.zeros(len(frames)), np.zeros(len(frames))) for strength in strengths
    }
    fold_of = np.random.default_rng(0).permutation(count)[frames] % folds
    for fold in range(folds if folds > 1 else 0):
        seen, unseen, theta = model[fold_of != fold], model[fold_of == fold], None
        for strength in strengths:  # from the stiffest: each optimum is a good start for the next
            theta = seen.fitted(strength, theta)
            local = unseen.beside(seen).local(theta, "gaussian")
            losses[strength].loss[fold_of == fold] = local.loss
            # the loss is (log r + e^2 / r) / 2, but for a floor far below r
            losses[strength].squares[fold_of == fold] = np.where(
                unseen.errors.known[:, 0], np.maximum(1 - 2 * local.slope[:, 1], 0), 0
            )
    return losses
