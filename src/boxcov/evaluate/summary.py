"""All metrics of methods, as plain dicts for tables, JSON and the report.

``summarise`` is for one method; ``table`` has a row for each, its chance level and baselines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcov._files.output_file import without_nan
from boxcov.evaluate.baselines import (
    covariance_features,
    one_minus_score,
    score_and_size,
    signal_features,
    signals_alone,
)
from boxcov.evaluate.covariance_metrics import (
    LEVELS,
    covariance_metrics,
    region_coverage,
    student_nll,
)
from boxcov.evaluate.intervals import bootstrap, partition_chance, shuffle_chance
from boxcov.evaluate.quality import (
    ERRORS,
    METRICS,
    SHARES,
    accurate_iou,
    accurate_l2,
    auroc_from_ranks,
    ause_from_ranks,
    partitions,
    quality,
    ranks,
)
from boxcov.evaluate.records import Records

Array = NDArray[Any]
RANKINGS = ("AUROC", "AUSE")
MEASURES = METRICS + SHARES + RANKINGS  # each for every error
RANGE_EDGES = (0, 15, 30, 50)  # metres
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
_NUMBERS, _CHANCE = ("value", "low", "high"), ("chance", "chance_low", "chance_high")
_CELLS = [(name, error) for name in MEASURES for error in ERRORS]


def summarise(records: Records, replicates: int = 200, seed: int = 0) -> dict[str, Any]:
    """Return counts, all metrics with 95 % intervals and chance levels, and covariance metrics.

    ``summary["quality"]["P(U|I)"]["IoU"]`` holds value, low, high, chance, chance_low and
    chance_high; so do ``["AUROC"]["IoU"]`` and ``["AUSE"]["l2"]``. Intervals are over resampled
    frames; chance is the metric of shuffled u. ``covariance`` is as in ``covariance_metrics``, or
    None. Of the error model, ``predictive`` holds ENCE and ANEES of the covariance and the NLL of
    the Student-t distributions, and ``regions`` the share of errors inside, by level; or None.
    Values that are not finite are None, so all of it is JSON.

    >>> from boxcov.evaluate.matching import match
    >>> boxes, i = np.array([[0.0, 0.0, 4.0, 4.0], [9.0, 9.0, 14.0, 14.0]]), np.arange(2)
    >>> scores, fields = np.array([0.9, 0.3]), ("x1", "y1", "x2", "y2")
    >>> found = match(boxes, scores, 0 * i, i, boxes[:1], [0], [0], fields, ("car",), i + 1)
    >>> summary = summarise(found, replicates=20)
    >>> summary["boxes"], summary["paired"], summary["AUROC"]["IoU"]["value"]
    (2, 1, 1.0)
    """
    cells = _with_intervals(_statistics(records), (records,), replicates, seed)
    chances = _chances(records, replicates, seed)
    inside = {} if records.regions is None else region_shares(records)
    for name, error in _CELLS:  # P(U) and P(A) have no chance level
        chance = chances.get((name, error), 3 * [None])
        cells[name][error] |= dict(zip(_CHANCE, chance))
    return without_nan(
        {
            "boxes": len(records),
            "paired": int(records.paired.sum()),
            "quality": {name: cells[name] for name in METRICS + SHARES},
            "AUROC": cells["AUROC"],
            "AUSE": cells["AUSE"],
            "covariance": _covariance_metrics(records, records.covariance),
            "predictive": _predictive_metrics(records.as_axes()),
            "regions": {str(level): share for level, share in inside.items()} or None,
        }
    )


def class_groups(records: Records) -> dict[str, Array]:
    """Return the numbers of the rows of each class that occurs."""
    labels = np.asarray(records.labels, dtype=int)
    return {records.classes[c]: np.flatnonzero(labels == c) for c in np.unique(labels)}


def range_groups(records: Records) -> dict[str, Array]:
    """Return the numbers of the rows between ``RANGE_EDGES`` from the sensor, and beyond."""
    distance = records.range
    groups = {
        f"{low:g} to {high:g} m": np.flatnonzero((distance >= low) & (distance < high))
        for low, high in pairwise(RANGE_EDGES)
    }
    last = RANGE_EDGES[-1]
    return {**groups, f"{last:g} m and more": np.flatnonzero(distance >= last)}


def compare(
    a: Records, b: Records, replicates: int = 200, seed: int = 0
) -> dict[str, dict[str, Any]]:
    """Return value, low and high of ``a`` minus ``b`` on the same frames, per metric and error.

    Each replicate of the intervals draws the same frames for both.

    >>> from boxcov.evaluate.matching import match
    >>> boxes, i = np.array([[0.0, 0.0, 4.0, 4.0], [9.0, 9.0, 14.0, 14.0]]), np.arange(2)
    >>> scores, fields = np.array([0.9, 0.3]), ("x1", "y1", "x2", "y2")
    >>> found = match(boxes, scores, 0 * i, i, boxes[:1], [0], [0], fields, ("car",), i + 1)
    >>> other = found.with_uncertainty(-found.uncertainty)
    >>> compare(found, other, replicates=9)["AUROC"]["IoU"]["value"]
    1.0
    """
    of_a, of_b = _statistics(a), _statistics(b)
    cells = _with_intervals(lambda i, j: of_a(i) - of_b(j), (a, b), replicates, seed)
    return without_nan(cells)


def _with_intervals(
    statistic: Callable[..., Array], methods: tuple[Records, ...], replicates: int, seed: int
) -> dict[str, dict[str, Any]]:
    """Return value, low and high of each of ``_CELLS``, a function of rows of each method."""
    values = statistic(*(np.arange(len(records)) for records in methods))
    frames = (records.frame for records in methods)
    low, high = bootstrap(statistic, *frames, replicates=replicates, seed=seed)
    found: dict[str, dict[str, Any]] = {name: {} for name in MEASURES}
    for (name, error), *interval in zip(_CELLS, values.tolist(), low.tolist(), high.tolist()):
        found[name][error] = dict(zip(_NUMBERS, interval))
    return found


def _statistics(records: Records) -> Callable[[Array], Array]:
    """Return a function of row numbers that computes ``_CELLS``; u is ranked once, here."""
    iou, l2, paired = records.iou, records.l2, records.paired
    u = np.asarray(records.uncertainty, dtype=float)
    u_ranks, iou_ranks, l2_ranks = ranks(u), ranks(1 - iou), np.zeros(len(l2), int)
    l2_ranks[paired] = ranks(l2[paired])

    def statistics(rows: Array) -> Array:
        found = quality(iou[rows], l2[rows], u[rows])
        with_object = rows[paired[rows]]
        values = [found[name][error] for name in METRICS + SHARES for error in ERRORS]
        values.append(auroc_from_ranks(~accurate_iou(iou[rows]), u_ranks[rows]))
        values.append(auroc_from_ranks(~accurate_l2(l2[with_object]), u_ranks[with_object]))
        values.append(ause_from_ranks(1 - iou[rows], u_ranks[rows], iou_ranks[rows]))
        values.append(ause_from_ranks(l2[with_object], u_ranks[with_object], l2_ranks[with_object]))
        return np.array(values)

    return statistics


def _chances(records: Records, replicates: int, seed: int) -> dict[tuple[str, str], Any]:
    u_ranks, paired = ranks(records.uncertainty), records.paired
    cases = {
        "IoU": (1 - records.iou, ~accurate_iou(records.iou), u_ranks),
        "l2": (records.l2[paired], ~accurate_l2(records.l2[paired]), u_ranks[paired]),
    }
    found: dict[tuple[str, str], Any] = {}
    for error, part in partitions(records.iou, records.l2, records.uncertainty).items():
        found |= {(name, error): value for name, value in partition_chance(part, seed=seed).items()}
        size, bad, u = cases[error]
        auroc = partial(auroc_from_ranks, bad)
        ause = partial(ause_from_ranks, size, error_ranks=ranks(size))
        found["AUROC", error] = shuffle_chance(auroc, u, replicates, seed)
        found["AUSE", error] = shuffle_chance(ause, u, replicates, seed)
    return found


def _covariance_metrics(records: Records, covariance: Array | None) -> dict[str, Any] | None:
    if covariance is None:
        return None
    paired = records.paired
    errors = records.errors_under(covariance)
    return covariance_metrics(errors[paired], covariance[paired])


def _predictive_metrics(records: Records) -> dict[str, Any] | None:
    """Return what needs no Gaussian: ENCE, ANEES, and the NLL of the Student-t if it is known."""
    found = _covariance_metrics(records, records.predictive)
    if found is None:
        return None
    nll = float("nan")
    if records.scale is not None and records.dof is not None:
        paired = records.paired
        nll = student_nll(records.errors[paired], records.scale[paired], records.dof)
    kept = ("rows", "singular", "ENCE", "ANEES")
    return {**{name: found[name] for name in kept}, "NLL": nll}


def region_shares(records: Records) -> dict[float, float]:
    """Return the share of the errors inside the regions, by level; the yaw is that of the axis."""
    assert records.regions is not None
    errors, widths = records.as_axes().errors[records.paired], records.regions[records.paired]
    return {level: region_coverage(errors, widths[:, i]) for i, level in enumerate(LEVELS)}


# the table of all methods


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
        measures = {**summary["quality"], "AUROC": summary["AUROC"], "AUSE": summary["AUSE"]}
        cells = _cells(measures) | _covariance_cells(summary)
        rows.append(_row(name, kind, records, cells))
        cells = _cells(measures, _CHANCE)
        rows.append(_row(f"{name}, shuffled", "chance", records, cells))
    for name, of, records, baseline in combined:
        cells = _cells(compare(records, baseline, replicates, seed))
        rows.append(_row(f"{name}, minus {of}", "difference", records, cells))
    return rows


def _row(name: str, kind: str, records: Records, cells: dict[str, Any]) -> dict[str, Any]:
    counts = {"boxes": len(records), "paired": int(records.paired.sum())}
    return {"method": name, "kind": kind, **counts, **dict.fromkeys(COLUMNS), **cells}


def _cells(
    measures: Mapping[str, Mapping[str, Any]], keys: Sequence[str] = _NUMBERS
) -> dict[str, Any]:
    """Return the cells of ``MEASURE_COLUMNS``, with the numbers under these keys of a summary."""
    return {
        f"{name} {error}": {number: cell[key] for number, key in zip(_NUMBERS, keys)}
        for name in METRICS + RANKINGS
        for error, cell in measures[name].items()
    }


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
    extra = {SIZE: covariance_features(records)}
    if records.signals is not None:
        extra[SIGNALS] = np.concatenate([extra[SIZE], signal_features(records)], 1)
    return {name: score_and_size(records, columns, seed=seed) for name, columns in extra.items()}


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
