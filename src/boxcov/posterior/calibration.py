"""A calibration: from the epistemic covariance of a box to the covariance of its error, ``a Sigma + diag(r)``.

``a`` depends on the class. ``r``, what the weights cannot explain (noise of sensor and labels, a too simple network), is log-linear in a few
features of the box, and its epistemic variances may be among them. ``boxcov.error_model.fit`` fits one in numpy; here it is applied, to
numpy arrays or to tensors on any device.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

import numpy as np

from boxcov.errors import BoxcovError, import_scipy

Kind = Literal["scale", "affine", "residual", "score", "product"]
Feature = str  # "score", "size", "range", "speed", or "variance x" for the epistemic variance of the field x
Row = tuple[float, ...]
_SCORES = (0.01, 0.99)  # the log-odds of a score are taken within
_SIZES = ("w", "l", "h")
_LEAST = 1e-30  # a variance below is taken for this
VARIANCE = "variance "  # and a field: the name of a feature


@dataclass(frozen=True)
class Calibration:
    """What a fit found. Logarithms of variances are natural; -inf stands for a part that is not there.

    kind: "scale": ``a_c Sigma``, a factor a class; "affine": ``a_c Sigma + diag(B_c)``; "residual": ``a Sigma + diag(r)`` with
    ``log r`` linear in the features; "score": the same with a = 0, which knows nothing of the posterior: the baseline; "product": that with the
    epistemic variances of the fields among the features, so that each of them enters ``r`` as a factor, a power of it.
    estimator: what the covariances were computed by, as ``boxcov.predict.predictor.estimator`` says it: sampling noise is part of what was fitted.

    >>> twice = Calibration(
    ...     kind="scale", fields=("x",), classes=("car",), estimator="exact", log_scale=(np.log(2.0),), log_residual=((-np.inf,),)
    ... )
    >>> twice.predictive(np.ones((1, 1, 1)), np.zeros((1, 1)), np.ones(1), np.zeros(1, int)).tolist()
    [[[2.0]]]
    >>> Calibration.from_json(twice.to_json()) == twice
    True
    """

    kind: Kind
    fields: tuple[str, ...]  # D names
    classes: tuple[str, ...]
    estimator: str
    log_scale: Row  # (C,) log a of each class
    log_residual: tuple[Row, ...]  # (C, D) log r of a box with mean features
    features: tuple[Feature, ...] = ()
    slopes: tuple[Row, ...] = ()  # (D, P) of log r, for features standardised as follows
    centre: Row = ()  # (P,)
    spread: Row = ()  # (P,)
    limits: tuple[
        Row, ...
    ] = ()  # (P, 2) least and greatest that the fit has seen: a box beyond is treated as one at the limit
    floor: Row = ()  # (D,) a small variance beside r: no box is known better than this
    error_scale: Row = ()  # (C,) standard errors of the three tables
    error_residual: tuple[Row, ...] = ()  # (C, D)
    error_slopes: tuple[Row, ...] = ()  # (D, P)
    regions: tuple[
        Row, ...
    ] = ()  # (L, 2) a share of the errors, and the share of their Gaussian within which it was seen to lie; both ascend
    provenance: Mapping[str, Any] = field(
        default_factory=dict
    )  # boxes, frames, data, loss, shrinkage, NLL before and after ...

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise BoxcovError(
                f"no kind of calibration {self.kind!r}: there are {', '.join(get_args(Kind))}"
            )
        C, D, P = len(self.classes), len(self.fields), len(self.features)
        shapes = {
            "log_scale": (C,),
            "log_residual": (C, D),
            "slopes": (D, P),
            "centre": (P,),
            "spread": (P,),
            "limits": (P, 2),
        }
        shapes |= {"floor": (D,)} if self.floor else {}
        shapes |= {"regions": (len(self.regions), 2)} if self.regions else {}
        for name, shape in shapes.items():
            value = np.asarray(getattr(self, name), dtype=float)
            if value.shape != shape and not (value.size == 0 and 0 in shape):
                raise BoxcovError(
                    f"calibration: {name} has shape {value.shape}, expected {shape} for {C} classes and {D} fields"
                )

    def predictive(self, covariance: Any, boxes: Any, scores: Any, labels: Any) -> Any:
        """The covariances (m, D, D) of the errors, from epistemic ones (m, D, D), boxes (m, D), scores (m,) and labels (m,).

        All numpy arrays, or all tensors on one device. ``prepared`` once is faster for many calls.
        """
        return self.prepared(covariance)(covariance, boxes, scores, labels)

    def prepared(self, like: Any) -> Prepared:
        """Its tables as arrays of the kind, type and device of ``like``."""
        return Prepared(self, like)

    def radius(self, level: float, dims: int | None = None) -> float:
        """Mahalanobis distance under ``predictive`` within which this share of the errors lies, all fields together or ``dims`` of them.

        A Gaussian's, unless the fit has seen otherwise: errors have heavier tails, so the half of them lies nearer and 95 % farther than a
        Gaussian's would. For a tracker's gate, or a region to drive around. Levels between those that were looked at are interpolated.

        >>> one = Calibration("scale", ("x", "y"), ("car",), "exact", (0.0,), ((-np.inf, -np.inf),))
        >>> round(one.radius(0.95), 3)
        2.448
        >>> round(Calibration(**{**vars(one), "regions": ((0.5, 0.3), (0.95, 0.99))}).radius(0.95), 3)
        3.035
        """
        if not 0 < level < 1:
            raise BoxcovError(f"level must lie between 0 and 1, got {level}")
        seen = np.asarray(
            ((0.0, 0.0), *self.regions, (1.0, 1.0)) if self.regions else ((0.0, 0.0), (1.0, 1.0))
        )
        share = float(np.interp(level, seen[:, 0], seen[:, 1]))
        quantile = import_scipy("stats").chi2.ppf(min(share, 1 - 1e-12), dims or len(self.fields))
        return float(quantile**0.5)

    def check(self, fields: Sequence[str], classes: Sequence[str], who: str) -> None:
        """Refuse boxes of another layout, or classes of another list.

        >>> one = Calibration("scale", ("x",), ("car",), "exact", (0.0,), ((-np.inf,),))
        >>> one.check(("x", "y"), ("car",), "the detector")
        Traceback (most recent call last):
        ...
        boxcov.errors.BoxcovError: this calibration is for boxes of x, the detector has x y: fit one with `boxcov calibrate`
        """
        if tuple(fields) != self.fields:
            given = " ".join(fields)
            raise BoxcovError(
                f"this calibration is for boxes of {' '.join(self.fields)}, {who} has {given}: fit one with `boxcov calibrate`"
            )
        if tuple(classes) != self.classes:
            raise BoxcovError(
                f"this calibration is for the classes {', '.join(self.classes)}, {who} has {', '.join(classes)}: "
                "fit one with `boxcov calibrate`"
            )

    def to_json(self) -> str:
        """One JSON object; -inf and NaN as text, so that every reader takes it."""
        return json.dumps(_plain(asdict(self)), allow_nan=False)

    @staticmethod
    def from_json(text: str) -> Calibration:
        """What ``to_json`` wrote.

        >>> Calibration.from_json("{}")
        Traceback (most recent call last):
        ...
        boxcov.errors.BoxcovError: not a calibration, or a damaged one (missing: kind, fields, classes, estimator, log_scale, log_residual)
        """
        try:
            given = json.loads(text)
            lacking = [f.name for f in fields(Calibration)[:6] if f.name not in given]
            if lacking:
                raise BoxcovError(
                    f"not a calibration, or a damaged one (missing: {', '.join(lacking)})"
                )
            return Calibration(**_restored(given))
        except (
            ValueError,
            TypeError,
            AttributeError,
            LookupError,
            ArithmeticError,
            RecursionError,
        ) as error:
            if isinstance(error, BoxcovError):
                raise
            raise BoxcovError(
                f"not a calibration, or a damaged one ({type(error).__name__}: {error})"
            ) from None


class Prepared:
    """A calibration ready for many calls: its tables as arrays or tensors, moved once.

    >>> import torch
    >>> c = Calibration("affine", ("x",), ("car", "bus"), "exact", (0.0, -np.inf), ((0.0,), (1.0,)))
    >>> c.prepared(torch.zeros(1))(torch.ones(2, 1, 1), torch.zeros(2, 1), torch.ones(2), torch.tensor([0, 1])).flatten()
    tensor([2.0000, 2.7183])
    """

    def __init__(self, calibration: Calibration, like: Any) -> None:
        def table(values: Any, *shape: int) -> Any:
            array = np.asarray(values, dtype=float).reshape(shape)
            return (
                array
                if isinstance(like, np.ndarray)
                else like.new_tensor(array.tolist()).reshape(shape)
            )

        C, D, P = len(calibration.classes), len(calibration.fields), len(calibration.features)
        self.calibration = calibration
        self.scale = table(np.exp(calibration.log_scale), C)
        self.log_residual = table(calibration.log_residual, C, D)
        spread = np.asarray(calibration.spread, dtype=float)
        self.slopes = table(
            (np.asarray(calibration.slopes, dtype=float).reshape(D, P) / spread).T, P, D
        )
        self.centre = table(calibration.centre, P)
        self.limits = table(calibration.limits, P, 2)
        self.floor = table(calibration.floor or np.zeros(D), D)
        self.eye = table(np.eye(D), D, D)

    def __call__(self, covariance: Any, boxes: Any, scores: Any, labels: Any) -> Any:
        """See ``Calibration.predictive``."""
        total = self.scale[labels][:, None, None] * covariance
        if self.calibration.kind == "scale":
            return total
        log_residual = self.log_residual[labels]  # (m, D)
        if self.calibration.features:
            seen = features(
                self.calibration.features, self.calibration.fields, boxes, scores, covariance
            )  # (m, P)
            seen = seen.clip(self.limits[:, 0], self.limits[:, 1])
            log_residual = log_residual + (seen - self.centre) @ self.slopes
        residual = (
            np.exp(log_residual) if isinstance(log_residual, np.ndarray) else log_residual.exp()
        )
        return total + (residual + self.floor)[:, :, None] * self.eye


def features(
    names: Sequence[Feature], fields: Sequence[str], boxes: Any, scores: Any, covariance: Any = None
) -> Any:
    """What the residual may depend on (m, P), as logarithms: of the odds of the score, of the size (geometric mean of its
    sides), of the range in the plane, of the speed that the box claims, and of the variances in ``covariance`` (m, D, D).

    >>> features(("score", "range"), ("x", "y"), np.array([[3.0, 4.0]]), np.array([0.5])).round(3).tolist()
    [[0.0, 1.609]]
    """
    if isinstance(boxes, np.ndarray):
        log, stack = np.log, np.stack
    else:
        import torch

        log, stack = torch.log, torch.stack  # type: ignore[assignment]
        scores, boxes = scores.to(boxes.dtype), boxes.detach()

    def column(name: str) -> Any:
        return boxes[:, list(fields).index(name)]

    def value(name: Feature) -> Any:
        if name.startswith(VARIANCE):
            at = list(fields).index(name.removeprefix(VARIANCE))
            return log(covariance[:, at, at].clip(_LEAST))
        if name == "score":
            p = scores.clip(*_SCORES)
            return log(p / (1 - p))
        if name == "size":
            image = "x1" in fields
            sides = (
                [column("x2") - column("x1"), column("y2") - column("y1")]
                if image
                else [column(s) for s in _SIZES if s in fields]
            )
            return sum(log(side.clip(1e-3)) for side in sides) / len(sides)
        if name == "range":
            return 0.5 * log((column("x") ** 2 + column("y") ** 2).clip(1.0))
        return 0.5 * log(column("vx") ** 2 + column("vy") ** 2 + 0.01)  # 0.1 m/s is at rest

    return stack([value(name) for name in names], 1)


def features_of(fields: Sequence[str]) -> tuple[Feature, ...]:
    """The features that boxes of these fields have; a range only where they lie on the ground, not in an image.

    >>> features_of(("x", "y", "w", "l", "yaw")), features_of(("x1", "y1", "x2", "y2"))
    (('score', 'size', 'range'), ('score', 'size'))
    """
    found: list[Feature] = ["score"]
    if any(side in fields for side in (*_SIZES, "x1")):
        found.append("size")
    if {"x", "y", "yaw"} <= set(fields):
        found.append("range")
    if {"vx", "vy"} <= set(fields):
        found.append("speed")
    return tuple(found)


def variance_features(fields: Sequence[str]) -> tuple[Feature, ...]:
    """The names of the features that are epistemic variances.

    >>> variance_features(("x", "yaw"))
    ('variance x', 'variance yaw')
    """
    return tuple(f"{VARIANCE}{name}" for name in fields)


def _plain(value: Any) -> Any:
    """Ready for JSON: numbers that are not finite as text."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(entry) for entry in value]
    return str(value) if isinstance(value, float) and not np.isfinite(value) else value


def _restored(value: Any) -> Any:
    """What ``_plain`` was given, lists as tuples."""
    if isinstance(value, dict):
        return {key: _restored(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return tuple(_restored(entry) for entry in value)
    return float(value) if value in ("inf", "-inf", "nan") else value
