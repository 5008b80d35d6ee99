"""Fitting a calibration to the errors of held-out boxes: maximum likelihood, classes shrunk to what all have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, get_args
from warnings import warn

import numpy as np
from numpy.typing import NDArray

from boxcov.error_model import product
from boxcov.error_model.likelihood import Loss
from boxcov.error_model.variances import Strength, VarianceModel
from boxcov.errors import BoxcovError, BoxcovWarning
from boxcov.evaluate.covariance_metrics import gaussian_fit
from boxcov.evaluate.records import Records
from boxcov.posterior.calibration import Calibration, Feature, Kind, features_of

Array = NDArray[Any]
_FOLDS = 5
LEVELS = (*(round(0.05 * i, 2) for i in range(1, 20)), 0.975, 0.99)  # of regions


def fit(
    records: Records,
    kind: Kind | None = None,
    *,
    estimator: str,
    loss: Loss = "gaussian",
    strength: float | None = None,
    features: Sequence[Feature] | None = None,
    data: str = "",
) -> Calibration:
    """The calibration of this kind under which the errors of the paired boxes are likeliest.

    kind: "product" unless given; "residual" where that cannot be, as a field's error is known of no box or the loss is robust.
    estimator: what computed the covariances, see ``boxcov.predict.predictor.estimator``.
    loss: "gaussian", or "robust" (Huber's: a wrong pair counts no more than a box at the edge of the right ones), which describes the bulk of
    the boxes and says too little of the rest: see docs/calibration.md for both, measured.
    strength: of the L2 penalty on what a class or a feature changes; by cross-validation over frames unless given. Kind "product" leaves
    the variances out where they gain nothing: see ``boxcov.error_model.product``.
    features: what the residual may depend on beside the class; all that such boxes have (``boxcov.posterior.calibration.features_of``) unless given.
    data: what the frames were, for the record.

    >>> rng = np.random.default_rng(0)
    >>> n = 400
    >>> drawn = Records(
    ...     fields=("x", "y"), classes=("car",), boxes=rng.normal(0, 2.0, (n, 2)), uncertainty=np.ones(n), scores=np.full(n, 0.5),
    ...     labels=np.zeros(n, int), frame=np.arange(n) // 10, truth=np.zeros((n, 2)), iou=np.ones(n), l2=np.zeros(n),
    ...     covariance=np.tile(np.eye(2), (n, 1, 1)),
    ... )
    >>> found = fit(drawn, "scale", estimator="exact")
    >>> round(float(np.exp(found.log_scale[0]))), found.provenance["boxes"], found.provenance["frames"]  # drawn with a variance of 4
    (4, 400, 40)
    """
    kind = _usual(records, loss) if kind is None else kind
    if kind not in get_args(Kind):
        raise BoxcovError(f"no kind of calibration {kind!r}: there are {', '.join(get_args(Kind))}")
    if strength is not None and not 0 < strength < np.inf:
        raise BoxcovError(f"strength must be above 0 and finite, got {strength}")
    if kind == "product" and loss != "gaussian":
        raise BoxcovError(
            f"kind 'product' is fitted field by field, and loss {loss!r} weighs whole boxes: use 'gaussian', or kind 'residual'"
        )
    paired = _paired(records, kind)
    before = gaussian_fit(paired.errors, _covariance(paired)).known.nll
    if kind == "scale" and np.isinf(before).any():
        raise BoxcovError(
            f"kind 'scale': the covariances of {int(np.isinf(before).sum())} of {len(paired)} boxes are singular, and no factor mends that: "
            "use kind 'affine' or 'residual'"
        )
    model = VarianceModel.of(paired, kind, loss, _known(features, records))
    frames = np.unique(paired.frame, return_inverse=True)[1]
    penalty: Strength
    refit: Callable[[VarianceModel], Array]
    if kind in ("score", "product") and loss == "gaussian":
        model, theta, penalty, about, refit = _by_field(model, frames, strength)
    else:
        theta, penalty, about = _at_once(model, frames, strength)
        refit = lambda some: some.fitted(penalty, theta)  # noqa: E731
    provenance = {
        "boxes": len(paired),
        "boxes_by_class": {
            name: int((paired.labels == c).sum()) for c, name in enumerate(records.classes)
        },
        "frames": int(frames.max()) + 1,
        "data": data,
        "loss": loss,
        **about,
        "nll_before": float(before.mean()),
        "nll_after": float(model.local(theta, "gaussian").loss.mean()),
    }
    found = model.calibration(theta, model.covariances(theta, penalty, frames), estimator)
    return replace(
        found,
        provenance=provenance,
        regions=regions(_held_out(paired, found, model, frames, refit)),
    )


def regions(records: Records, levels: Sequence[float] = LEVELS) -> tuple[tuple[float, float], ...]:
    """For shares of the errors, the share of their Gaussians within which they lie, as split conformal prediction counts them.

    A level that so few boxes cannot tell is left out. Where the Gaussians are right, both numbers of a pair are equal.

    >>> rng = np.random.default_rng(0)
    >>> n = 999
    >>> drawn = Records(
    ...     fields=("x",), classes=("car",), boxes=rng.normal(0, 1.0, (n, 1)), uncertainty=np.ones(n), scores=np.full(n, 0.5),
    ...     labels=np.zeros(n, int), frame=np.arange(n), truth=np.zeros((n, 1)), iou=np.ones(n), l2=np.zeros(n),
    ...     covariance=np.ones((n, 1, 1)), predictive=np.ones((n, 1, 1)),
    ... )
    >>> [(level, round(share, 2)) for level, share in regions(drawn, (0.5, 0.95, 0.9999))]
    [(0.5, 0.49), (0.95, 0.94)]
    """
    assert records.predictive is not None
    nearer = np.sort(
        gaussian_fit(records.errors, np.asarray(records.predictive, dtype=float)).known.probability
    )
    ranks = [(level, int(np.ceil((len(nearer) + 1) * level))) for level in levels]
    return tuple((level, float(nearer[rank - 1])) for level, rank in ranks if rank <= len(nearer))


def within(records: Records, calibration: Calibration, level: float) -> float:
    """The share of the errors of ``records`` with ``predictive`` that lie in the regions of a calibration for ``level``."""
    fit = gaussian_fit(records.errors, np.asarray(records.predictive, dtype=float)).known
    radii = {int(d): calibration.radius(level, int(d)) for d in np.unique(fit.dims)}
    return (
        float(np.mean([nees <= radii[int(d)] ** 2 for nees, d in zip(fit.nees, fit.dims)]))
        if len(fit.nees)
        else float("nan")
    )


def calibrated(records: Records, calibration: Calibration) -> Records:
    """The records with ``predictive`` filled.

    >>> twice = Calibration("scale", ("x",), ("car",), "exact", (np.log(2.0),), ((-np.inf,),))
    >>> one = Records(
    ...     fields=("x",), classes=("car",), boxes=np.zeros((1, 1)), uncertainty=np.ones(1), scores=np.ones(1), labels=np.zeros(1, int),
    ...     frame=np.zeros(1, int), truth=np.zeros((1, 1)), iou=np.ones(1), l2=np.zeros(1), covariance=np.ones((1, 1, 1)),
    ... )
    >>> calibrated(one, twice).predictive.tolist()
    [[[2.0]]]
    """
    calibration.check(records.fields, records.classes, "the records")
    covariance = np.asarray(_covariance(records), dtype=float)
    predictive = calibration.predictive(
        covariance, records.boxes.astype(float), records.scores.astype(float), records.labels
    )
    return replace(records, predictive=predictive)


def _at_once(
    model: VarianceModel, frames: Array, strength: float | None
) -> tuple[Array, float, dict[str, Any]]:
    """The optimum of all fields together, its strength, and what there is to say of it."""
    scores = _cross_validated(model, frames) if strength is None else {}
    if strength is None:
        strength = min(scores, key=lambda s: scores[s]) if scores else product.STRENGTHS[2]
    about = {
        "strength": strength,
        "cross_validation": {str(s): value for s, value in scores.items()},
    }
    return model.fitted(strength), strength, about


def _held_out(
    paired: Records,
    found: Calibration,
    model: VarianceModel,
    frames: Array,
    refit: Callable[[VarianceModel], Array],
) -> Records:
    """The records with ``predictive`` filled, each box by a fit to other frames; by the fit itself where there are too few of them."""
    count = int(frames.max()) + 1
    if count < _FOLDS:
        return calibrated(paired, found)
    fold_of = np.random.default_rng(0).permutation(count)[frames] % _FOLDS
    predictive = np.empty((len(paired), len(paired.fields), len(paired.fields)))
    for fold in range(_FOLDS):
        theta = refit(model[fold_of != fold])
        unknown = np.zeros((len(theta), len(theta)))  # nobody asks for its standard errors
        other = model.calibration(theta, (unknown, unknown), found.estimator)
        predictive[fold_of == fold] = calibrated(paired[fold_of == fold], other).predictive
    return replace(paired, predictive=predictive)


def _by_field(
    model: VarianceModel, frames: Array, strength: float | None
) -> tuple[VarianceModel, Array, Array, dict[str, Any], Callable[[VarianceModel], Array]]:
    """The model of what was chosen for each field, its optimum, the strengths (D,), what there is to say of them, and the fit to other boxes."""
    choices = product.chosen(model, frames, strength)
    told, theta, strengths = product.fitted(model, choices)
    about: dict[str, Any] = {"strength": dict(zip(model.fields, strengths.tolist()))}
    if model.kind == "product":
        about["variances"] = {
            name: {"used": c.told, "gain": c.gain, "error": c.error}
            for name, c in zip(model.fields, choices)
        }
    return told, theta, strengths, about, lambda some: product.fitted(some, choices)[1]


def _known(names: Sequence[Feature] | None, records: Records) -> Sequence[Feature] | None:
    there = features_of(records.fields)
    unknown = [name for name in names or () if name not in there]
    if unknown:
        raise BoxcovError(
            f"no feature {', '.join(unknown)}: boxes of {' '.join(records.fields)} have {', '.join(there)}"
        )
    return names


def _covariance(records: Records) -> Array:
    if records.covariance is None:
        raise BoxcovError(
            "these records have no covariance to calibrate: make them with ExactGLM, MCGLM, GLM or MCI"
        )
    return records.covariance


def _usual(records: Records, loss: Loss) -> Kind:
    paired = records[records.paired]
    unknown = len(paired) > 0 and bool(np.isnan(paired.errors).all(0).any())
    return "residual" if unknown or loss != "gaussian" else "product"


def _paired(records: Records, kind: Kind) -> Records:
    """The boxes with an object, of which something is known in every field; a word about fields that nothing is known of."""
    paired = records[records.paired]
    if not len(paired):
        raise BoxcovError(
            f"none of {len(records)} boxes was paired with an object: there is nothing to calibrate on"
        )
    if not np.isfinite(_covariance(paired)).all() or not np.isfinite(paired.boxes).all():
        raise BoxcovError("some boxes or covariances are not finite: leave those rows out")
    unknown = [
        name for name, column in zip(paired.fields, paired.errors.T) if np.isnan(column).all()
    ]
    if unknown and kind in ("score", "product"):
        raise BoxcovError(
            f"the error of {', '.join(unknown)} is known of no box, and kind {kind!r} has nothing else to go by: use 'residual'"
        )
    if unknown and kind != "scale":
        warn(
            f"the error of {', '.join(unknown)} is known of no box: their variance will be the scaled epistemic one",
            BoxcovWarning,
            3,
        )
    return paired


def _cross_validated(model: VarianceModel, frames: Array) -> dict[float, float]:
    """The mean loss of boxes of frames that the fit has not seen, by strength; nothing where there is but one frame."""
    count = int(frames.max()) + 1
    folds = min(_FOLDS, count)
    if folds < 2:
        return {}
    totals = dict.fromkeys(product.STRENGTHS, 0.0)
    fold_of = np.random.default_rng(0).permutation(count)[frames] % folds
    for fold in range(folds):
        seen, unseen, theta = model[fold_of != fold], model[fold_of == fold], None
        for (
            strength
        ) in product.STRENGTHS:  # from the stiffest: each optimum is a good start for the next
            theta = seen.fitted(strength, theta)
            totals[strength] += float(unseen.beside(seen).local(theta, model.loss).loss.sum())
    return {strength: total / len(model.errors) for strength, total in totals.items()}
