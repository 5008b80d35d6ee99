"""What a covariance adds to score and size: log likelihood, AUROC and coverage.

All numbers are for boxes of held-out frames. Used by worth.py and coco_worth.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from boxcov.error_model.fit import (
    apply_calibration,
    choose_fields,
    fit_calibration,
    region_coverage,
)
from boxcov.error_model.variance_model import VarianceModel
from boxcov.posterior.calibration import VARIANCE

from boxcov.evaluate.baselines import logistic, logistic_regression, out_of_fold
from boxcov.evaluate.covariance_metrics import gaussian_fit
from boxcov.evaluate.intervals import bootstrap
from boxcov.evaluate.ranking import auroc
from boxcov.evaluate.records import Records

FOLDS = 5
PENALTIES = (1.0, 10.0, 100.0, 1000.0)
LEVELS = (0.5, 0.9, 0.95)
BASELINES = ("score + size", "score + size, richer")


def folds_of(frame: np.ndarray, folds: int = FOLDS, seed: int = 0) -> np.ndarray:
    """Return the fold of each row (n,); rows of a frame are in the same fold."""
    numbers, place = np.unique(frame, return_inverse=True)
    return np.random.default_rng(seed).permutation(len(numbers))[place] % folds


# likelihood


def nats(records: Mapping[str, Records]) -> dict[str, np.ndarray]:
    """Return the held-out Gaussian NLL (n, D) of every paired box and field.

    Models: the two baselines, and each part's variances added to them. The training frames decide
    the strength of the penalty, and whether a field's model uses the variances.
    """
    first = next(iter(records.values()))
    paired = first[first.paired]
    plain = VarianceModel.from_records(paired, "score")
    out = {
        "score + size": held_out(plain, paired.frame),
        "score + size, richer": held_out(richer(plain), paired.frame),
    }
    for name, rows in records.items():
        model = VarianceModel.from_records(rows[rows.paired], "product")
        out[name] = held_out(model, paired.frame)
        out[f"{name}, richer"] = held_out(richer(model), paired.frame)
    return out


def richer(model: VarianceModel) -> VarianceModel:
    """Return the model with squares and products of all features that are not variances."""
    first = 1 + len(model.classes)
    at = [first + p for p, name in enumerate(model.features) if not name.startswith(VARIANCE)]
    columns = [model.X[:, i] * model.X[:, j] for i in at for j in at if i <= j]
    more = np.stack([(c - c.mean()) / max(c.std(), 1e-6) for c in columns], 1)
    return replace(
        model,
        X=np.concatenate([model.X, more], 1),
        features=(*model.features, *(f"product {i}" for i in range(len(columns)))),
    )


def held_out(model: VarianceModel, frame: np.ndarray) -> np.ndarray:
    """Return the NLL (n, D) of every error by a fit to other frames, NaN where it is unknown."""
    losses = np.full(model.errors.shape, np.nan)
    fold = folds_of(frame)
    kind = "product" if any(name.startswith(VARIANCE) for name in model.features) else "score"
    for k in range(FOLDS):
        train, test = fold != k, fold == k
        frames = np.unique(frame[train], return_inverse=True)[1]
        for f, choice in enumerate(choose_fields(model[train], frames, kind)):
            field = model.field(f, choice.with_variances)
            theta = field[train].fit(choice.strength)
            losses[test, f] = field[test].clip_to(field[train]).nll(theta)
    return np.where(np.isnan(model.errors), np.nan, losses)


def show_nats(found: Mapping[str, np.ndarray], frame: np.ndarray, fields: tuple[str, ...]) -> None:
    """Print the NLL per box and the gains over the baselines, then the gains per field.

    The gains have 95 % intervals over frames.
    """
    print(f"\n{len(frame)} paired boxes, {len(np.unique(frame))} frames\n")
    print("| model | mean NLL | median | gain over score + size | gain over richer |")
    print("| --- | ---: | ---: | ---: | ---: |")
    total = {name: np.nansum(loss, 1) for name, loss in found.items()}
    for name, loss in total.items():
        gains = [
            ("" if base == name else interval_of(total[base] - loss, frame)) for base in BASELINES
        ]
        print(
            f"| {name} | {loss.mean():.3f} | {np.median(loss):.3f} | {' | '.join(gains)} |",
            flush=True,
        )
    print("\n| gain over score + size |", " | ".join(fields), "|\n| --- |", " ---: |" * len(fields))
    for name, loss in found.items():
        if name not in BASELINES[:1]:
            print(
                f"| {name} |",
                " | ".join(f"{v:+.3f}" for v in np.nanmean(found[BASELINES[0]] - loss, 0)),
                "|",
                flush=True,
            )


def interval_of(values: np.ndarray, frame: np.ndarray) -> str:
    low, high = bootstrap(lambda rows: values[rows].mean(), frame)
    return f"{values.mean():+.3f} ({float(low):+.3f} to {float(high):+.3f})"


# coverage


def show_coverage(records: Records, kinds: tuple[str, ...] = ("score", "product")) -> None:
    """Print the shares of errors inside the Gaussian ellipsoids and the conformal regions.

    Each box uses a calibration that was fitted on other frames.
    """
    paired = records[records.paired]
    fold = folds_of(paired.frame)
    print("\n| calibration | regions | 50 % | 90 % | 95 % |\n| --- | --- | ---: | ---: | ---: |")
    for kind in kinds:
        inside = {
            "Gaussian": np.zeros((len(paired), len(LEVELS))),
            "conformal": np.zeros((len(paired), len(LEVELS))),
        }
        for k in range(FOLDS):
            fitted = fit_calibration(paired[fold != k], kind, estimator="any")  # type: ignore[arg-type]
            rows = apply_calibration(paired[fold == k], fitted)
            probability = gaussian_fit(rows.errors, rows.predictive).known.probability
            inside["Gaussian"][fold == k] = probability[:, None] <= LEVELS
            each = [
                [region_coverage(rows[i : i + 1], fitted, level) for level in LEVELS]
                for i in range(len(rows))
            ]
            inside["conformal"][fold == k] = each
        for name, hit in inside.items():
            cells = []
            for column in hit.T:
                low, high = bootstrap(lambda rows, column=column: column[rows].mean(), paired.frame)
                cells.append(
                    f"{100 * column.mean():.1f} ({100 * float(low):.1f} to {100 * float(high):.1f})"
                )
            print(f"| {kind} | {name} |", " | ".join(cells), "|", flush=True)


# ranking


def probability_of_bad(
    columns: np.ndarray, bad: np.ndarray, frame: np.ndarray, seeds: int = 3
) -> np.ndarray:
    """Return the probability (n,) that a box is bad, by logistic regression on other frames.

    Cross-validation inside the training frames chooses the penalty. The result is the mean over
    several random splits into folds.
    """
    out = np.zeros(len(bad))
    for seed in range(seeds):
        fold = folds_of(frame, seed=seed)
        for k in range(FOLDS):
            seen = fold != k
            centre, spread = columns[seen].mean(0), np.maximum(columns[seen].std(0), 1e-9)
            X = (columns - centre) / spread
            inner = {
                p: _log_loss(
                    out_of_fold(X[seen], bad[seen], frame[seen], folds=FOLDS, penalty=p), bad[seen]
                )
                for p in PENALTIES
            }
            weights = logistic_regression(X[seen], bad[seen], min(inner, key=lambda p: inner[p]))
            out[~seen] += logistic(X[~seen] @ weights[1:] + weights[0]) / seeds
    return out


def _log_loss(p: np.ndarray, bad: np.ndarray) -> float:
    return float(-np.log(np.maximum(np.where(bad, p, 1 - p), 1e-300)).mean())


def products(columns: np.ndarray) -> np.ndarray:
    """Return the columns, their squares and their products."""
    centred = columns - columns.mean(0)
    n = columns.shape[1]
    return np.concatenate(
        [columns, *(centred[:, [i]] * centred[:, [j]] for i in range(n) for j in range(i, n))], 1
    )


def show_ranking(
    what: str,
    bad: np.ndarray,
    frame: np.ndarray,
    score: np.ndarray,
    bases: Mapping[str, np.ndarray],
    more: Mapping[str, np.ndarray],
) -> None:
    """Print one table row with the AUROC of finding bad boxes.

    Columns: 1 - score, each base, and the best base with each of ``more`` added, with the gain.
    """
    predicted = {name: probability_of_bad(c, bad, frame) for name, c in bases.items()}
    value = {name: auroc(bad, u) for name, u in predicted.items()}
    best = max(value, key=lambda name: value[name])
    cells = [f"{auroc(bad, 1 - score):.3f}", *(f"{value[name]:.3f}" for name in bases)]
    for columns in more.values():
        u = probability_of_bad(np.concatenate([bases[best], columns], 1), bad, frame)

        def gain(rows: np.ndarray, u: np.ndarray = u) -> float:
            return auroc(bad[rows], u[rows]) - auroc(bad[rows], predicted[best][rows])

        low, high = (float(limit) for limit in bootstrap(gain, frame, replicates=500))
        total = auroc(bad, u)
        cells.append(f"{total:.3f}: {total - value[best]:+.3f} ({low:+.3f} to {high:+.3f})")
    print(f"| {what} | {len(bad)}, {bad.mean():.2f} |", " | ".join(cells), "|", flush=True)


def heading(bases: Mapping[str, Any], more: Mapping[str, Any]) -> None:
    names = ["", "boxes, share of bad boxes", "1 - score", *bases, *(f"+ {name}" for name in more)]
    print("\n|", " | ".join(names), "|\n| --- |", " ---: |" * (len(names) - 1))
