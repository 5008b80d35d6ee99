"""Calibration: from the epistemic covariance of a box to the covariance of its error.

The predictive covariance is ``diag(r)``. The residual variance ``r`` of each field is log-linear in
class and features of the box; its epistemic variances may be among the features.
``boxcov.error_model.fit`` fits a calibration; this module applies it to arrays or tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

import numpy as np

from boxcov.errors import BoxcovError, import_scipy

Kind = Literal["score", "product"]
REMOVED_KINDS = ("scale", "affine", "residual")  # in files of boxcov 0.1
# "score", "size", "range", "speed", or "variance x" for the epistemic variance of the field x
Feature = str
VARIANCE = "variance "  # prefix of such a feature
Row = tuple[float, ...]
_SCORES = (0.01, 0.99)  # scores are clipped before their logit is taken
_SIZES = ("w", "l", "h")
_MIN_VARIANCE = 1e-30
_REMOVED_KEYS = ("log_scale", "error_scale", "error_residual", "error_slopes")  # of boxcov 0.1


@dataclass(frozen=True)
class Calibration:
    """A fitted calibration. Logarithms of variances are natural.

    kind: "product" reads score, size, range, speed, class and the epistemic variances, so that each
        variance enters ``r`` as a factor, to some power; "score" does without the variances.
    estimator: what computed the covariances, see ``boxcov.predict.predictor.estimator``. The noise
        of the estimator is part of what was fitted.

    >>> unit = Calibration("score", ("x",), ("car",), "exact", log_residual=((0.0,),))
    >>> unit.predictive(np.ones((1, 1, 1)), np.zeros((1, 1)), np.ones(1), np.zeros(1, int)).tolist()
    [[[1.0]]]
    >>> Calibration.from_json(unit.to_json()) == unit
    True
    """

    kind: Kind
    fields: tuple[str, ...]  # D names
    classes: tuple[str, ...]  # C names
    estimator: str
    log_residual: tuple[Row, ...]  # (C, D) log r of a box with mean features
    features: tuple[Feature, ...] = ()  # P names
    slopes: tuple[Row, ...] = ()  # (D, P) of log r in the standardised features
    centre: Row = ()  # (P,) means of the features
    spread: Row = ()  # (P,) standard deviations of the features
    limits: tuple[Row, ...] = ()  # (P, 2) features are clipped to the range seen in the fit
    floor: Row = ()  # (D,) added to r
    # (L, 2) ascending: a share of the errors, and the mass of their Gaussians that holds it
    regions: tuple[Row, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)  # boxes, frames, data, NLL ...

    def __post_init__(self) -> None:
        if self.kind in REMOVED_KINDS:
            raise BoxcovError(
                f"calibrations of kind {self.kind!r} are no longer supported: "
                "run `boxcov calibrate` again"
            )
        if self.kind not in get_args(Kind):
            raise BoxcovError(
                f"unknown calibration {self.kind!r}: choose from {', '.join(get_args(Kind))}"
            )
        C, D, P = len(self.classes), len(self.fields), len(self.features)
        shapes: dict[str, tuple[int, ...]] = {"log_residual": (C, D), "slopes": (D, P)}
        shapes |= {"centre": (P,), "spread": (P,), "limits": (P, 2)}
        shapes |= {"floor": (D,)} if self.floor else {}
        shapes |= {"regions": (len(self.regions), 2)} if self.regions else {}
        for name, shape in shapes.items():
            value = np.asarray(getattr(self, name), dtype=float)
            if value.shape != shape and not (value.size == 0 and 0 in shape):
                raise BoxcovError(
                    f"calibration: {name} has shape {value.shape}, expected {shape} "
                    f"for {C} classes and {D} fields"
                )

    def __repr__(self) -> str:
        return (
            f"Calibration(kind={self.kind!r}, estimator={self.estimator!r}, "
            f"fields={' '.join(self.fields)}, {len(self.classes)} classes, "
            f"{len(self.features)} features, {len(self.regions)} region levels)"
        )

    def predictive(self, covariance: Any, boxes: Any, scores: Any, labels: Any) -> Any:
        """Return the covariances (m, D, D) of the errors.

        Takes epistemic covariances (m, D, D), boxes (m, D), scores (m,) and labels (m,): all numpy
        arrays, or all tensors on one device. For many calls, build ``tables`` once.
        """
        return self.tables(covariance)(covariance, boxes, scores, labels)

    def tables(self, like: Any) -> CalibrationTables:
        """Return the calibration's tables as arrays of the type and device of ``like``."""
        return CalibrationTables(self, like)

    def radius(self, level: float, dims: int | None = None) -> float:
        """Return the Mahalanobis distance under ``predictive`` that holds this share of the errors.

        level: share of the errors, between 0 and 1; interpolated between the fitted levels.
        dims: number of fields; all fields if None.

        Errors have heavier tails than a Gaussian, so the radius comes from ``regions`` if the fit
        has any. Use it as a tracker's gate.

        >>> unit = Calibration("score", ("x", "y"), ("car",), "exact", ((0.0, 0.0),))
        >>> round(unit.radius(0.95), 3)
        2.448
        >>> from dataclasses import replace
        >>> round(replace(unit, regions=((0.5, 0.3), (0.95, 0.99))).radius(0.95), 3)
        3.035
        """
        if not 0 < level < 1:
            raise BoxcovError(f"level must lie between 0 and 1, got {level}")
        share, mass = np.asarray(((0.0, 0.0), *self.regions, (1.0, 1.0))).T
        target = min(float(np.interp(level, share, mass)), 1 - 1e-12)
        square = import_scipy("stats").chi2.ppf(target, dims or len(self.fields))
        return float(square**0.5)

    def check(self, fields: Sequence[str], classes: Sequence[str], who: str) -> None:
        """Raise if ``who`` has other box fields or classes."""
        for what, own, other in (
            ("box fields", self.fields, fields),
            ("classes", self.classes, classes),
        ):
            if tuple(other) != own:
                raise BoxcovError(
                    f"this calibration is for the {what} {', '.join(own)}, {who} has "
                    f"{', '.join(other)}: fit one with `boxcov calibrate`"
                )

    def to_json(self) -> str:
        """Return one JSON object, with inf and NaN as strings."""
        return json.dumps(_encode(asdict(self)), allow_nan=False)

    @staticmethod
    def from_json(text: str) -> Calibration:
        """Read what ``to_json`` wrote, in this version or in 0.1."""
        try:
            given = json.loads(text)
            missing = [f.name for f in fields(Calibration)[:5] if f.name not in given]
            if missing:
                raise BoxcovError(f"not a calibration, or damaged (missing: {', '.join(missing)})")
            values = {key: value for key, value in given.items() if key not in _REMOVED_KEYS}
            return Calibration(**_decode(values))
        except BoxcovError:
            raise
        except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
            reason = f"{type(error).__name__}: {error}"
        except RecursionError:
            reason = "nested too deeply"
        raise BoxcovError(f"not a calibration, or damaged ({reason})")


class CalibrationTables:
    """A calibration's tables as arrays or tensors on one device, ready for many calls.

    >>> import torch
    >>> c = Calibration("score", ("x",), ("car", "bus"), "exact", ((0.0,), (1.0,)))
    >>> tables = c.tables(torch.zeros(1))
    >>> labels = torch.tensor([0, 1])
    >>> tables(torch.ones(2, 1, 1), torch.zeros(2, 1), torch.ones(2), labels).flatten()
    tensor([1.0000, 2.7183])
    """

    def __init__(self, calibration: Calibration, like: Any) -> None:
        def table(values: Any, *shape: int) -> Any:
            array = np.asarray(values, dtype=float).reshape(shape)
            if isinstance(like, np.ndarray):
                return array
            return like.new_tensor(array.tolist()).reshape(shape)

        C, D, P = len(calibration.classes), len(calibration.fields), len(calibration.features)
        self.calibration = calibration
        self.log_residual = table(calibration.log_residual, C, D)
        spread = np.asarray(calibration.spread, dtype=float)
        slopes = np.asarray(calibration.slopes, dtype=float).reshape(D, P) / spread
        self.slopes = table(slopes.T, P, D)
        self.centre = table(calibration.centre, P)
        self.limits = table(calibration.limits, P, 2)
        self.floor = table(calibration.floor or np.zeros(D), D)
        self.eye = table(np.eye(D), D, D)

    def __call__(self, covariance: Any, boxes: Any, scores: Any, labels: Any) -> Any:
        """See ``Calibration.predictive``."""
        log_residual = self.log_residual[labels]  # (m, D)
        names = self.calibration.features
        if names:
            values = box_features(names, self.calibration.fields, boxes, scores, covariance)
            values = values.clip(self.limits[:, 0], self.limits[:, 1])  # (m, P)
            log_residual = log_residual + (values - self.centre) @ self.slopes
        is_numpy = isinstance(log_residual, np.ndarray)
        residual = np.exp(log_residual) if is_numpy else log_residual.exp()
        return (residual + self.floor)[:, :, None] * self.eye


def box_features(
    names: Sequence[Feature], fields: Sequence[str], boxes: Any, scores: Any, covariance: Any = None
) -> Any:
    """Return features (m, P) of boxes (m, D), as logarithms.

    "score": logit of the score. "size": log of the geometric mean of the sides. "range": log
    distance from the sensor in the plane. "speed": log of the predicted speed. "variance x": log
    variance of the field x in ``covariance`` (m, D, D).

    >>> box = np.array([[3.0, 4.0]])
    >>> box_features(("score", "range"), ("x", "y"), box, np.array([0.5])).round(3).tolist()
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
            i = list(fields).index(name.removeprefix(VARIANCE))
            return log(covariance[:, i, i].clip(_MIN_VARIANCE))
        if name == "score":
            p = scores.clip(*_SCORES)
            return log(p / (1 - p))
        if name == "size":
            corners = [("x2", "x1"), ("y2", "y1")] if "x1" in fields else []
            sides = [column(end) - column(start) for end, start in corners]
            sides = sides or [column(side) for side in _SIZES if side in fields]
            return sum(log(side.clip(1e-3)) for side in sides) / len(sides)
        if name == "range":
            return 0.5 * log((column("x") ** 2 + column("y") ** 2).clip(1.0))
        return 0.5 * log(column("vx") ** 2 + column("vy") ** 2 + 0.01)  # 0.1 m/s is at rest

    return stack([value(name) for name in names], 1)


def feature_names(fields: Sequence[str]) -> tuple[Feature, ...]:
    """Return the features that boxes with these fields have, other than variances.

    >>> feature_names(("x", "y", "w", "l", "yaw")), feature_names(("x1", "y1", "x2", "y2"))
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
    """Return the names of the features that are epistemic variances."""
    return tuple(f"{VARIANCE}{name}" for name in fields)


def _encode(value: Any) -> Any:
    """Replace numbers that are not finite by strings."""
    if isinstance(value, Mapping):
        return {key: _encode(entry) for key, entry in value.items()}
    if isinstance(value, (tuple, list)):
        return [_encode(entry) for entry in value]
    return str(value) if isinstance(value, float) and not np.isfinite(value) else value


def _decode(value: Any) -> Any:
    """Undo ``_encode``, with lists as tuples."""
    if isinstance(value, dict):
        return {key: _decode(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return tuple(_decode(entry) for entry in value)
    return float(value) if value in ("inf", "-inf", "nan") else value
