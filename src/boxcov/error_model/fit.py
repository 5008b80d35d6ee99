"""Fit a calibration to the errors of labelled boxes, by maximum likelihood."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from boxcov.error_model.variance_model import FieldModel, VarianceModel
from boxcov.errors import BoxcovError
from boxcov.evaluate.covariance_metrics import gaussian_fit
from boxcov.evaluate.records import Records
from boxcov.posterior.calibration import Calibration, Kind

Array = NDArray[Any]
LEVELS = (*(round(0.05 * i, 2) for i in range(1, 20)), 0.975, 0.99)  # of regions
# Strengths of the L2 penalty, strongest first. 1 weighs as much as two boxes of a class.
STRENGTHS = (100.0, 30.0, 10.0, 3.0, 1.0, 0.3, 0.1)
MIN_GAIN = 1.0  # standard errors over frames by which variances must improve the held-out NLL
HEAVY_TAIL = 0.5  # a field is heavy-tailed if 1 % of its boxes hold this share of squared errors
_FOLDS = 5


@dataclass(frozen=True)
class Choice:
    """How one field is fitted, chosen by cross-validation over frames."""

    strength: float  # of the L2 penalty
    with_variances: bool
    gain: float  # of the held-out NLL by the variances, in nats per box
    standard_error: float  # of the gain, over frames


def fit_calibration(
    records: Records,
    kind: Kind = "product",
    *,
    estimator: str,
    strength: float | None = None,
    data: str = "",
) -> Calibration:
    """Return the calibration that maximises the likelihood of the errors of the paired boxes.

    kind: "product" uses score, size, range, speed, class and the epistemic variances; "score" does
        without the variances.
    estimator: what computed the covariances, see ``boxcov.predict.predictor.estimator``.
    strength: of the L2 penalty on classes and features; by cross-validation over frames if None.
    data: description of the frames, kept as provenance.

    >>> rng = np.random.default_rng(0)
    >>> n, one = 400, np.ones(400)
    >>> records = Records(
    ...     fields=("x",), classes=("car",), boxes=rng.normal(0, 2.0, (n, 1)), uncertainty=one,
    ...     scores=one / 2, labels=np.zeros(n, int), frame=np.arange(n) // 10,
    ...     truth=np.zeros((n, 1)), iou=one, l2=one, covariance=np.ones((n, 1, 1)),
    ... )
    >>> found = fit_calibration(records, estimator="exact")
    >>> round(float(np.exp(found.log_residual[0][0]))), found.provenance["frames"]  # variance 4
    (4, 40)
    """
    if kind not in get_args(Kind):
        raise BoxcovError(f"unknown calibration {kind!r}: choose from {', '.join(get_args(Kind))}")
    if strength is not None and not 0 < strength < np.inf:
        raise BoxcovError(f"strength must be above 0 and finite, got {strength}")
    paired = _usable_records(records)
    model = VarianceModel.from_records(paired, kind)
    frames = np.unique(paired.frame, return_inverse=True)[1].reshape(-1)
    choices = choose_fields(model, frames, kind, strength)
    theta = _fit_fields(model, choices)
    found = _calibration(model, theta, kind, estimator)
    before = gaussian_fit(paired.errors, _covariance(paired)).known.nll
    after = sum(
        model.field(f, c.with_variances).nll(theta[f]).mean() for f, c in enumerate(choices)
    )
    provenance: dict[str, Any] = {
        "boxes": len(paired),
        "boxes_by_class": {
            name: int((paired.labels == c).sum()) for c, name in enumerate(records.classes)
        },
        "frames": int(frames.max()) + 1,
        "data": data,
        "strength": {name: c.strength for name, c in zip(model.fields, choices)},
        "nll_before": float(before.mean()),
        "nll_after": float(after),
    }
    if kind == "product":
        provenance["variances"] = {
            name: {"used": c.with_variances, "gain": c.gain, "error": c.standard_error}
            for name, c in zip(model.fields, choices)
        }
    held_out = _predict_held_out(paired, model, frames, choices, found)
    return replace(found, provenance=provenance, regions=fit_regions(held_out))


def apply_calibration(records: Records, calibration: Calibration) -> Records:
    """Return the records with ``predictive`` filled by the calibration."""
    calibration.check(records.fields, records.classes, "the records")
    covariance = np.asarray(_covariance(records), dtype=float)
    predictive = calibration.predictive(
        covariance, records.boxes.astype(float), records.scores.astype(float), records.labels
    )
    return replace(records, predictive=predictive)


def fit_regions(
    records: Records, levels: Sequence[float] = LEVELS
) -> tuple[tuple[float, float], ...]:
    """Return, per level, the probability mass of the Gaussians that holds that share of errors.

    Split conformal counting over records with ``predictive``. A level that needs more boxes than
    there are is left out. Both numbers of a pair are equal if the Gaussians are right.
    """
    mass = np.sort(_predictive_fit(records).probability)
    ranks = [(level, int(np.ceil((len(mass) + 1) * level))) for level in levels]
    return tuple((level, float(mass[rank - 1])) for level, rank in ranks if rank <= len(mass))


def region_coverage(records: Records, calibration: Calibration, level: float) -> float:
    """Return the share of errors of records with ``predictive`` inside the regions of ``level``."""
    fit = _predictive_fit(records)
    if not len(fit.nees):
        return float("nan")
    radii = {int(d): calibration.radius(level, int(d)) for d in np.unique(fit.dims)}
    return float(np.mean([nees <= radii[int(d)] ** 2 for nees, d in zip(fit.nees, fit.dims)]))


def choose_fields(
    model: VarianceModel, frames: Array, kind: Kind, strength: float | None = None
) -> list[Choice]:
    """Choose the penalty of each field, and whether it uses the variances, on held-out frames.

    frames: (n,) frame numbers from 0. With a single frame no field uses the variances.

    Fields without variances share one strength, the best for all of them together: a heavy-tailed
    field would choose by its few worst boxes. A heavy-tailed field (such as velocity where most
    objects stand still) never uses the variances: outliers decide the gain, so it does not
    generalise.
    """
    strengths = STRENGTHS if strength is None else (strength,)
    plain = [model.field(f, False) for f in range(len(model.fields))]
    losses = [held_out_nll(field, frames, strengths) for field in plain]
    common = min(strengths, key=lambda s: sum(float(loss[s].sum()) for loss in losses))
    without = Choice(common, False, 0.0, 0.0)
    if kind == "score":
        return [without for _ in plain]
    choices = []
    for f, field in enumerate(plain):
        if is_heavy_tailed(held_out_squares(field, frames, common)):
            choices.append(without)
        else:
            with_variances = model.field(f, True)
            choices.append(_choose_field(with_variances, losses[f][common], frames, strengths))
    return [c if c.with_variances else replace(c, strength=common) for c in choices]


def _choose_field(
    field: FieldModel, plain_loss: Array, frames: Array, strengths: tuple[float, ...]
) -> Choice:
    losses = held_out_nll(field, frames, strengths)
    strength = min(strengths, key=lambda s: float(losses[s].sum()))
    gain = np.bincount(frames, plain_loss - losses[strength])  # per frame
    error = float(gain.std(ddof=1) * np.sqrt(len(gain))) if len(gain) > 1 else float("inf")
    # a few frames can make the mean gain, so most frames must gain as well
    wins = int((gain > 0).sum()) - int((gain < 0).sum())
    used = bool(gain.sum() > MIN_GAIN * error and wins > MIN_GAIN * np.sqrt(len(gain)))
    boxes = max(int((~np.isnan(field.errors)).sum()), 1)
    return Choice(strength, used, float(gain.sum()) / boxes, error / boxes)


def is_heavy_tailed(squares: Array) -> bool:
    """Return whether the largest 1 % of the squared errors (n,) make up most of their sum.

    >>> rng = np.random.default_rng(0)
    >>> is_heavy_tailed(rng.normal(size=2000) ** 2)
    False
    >>> is_heavy_tailed(rng.standard_cauchy(size=2000) ** 2)
    True
    """
    largest = np.sort(squares)[::-1][: -(-len(squares) // 100)]
    return bool(len(squares) >= 100 and largest.sum() > HEAVY_TAIL * squares.sum())


def held_out_nll(
    field: FieldModel, frames: Array, strengths: tuple[float, ...]
) -> dict[float, Array]:
    """Return, per strength, the NLL (n,) of each error by a fit to other frames."""
    nll = {strength: np.zeros(len(frames)) for strength in strengths}
    for train, test in _folds(frames):
        theta = None
        for strength in strengths:  # strongest first: each optimum starts the next fit
            theta = field[train].fit(strength, theta)
            nll[strength][test] = field[test].clip_to(field[train]).nll(theta)
    return nll


def held_out_squares(field: FieldModel, frames: Array, strength: float) -> Array:
    """Return the squared errors over their variances (n,) by a fit to other frames."""
    squares = np.zeros(len(frames))
    for train, test in _folds(frames):
        theta = field[train].fit(strength)
        rest = field[test].clip_to(field[train])
        squares[test] = np.nan_to_num(rest.errors) ** 2 / rest.variances(theta)
    return squares


def _folds(frames: Array) -> list[tuple[Array, Array]]:
    """Return masks of training and test boxes per fold of frames; none for a single frame."""
    count = int(frames.max()) + 1
    folds = min(_FOLDS, count)
    fold = np.random.default_rng(0).permutation(count)[frames] % folds
    return [(fold != k, fold == k) for k in range(folds)] if folds > 1 else []


def _fit_fields(model: VarianceModel, choices: Sequence[Choice]) -> Array:
    """Return theta (D, p)."""
    fits = [model.field(f, c.with_variances).fit(c.strength) for f, c in enumerate(choices)]
    return np.stack(fits)


def _calibration(model: VarianceModel, theta: Array, kind: Kind, estimator: str) -> Calibration:
    first = 1 + len(model.classes)
    log_residual = theta[:, :1].T + theta[:, 1:first].T  # (C, D)
    return Calibration(
        kind=kind,
        fields=model.fields,
        classes=model.classes,
        estimator=estimator,
        log_residual=_tuples(log_residual),
        features=model.features,
        slopes=_tuples(theta[:, first:]),
        centre=_tuples(model.centre),
        spread=_tuples(model.spread),
        limits=_tuples(model.limits),
        floor=_tuples(model.floor),
    )


def _predict_held_out(
    paired: Records,
    model: VarianceModel,
    frames: Array,
    choices: Sequence[Choice],
    found: Calibration,
) -> Records:
    """Fill ``predictive`` by fits to other frames, or by ``found`` if there are too few frames."""
    if int(frames.max()) + 1 < _FOLDS:
        return apply_calibration(paired, found)
    D = len(paired.fields)
    predictive = np.empty((len(paired), D, D))
    for train, test in _folds(frames):
        theta = _fit_fields(model[train], choices)
        other = _calibration(model, theta, found.kind, found.estimator)
        predictive[test] = apply_calibration(paired[test], other).predictive
    return replace(paired, predictive=predictive)


def _predictive_fit(records: Records) -> Any:
    return gaussian_fit(records.errors, np.asarray(records.predictive, dtype=float)).known


def _covariance(records: Records) -> Array:
    if records.covariance is None:
        raise BoxcovError(
            "these records have no covariance to calibrate: "
            "predict with ExactGLM, MCGLM, GLM or MCI"
        )
    return records.covariance


def _usable_records(records: Records) -> Records:
    """Return the boxes with an object, checked: finite, and every field's error known somewhere."""
    paired = records[records.paired]
    if not len(paired):
        raise BoxcovError(
            f"none of {len(records)} boxes is paired with an object: there is nothing to fit"
        )
    if not np.isfinite(_covariance(paired)).all() or not np.isfinite(paired.boxes).all():
        raise BoxcovError("some boxes or covariances are not finite: remove those rows")
    unknown = [
        name for name, column in zip(paired.fields, paired.errors.T) if np.isnan(column).all()
    ]
    if unknown:
        raise BoxcovError(
            f"the error of {', '.join(unknown)} is unknown for every box: "
            "calibrate on data whose objects have these fields"
        )
    return paired


def _tuples(values: Array) -> Any:
    return tuple(_tuples(row) for row in values) if values.ndim > 1 else tuple(values.tolist())
