"""The table of all methods: each with its metrics, its chance level and its baselines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from boxcov.evaluate.baselines import (
    covariance_features,
    one_minus_score,
    score_and_size,
    signal_features,
    signals_alone,
)
from boxcov.evaluate.covariance_metrics import LEVELS
from boxcov.evaluate.quality import ERRORS, METRICS
from boxcov.evaluate.records import Records
from boxcov.evaluate.summary import RANKINGS, compare, summarise

SIZE, SIGNALS = "score + size", "score + size + signals"
# of the epistemic covariance, as a Gaussian, and of the error model, in the same order
COVARIANCE_METRICS = ("NLL", "ENCE", *(f"coverage {level:.0%}" for level in LEVELS), "ANEES")
ERROR_MODEL_METRICS = (
    "NLL Student-t",
    "ENCE predictive",
    *(f"coverage {level:.0%} regions" for level in LEVELS),
    "ANEES predictive",
)
ERROR_DISTRIBUTIONS = {
    "epistemic, Gaussian": COVARIANCE_METRICS,
    "error model, Student-t": ERROR_MODEL_METRICS,
}
MEASURE_COLUMNS = tuple(f"{name} {error}" for name in METRICS + RANKINGS for error in ERRORS)
COLUMNS = MEASURE_COLUMNS + COVARIANCE_METRICS + ERROR_MODEL_METRICS


def table(
    methods: Mapping[str, Records], replicates: int = 200, seed: int = 0
) -> list[dict[str, Any]]:
    """Return one row per method and baseline, each followed by its chance level (u shuffled).

    A row has ``method`` (its name), ``kind`` ("method", "baseline", "combined", "chance" or
    "difference"), ``boxes``, ``paired``, and per column of ``COLUMNS`` a dict of value, low and
    high, or None. Baselines are 1 - score, the cross-validated score + size and, if the detector
    has signals, these alone and with score + size, once per distinct set of boxes. "combined" adds
    a method's log variances to score + size and to score + size + signals; "difference" is combined
    minus that baseline, with the interval of the difference.

    >>> from boxcov.evaluate.matching import match
    >>> box, zero = np.array([[0.0, 0.0, 4.0, 4.0]]), np.zeros(1, int)
    >>> fields, scores = ("x1", "y1", "x2", "y2"), np.array([0.9])
    >>> found = match(box, scores, zero, zero, box, zero, zero, fields, ("car",), np.ones(1))
    >>> [row["method"] for row in table({"exact": found}, replicates=2) if row["kind"] != "chance"]
    ['exact', '1 - score', 'score + size']
    """
    entries, combined = _table_entries(methods, seed)
    rows = []
    for name, kind, records in entries:
        summary = summarise(records, replicates, seed)
        rows.append({"method": name, "kind": kind, **_row(summary, "value", "low", "high")})
        rows[-1] |= _covariance_cells(summary)
        chance = _row(summary, "chance", "chance_low", "chance_high")
        rows.append({"method": f"{name}, shuffled", "kind": "chance", **chance})
    for name, of, records, baseline in combined:
        cells = _measure_cells(compare(records, baseline, replicates, seed))
        rows.append(
            {
                "method": f"{name}, minus {of}",
                "kind": "difference",
                "boxes": len(records),
                "paired": int(records.paired.sum()),
                **dict.fromkeys(COLUMNS),
                **cells,
            }
        )
    return rows


def _table_entries(
    methods: Mapping[str, Records], seed: int
) -> tuple[list[tuple[str, str, Records]], list[tuple[str, str, Records, Records]]]:
    """Return (name, kind, records) per row, and per difference the names and records of both."""
    entries = [(name, "method", records) for name, records in methods.items()]
    baselines: list[tuple[Records, dict[str, Records]]] = []  # records, and their baselines
    combined = []
    for name, records in methods.items():
        known = next((base for other, base in baselines if _same_boxes(records, other)), None)
        if known is None:
            suffix = f" ({name})" if baselines else ""
            known = _baselines(records, seed)
            baselines.append((records, known))
            entries += [(f"{base}{suffix}", "baseline", rows) for base, rows in known.items()]
        suffix = f" ({name})" if len(methods) > 1 else ""
        combined += [
            (f"{base} + covariance{suffix}", base, rows, known[base])
            for base, rows in _with_covariance(records, seed).items()
            if base in known
        ]
    entries += [(name, "combined", records) for name, _, records, _ in combined]
    return entries, combined


def _baselines(records: Records, seed: int) -> dict[str, Records]:
    """Return the baselines of a set of boxes by name."""
    found = {"1 - score": one_minus_score(records), SIZE: score_and_size(records, seed=seed)}
    if records.signals is not None:
        found["signals"] = signals_alone(records, seed=seed)
        found[SIGNALS] = score_and_size(records, signal_features(records), seed=seed)
    return found


def _with_covariance(records: Records, seed: int) -> dict[str, Records]:
    """Return baselines with the log variances of a method as further columns, by name."""
    if records.covariance is None:
        return {}
    columns = covariance_features(records)
    found = {SIZE: score_and_size(records, columns, seed=seed)}
    if records.signals is not None:
        columns = np.concatenate([columns, signal_features(records)], 1)
        found[SIGNALS] = score_and_size(records, columns, seed=seed)
    return found


def _row(summary: dict[str, Any], value: str, low: str, high: str) -> dict[str, Any]:
    """Return the counts and the cells of one row, under the given keys of the summary's cells."""
    measures = {**summary["quality"], "AUROC": summary["AUROC"], "AUSE": summary["AUSE"]}
    cells = {
        column: {"value": cell[value], "low": cell[low], "high": cell[high]}
        for column, cell in _measure_cells(measures).items()
    }
    counts = {"boxes": summary["boxes"], "paired": summary["paired"]}
    return {**counts, **dict.fromkeys(COLUMNS), **cells}


def _measure_cells(measures: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        f"{name} {error}": cell
        for name in METRICS + RANKINGS
        for error, cell in measures[name].items()
    }


def _covariance_cells(summary: dict[str, Any]) -> dict[str, Any]:
    epistemic, predictive, regions = map(summary.get, ("covariance", "predictive", "regions"))
    values: dict[str, Any] = {}
    if epistemic is not None:
        inside = [epistemic["coverage"][str(level)] for level in LEVELS]
        numbers = (epistemic["NLL"], epistemic["ENCE"], *inside, epistemic["ANEES"])
        values |= dict(zip(COVARIANCE_METRICS, numbers))
    if predictive is not None:
        values["NLL Student-t"] = predictive["NLL"]
        values |= {f"{name} predictive": predictive[name] for name in ("ENCE", "ANEES")}
    for level, share in (regions or {}).items():
        values[f"coverage {float(level):.0%} regions"] = share
    return {name: {"value": value, "low": None, "high": None} for name, value in values.items()}


def _same_boxes(a: Records, b: Records) -> bool:
    return all(
        np.array_equal(getattr(a, name), getattr(b, name))
        for name in ("boxes", "scores", "labels", "frame", "iou")
    )
