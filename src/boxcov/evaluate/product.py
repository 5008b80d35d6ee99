"""Which fields' errors the epistemic variances tell of, and how stiff the fit of each field must be: by frames that the fit has not seen.

Calibrations of the kinds "score" and "product" have no ``a Sigma``, so their fields are independent and each is fitted by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcov.evaluate.variances import VarianceModel

Array = NDArray[Any]
STRENGTHS = (1000.0, 300.0, 100.0, 30.0, 10.0, 3.0, 1.0)  # of the L2 penalty
SURE = 1.0  # standard errors over frames by which the variances must gain, or a field does without them
_FOLDS = 5


@dataclass(frozen=True)
class Held:
    """What the boxes of frames that the fit has not seen lose (n,) at the best strength."""

    strength: float
    loss: Array


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
    return [choice(model, f, frames, strength) for f in range(len(model.fields))]


def fitted(model: VarianceModel, choices: list[Choice]) -> tuple[VarianceModel, Array, Array]:
    """The model with what was chosen, its optimum theta, and the strengths (D,)."""
    told = replace(model, told=tuple(one.told for one in choices))
    parts = [model.field(f, one.told).fitted(one.strength) for f, one in enumerate(choices)]
    return told, np.concatenate(parts), np.array([one.strength for one in choices])


def choice(model: VarianceModel, f: int, frames: Array, strength: float | None = None) -> Choice:
    """That of field f alone; see ``chosen``."""
    known = model.errors.known[:, f]
    numbers = np.unique(frames[known], return_inverse=True)[1]
    count = int(numbers.max()) + 1 if len(numbers) else 0
    strengths = STRENGTHS if strength is None else (strength,)
    if count < 2:
        return Choice(strengths[len(strengths) // 2], False, 0.0, float("inf"))
    without = _held_out(model.field(f, False)[known], numbers, count, strengths)
    if model.kind == "score":
        return Choice(without.strength, False, 0.0, 0.0)
    with_them = _held_out(model.field(f, True)[known], numbers, count, strengths)
    gain = np.bincount(numbers, without.loss - with_them.loss)  # (count,) of each frame
    error = float(gain.std(ddof=1) * np.sqrt(count))
    told = float(gain.sum()) > SURE * error
    return Choice((with_them if told else without).strength, told, float(gain.sum()) / len(numbers), error / len(numbers))


def _held_out(model: VarianceModel, frames: Array, count: int, strengths: tuple[float, ...]) -> Held:
    folds = min(_FOLDS, count)
    fold_of = np.random.default_rng(0).permutation(count)[frames] % folds
    losses = {strength: np.zeros(len(frames)) for strength in strengths}
    for fold in range(folds):
        seen, unseen, theta = model[fold_of != fold], model[fold_of == fold], None
        for strength in strengths:  # from the stiffest: each optimum is a good start for the next
            theta = seen.fitted(strength, theta)
            losses[strength][fold_of == fold] = unseen.beside(seen).local(theta, "gaussian").loss
    best = min(losses, key=lambda strength: float(losses[strength].sum()))
    return Held(best, losses[best])
