"""Risk: the probability that a box is inaccurate, from all that is known of it: a number to act on.

A variance by itself says how far a box may be off, in units and on a scale of its own. A small logistic regression, fitted on boxes with known
objects, makes one probability of it together with score, size, range and class; the logarithm of each variance is one column.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from math import log
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from boxcov.errors import BoxcovError
from boxcov.evaluate.baselines import (
    logistic,
    logistic_regression,
    named_covariance_features,
    named_features,
    out_of_fold,
)
from boxcov.evaluate.quality import IOU_THRESHOLD, clipped_mean
from boxcov.evaluate.ranking import auroc
from boxcov.evaluate.records import Records

Array = NDArray[Any]
Target = Literal["iou", "l2"]
PENALTIES = (0.1, 1.0, 10.0, 100.0, 1000.0)


@dataclass(frozen=True)
class Risk:
    """What a fit found: weights for standardised columns. Values beyond those that the fit has seen count as the nearest that it has.

    >>> one = Risk("iou", 0.4, ("x",), ("car",), ("score",), (0.0,), (1.0,), ((-9.0, 9.0),), (-2.0,), 0.0, 1.0)
    >>> Risk.from_json(one.to_json()) == one
    True
    """

    target: Target
    limit: float  # a box is inaccurate below this IoU, or from this distance on
    fields: tuple[str, ...]
    classes: tuple[str, ...]
    columns: tuple[str, ...]  # c names of what it reads
    centre: tuple[float, ...]  # (c,)
    spread: tuple[float, ...]  # (c,)
    limits: tuple[tuple[float, ...], ...]  # (c, 2) least and greatest seen
    weights: tuple[float, ...]  # (c,)
    intercept: float
    penalty: float
    provenance: Mapping[str, Any] = field(
        default_factory=dict
    )  # boxes, frames, share of inaccurate ones, how well it did on frames unseen

    def __post_init__(self) -> None:
        if self.target not in get_args(Target):
            raise BoxcovError(
                f"target must be one of {', '.join(get_args(Target))}, got {self.target!r}"
            )
        for name in ("centre", "spread", "limits", "weights"):
            if len(getattr(self, name)) != len(self.columns):
                raise BoxcovError(
                    f"risk: {name} has {len(getattr(self, name))} entries, expected {len(self.columns)}, one a column"
                )

    def probability(self, records: Records, extra: Array | None = None) -> Array:
        """P(the box is inaccurate) (n,); objects and errors in ``records`` are not looked at. ``extra`` (n, c) if the fit had any."""
        if (records.fields, records.classes) != (self.fields, self.classes):
            raise BoxcovError(
                f"this risk is for boxes of {' '.join(self.fields)} of {', '.join(self.classes)}; the records have {' '.join(records.fields)} of "
                f"{', '.join(records.classes)}: fit one for them with fit_risk"
            )
        seen = _columns(records, extra)
        lacking = [name for name in self.columns if name not in seen]
        if lacking:
            raise BoxcovError(
                f"this risk reads {', '.join(lacking)}, which the records do not have: make them as those that it was fitted to"
            )
        X = _finite({name: seen[name] for name in self.columns}, len(records))
        low, high = np.asarray(self.limits, dtype=float).reshape(-1, 2).T
        scaled = (np.clip(X, low, high) - self.centre) / self.spread
        return logistic(scaled @ np.asarray(self.weights) + self.intercept)

    def to_json(self) -> str:
        return json.dumps(asdict(self), allow_nan=False)

    @staticmethod
    def from_json(text: str) -> Risk:
        """What ``to_json`` wrote.

        >>> Risk.from_json("no JSON")
        Traceback (most recent call last):
        ...
        boxcov.errors.BoxcovError: not a risk, or a damaged one (JSONDecodeError: Expecting value: line 1 column 1 (char 0))
        """
        try:
            given = json.loads(text)
            lacking = [f.name for f in fields(Risk)[:-1] if f.name not in given]
            if lacking:
                raise BoxcovError(f"not a risk, or a damaged one (missing: {', '.join(lacking)})")
            return Risk(**{name: _tuples(value) for name, value in given.items()})
        except (ValueError, TypeError, AttributeError) as error:
            if isinstance(error, BoxcovError):
                raise
            raise BoxcovError(
                f"not a risk, or a damaged one ({type(error).__name__}: {error})"
            ) from None


def fit_risk(
    records: Records,
    extra: Array | None = None,
    target: Target = "iou",
    *,
    penalties: Sequence[float] = PENALTIES,
    folds: int = 5,
    seed: int = 0,
) -> Risk:
    """A ``Risk`` from boxes whose objects are known.

    target: "iou": inaccurate is an IoU below 0.4, so a box without an object is. "l2": paired boxes alone, inaccurate from their mean distance on.
    extra: more columns (n, c), such as log variances of another part of the network; ``probability`` then needs them, too.
    penalties: on the squared weights of standardised columns; taken is the one of least log loss on frames that the fit has not seen, in ``folds``.

    It reads the logit of the score, log sizes, range, class, and, where the records have them, the log variances of the fields and of the
    score's logit. Where all boxes are accurate, or none is, every box has the same probability.

    >>> rng = np.random.default_rng(0)
    >>> n, variance = 400, rng.gamma(1.0, size=400)
    >>> boxes = np.concatenate([rng.uniform(-9, 9, (n, 2)), np.ones((n, 2)), np.zeros((n, 1))], 1)
    >>> found = Records(
    ...     ("x", "y", "w", "l", "yaw"), ("car",), boxes, variance, rng.uniform(0.2, 0.9, n), np.zeros(n, int), np.arange(n) // 8,
    ...     boxes, np.where(variance > 1, 0.2, 0.8), np.ones(n), covariance=variance[:, None, None] * np.eye(5),
    ... )
    >>> p = fit_risk(found).probability(found)
    >>> bool(p[variance > 2].min() > 0.8 > 0.2 > p[variance < 0.5].max())
    True
    """
    _check(records, target, penalties)
    rows = np.ones(len(records), dtype=bool) if target == "iou" else records.paired
    limit = IOU_THRESHOLD if target == "iou" else clipped_mean(records.l2[rows])
    bad = records.iou[rows] < limit if target == "iou" else ~(records.l2[rows] < limit)
    named = {name: column[rows] for name, column in _columns(records, extra).items()}
    X, frame = _finite(named, len(bad)), records.frame[rows]
    centre, spread = X.mean(0), X.std(0)
    spread = np.where(spread > 0, spread, 1.0)
    weights, penalty, about = np.zeros(1 + X.shape[1]), max(penalties), {}
    weights[0] = log((bad.sum() + 0.5) / (len(bad) - bad.sum() + 0.5))
    if bad.any() and not bad.all():
        held = {
            strength: out_of_fold(X, bad, frame, folds=folds, penalty=strength, seed=seed)
            for strength in sorted(penalties, reverse=True)
        }
        penalty = min(
            held, key=lambda strength: _log_loss(held[strength], bad)
        )  # of equals the strongest
        weights = logistic_regression((X - centre) / spread, bad, penalty)
        about = {"log loss": _log_loss(held[penalty], bad), "AUROC": auroc(bad, held[penalty])}
    return Risk(
        target,
        float(limit),
        records.fields,
        records.classes,
        tuple(named),
        tuple(centre.tolist()),
        tuple(spread.tolist()),
        tuple(zip(X.min(0).tolist(), X.max(0).tolist())),
        tuple(weights[1:].tolist()),
        float(weights[0]),
        float(penalty),
        {
            "boxes": len(bad),
            "frames": len(np.unique(frame)),
            "inaccurate": float(bad.mean()),
            "held out": about,
        },
    )


def _check(records: Records, target: str, penalties: Sequence[float]) -> None:
    if target not in get_args(Target):
        raise BoxcovError(f"target must be one of {', '.join(get_args(Target))}, got {target!r}")
    if not penalties or not min(penalties) > 0:
        raise BoxcovError(f"penalties must be above 0, and at least one, got {tuple(penalties)}")
    if not records.paired.any():
        raise BoxcovError(
            f"none of the {len(records)} boxes is paired with an object, so there is nothing to learn from: are the objects those of the same "
            "frames, in the same coordinates and with the same classes?"
        )


def _columns(records: Records, extra: Array | None) -> dict[str, Array]:
    found = named_features(records)
    if records.covariance is not None:
        found |= named_covariance_features(records)
    if extra is not None:
        extra = np.asarray(extra, dtype=float)
        if extra.ndim != 2 or len(extra) != len(records):
            raise BoxcovError(
                f"extra has shape {extra.shape}, expected ({len(records)}, c): one row a box"
            )
        found |= {f"extra {i}": extra[:, i] for i in range(extra.shape[1])}
    return found


def _finite(named: Mapping[str, Array], n: int) -> Array:
    """The columns side by side (n, c), all of them numbers."""
    for name, column in named.items():
        wrong = int((~np.isfinite(column)).sum())
        if wrong:
            raise BoxcovError(
                f"{name} of {wrong} of {n} boxes is not a finite number: leave those boxes out, or find out why"
            )
    return np.stack(list(named.values()), 1)


def _log_loss(probability: Array, bad: Array) -> float:
    return float(-np.log(np.maximum(np.where(bad, probability, 1 - probability), 1e-300)).mean())


def _tuples(value: Any) -> Any:
    return tuple(_tuples(entry) for entry in value) if isinstance(value, list) else value
