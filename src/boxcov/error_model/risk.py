"""Risk: the probability that a box is inaccurate, from score, size, class and covariance.

A logistic regression, fitted on boxes with known objects, turns score, size, range, class and the
log variances of a box into one probability to act on.
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
    """A fitted logistic regression on standardised columns, clipped to the range of the fit.

    >>> columns = {"columns": ("score",), "centre": (0.0,), "spread": (1.0,), "limits": ((-9, 9),)}
    >>> risk = Risk(
    ...     "iou", 0.4, ("x",), ("car",), **columns, weights=(-2.0,), intercept=0.0, penalty=1.0
    ... )
    >>> Risk.from_json(risk.to_json()) == risk
    True
    """

    target: Target
    limit: float  # a box is inaccurate below this IoU, or from this distance on
    fields: tuple[str, ...]
    classes: tuple[str, ...]
    columns: tuple[str, ...]  # c names of the inputs
    centre: tuple[float, ...]  # (c,)
    spread: tuple[float, ...]  # (c,)
    limits: tuple[tuple[float, ...], ...]  # (c, 2) smallest and largest value in the fit
    weights: tuple[float, ...]  # (c,)
    intercept: float
    penalty: float
    # boxes, frames, share of inaccurate boxes, log loss and AUROC on held-out frames
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_target(self.target)
        for name in ("centre", "spread", "limits", "weights"):
            if len(getattr(self, name)) != len(self.columns):
                raise BoxcovError(
                    f"risk: {name} has {len(getattr(self, name))} entries, "
                    f"expected {len(self.columns)}, one per column"
                )

    def __repr__(self) -> str:
        about = ", ".join(f"{key}={value}" for key, value in self.provenance.items())
        return f"Risk(target={self.target!r}, {len(self.columns)} columns, {about})"

    def probability(self, records: Records, extra: Array | None = None) -> Array:
        """Return P(the box is inaccurate) (n,).

        The objects in ``records`` are not used. ``extra`` (n, c) is needed if the fit had any.
        """
        if (records.fields, records.classes) != (self.fields, self.classes):
            raise BoxcovError(
                f"this risk is for the fields {' '.join(self.fields)} and the classes "
                f"{', '.join(self.classes)}; the records have {' '.join(records.fields)} and "
                f"{', '.join(records.classes)}: fit one for them with fit_risk"
            )
        values = _named_columns(records, extra)
        missing = [name for name in self.columns if name not in values]
        if missing:
            raise BoxcovError(
                f"this risk needs {', '.join(missing)}, which the records do not have: "
                "predict as for the fit"
            )
        X = _stack_columns({name: values[name] for name in self.columns}, len(records))
        low, high = np.asarray(self.limits, dtype=float).reshape(-1, 2).T
        scaled = (np.clip(X, low, high) - self.centre) / self.spread
        return logistic(scaled @ np.asarray(self.weights) + self.intercept)

    def to_json(self) -> str:
        return json.dumps(asdict(self), allow_nan=False)

    @staticmethod
    def from_json(text: str) -> Risk:
        """Read what ``to_json`` wrote."""
        try:
            given = json.loads(text)
            missing = [f.name for f in fields(Risk)[:-1] if f.name not in given]
            if missing:
                raise BoxcovError(f"not a risk, or damaged (missing: {', '.join(missing)})")
            return Risk(**{name: _tuples(value) for name, value in given.items()})
        except BoxcovError:
            raise
        except (ValueError, TypeError, AttributeError) as error:
            raise BoxcovError(f"not a risk, or damaged ({type(error).__name__}: {error})") from None


def fit_risk(
    records: Records,
    extra: Array | None = None,
    target: Target = "iou",
    *,
    penalties: Sequence[float] = PENALTIES,
    folds: int = 5,
    seed: int = 0,
) -> Risk:
    """Fit a ``Risk`` on boxes whose objects are known.

    The regression reads the score logit, log sizes, range, class and, if the records have them, the
    log variances of the fields and of the score logit. If all boxes are accurate, or none is, every
    box gets the same probability.

    extra: more columns (n, c), such as log variances of another part of the network;
        ``Risk.probability`` then needs them as well.
    target: "iou": inaccurate means an IoU below 0.4, which includes boxes without an object. "l2":
        paired boxes only; inaccurate means at least the mean distance.
    penalties: candidates for the L2 penalty. The one with the smallest log loss on held-out frames
        (``folds`` folds) is used.

    >>> rng = np.random.default_rng(0)
    >>> n, one, variance = 400, np.ones(400), rng.gamma(1.0, size=400)
    >>> boxes = np.concatenate([rng.uniform(-9, 9, (n, 2)), np.ones((n, 3))], 1)
    >>> records = Records(
    ...     ("x", "y", "w", "l", "yaw"), ("car",), boxes, variance, scores=one / 2,
    ...     labels=np.zeros(n, int), frame=np.arange(n) // 8, truth=boxes,
    ...     iou=np.where(variance > 1, 0.2, 0.8), l2=one,
    ...     covariance=variance[:, None, None] * np.eye(5),
    ... )
    >>> p = fit_risk(records).probability(records)
    >>> bool(p[variance > 2].min() > 0.8 > 0.2 > p[variance < 0.5].max())
    True
    """
    _check_target(target)
    _check_records(records, penalties)
    rows = np.ones(len(records), dtype=bool) if target == "iou" else records.paired
    limit = IOU_THRESHOLD if target == "iou" else clipped_mean(records.l2[rows])
    bad = records.iou[rows] < limit if target == "iou" else ~(records.l2[rows] < limit)
    named = {name: column[rows] for name, column in _named_columns(records, extra).items()}
    X, frame = _stack_columns(named, len(bad)), records.frame[rows]
    centre, spread = X.mean(0), X.std(0)
    spread = np.where(spread > 0, spread, 1.0)
    weights, penalty, held_out = np.zeros(1 + X.shape[1]), max(penalties), {}
    weights[0] = log((bad.sum() + 0.5) / (len(bad) - bad.sum() + 0.5))
    if bad.any() and not bad.all():
        probability = {
            candidate: out_of_fold(X, bad, frame, folds=folds, penalty=candidate, seed=seed)
            for candidate in sorted(penalties, reverse=True)  # of equal ones the largest is taken
        }
        penalty = min(probability, key=lambda p: _log_loss(probability[p], bad))
        weights = logistic_regression((X - centre) / spread, bad, penalty)
        loss, area = _log_loss(probability[penalty], bad), auroc(bad, probability[penalty])
        held_out = {"log loss": loss, "AUROC": area}
    return Risk(
        target=target,
        limit=float(limit),
        fields=records.fields,
        classes=records.classes,
        columns=tuple(named),
        centre=tuple(centre.tolist()),
        spread=tuple(spread.tolist()),
        limits=tuple(zip(X.min(0).tolist(), X.max(0).tolist())),
        weights=tuple(weights[1:].tolist()),
        intercept=float(weights[0]),
        penalty=float(penalty),
        provenance={
            "boxes": len(bad),
            "frames": len(np.unique(frame)),
            "inaccurate": float(bad.mean()),
            "held out": held_out,
        },
    )


def _check_target(target: str) -> None:
    if target not in get_args(Target):
        raise BoxcovError(f"target must be one of {', '.join(get_args(Target))}, got {target!r}")


def _check_records(records: Records, penalties: Sequence[float]) -> None:
    if not penalties or not min(penalties) > 0:
        raise BoxcovError(f"penalties must be above 0, and at least one, got {tuple(penalties)}")
    if not records.paired.any():
        raise BoxcovError(
            f"none of the {len(records)} boxes is paired with an object: are the objects those of "
            "the same frames, in the same coordinates and with the same classes?"
        )


def _named_columns(records: Records, extra: Array | None) -> dict[str, Array]:
    found = named_features(records)
    if records.covariance is not None:
        found |= named_covariance_features(records)
    if extra is not None:
        extra = np.asarray(extra, dtype=float)
        if extra.ndim != 2 or len(extra) != len(records):
            raise BoxcovError(
                f"extra has shape {extra.shape}, expected ({len(records)}, c): one row per box"
            )
        found |= {f"extra {i}": extra[:, i] for i in range(extra.shape[1])}
    return found


def _stack_columns(named: Mapping[str, Array], n: int) -> Array:
    """Return the columns (n, c), all finite."""
    for name, column in named.items():
        wrong = int((~np.isfinite(column)).sum())
        if wrong:
            raise BoxcovError(
                f"{name} of {wrong} of {n} boxes is not finite: remove those boxes, or find out why"
            )
    return np.stack(list(named.values()), 1)


def _log_loss(probability: Array, bad: Array) -> float:
    return float(-np.log(np.maximum(np.where(bad, probability, 1 - probability), 1e-300)).mean())


def _tuples(value: Any) -> Any:
    return tuple(_tuples(entry) for entry in value) if isinstance(value, list) else value
