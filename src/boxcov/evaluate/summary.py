"""Everything there is to say of a method's Records, as plain dicts for tables, JSON and the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcov.errors import BoxcovError
from boxcov.evaluate.baselines import covariance_features, one_minus_score, score_and_size
from boxcov.evaluate.bootstrap import bootstrap, paired_difference
from boxcov.evaluate.chance import Chance, chance, shuffled
from boxcov.evaluate.gaussian import LEVELS, gaussian
from boxcov.evaluate.quality import (
    ERRORS,
    METRICS,
    SHARES,
    accurate_iou,
    accurate_l2,
    partitions,
    quality,
)
from boxcov.evaluate.ranking import auroc_of_ranks, ause_of_ranks, ranks
from boxcov.evaluate.records import Records

Array = NDArray[Any]
RANKINGS = ("AUROC", "AUSE")
MEASURES = METRICS + SHARES + RANKINGS  # each for every error
_GAUSSIAN = ("NLL", "ENCE", *(f"coverage {level:.0%}" for level in LEVELS), "ANEES")
COLUMNS = (
    tuple(f"{name} {error}" for name in METRICS + RANKINGS for error in ERRORS)
    + _GAUSSIAN
    + tuple(f"{name} calibrated" for name in _GAUSSIAN)
)


def summarise(records: Records, replicates: int = 200, seed: int = 0) -> dict[str, Any]:
    """Counts, the paper's metrics, AUROC and AUSE with 95 % intervals over frames and with chance, and how well the covariances fit.

    ``summary["quality"]["P(U|I)"]["IoU"]`` has value, low, high, chance, chance_low and chance_high; so have ``["AUROC"]["IoU"]`` and
    ``["AUSE"]["l2"]``. ``covariance`` and ``predictive`` are as in ``gaussian``, or None. All is JSON: what is not a finite number is None.

    >>> from boxcov.evaluate.matching import match
    >>> boxes, number = np.array([[0.0, 0.0, 4.0, 4.0], [9.0, 9.0, 14.0, 14.0]]), np.arange(2)
    >>> found = match(boxes, np.array([0.9, 0.3]), 0 * number, number, boxes[:1], [0], [0], ("x1", "y1", "x2", "y2"), ("car",), number + 1)
    >>> summary = summarise(found, replicates=20)
    >>> summary["boxes"], summary["paired"], summary["AUROC"]["IoU"]["value"], summary["AUROC"]["l2"]["value"]
    (2, 1, 1.0, None)
    """
    now = _statistics(records)
    values = now(np.arange(len(records)))
    low, high = bootstrap(now, records.frame, replicates=replicates, seed=seed)
    by_chance = _chances(records, replicates, seed)
    cells: dict[str, dict[str, Any]] = {name: {} for name in MEASURES}
    for (name, error), *ends in zip(_names(), values, low, high):
        random = by_chance.get((name, error), Chance(*3 * [float("nan")]))
        keys = ("value", "low", "high", "chance", "chance_low", "chance_high")
        cells[name][error] = dict(zip(keys, (*ends, *random)))
    parts = partitions(records.iou, records.l2, records.uncertainty)
    counts = np.bincount(np.asarray(records.labels, dtype=int), minlength=len(records.classes))
    summary = {
        "boxes": len(records),
        "paired": int(records.paired.sum()),
        "frames": len(np.unique(records.frame)),
        "classes": dict(zip(records.classes, counts.tolist())),
        "partition": {error: part._asdict() for error, part in parts.items()},
        "quality": {name: cells[name] for name in METRICS + SHARES},
        "AUROC": cells["AUROC"],
        "AUSE": cells["AUSE"],
        "covariance": _gaussian(records, records.covariance),
        "predictive": _gaussian(records, records.predictive),
    }
    plain: dict[str, Any] = _plain(summary)
    return plain


def by_class(records: Records, replicates: int = 200, seed: int = 0) -> dict[str, dict[str, Any]]:
    """``summarise`` for each class that occurs; means of u and of l2, where a metric has them, are the class's own.

    >>> from boxcov.evaluate.matching import match
    >>> box, one = np.array([[0.0, 0.0, 4.0, 4.0]]), np.ones(1, int)
    >>> found = match(box, np.array([0.9]), one, one, box, one, one, ("x1", "y1", "x2", "y2"), ("car", "bus"), np.ones(1))
    >>> list(by_class(found, replicates=2))
    ['bus']
    """
    groups = {
        name: np.asarray(records.labels) == label for label, name in enumerate(records.classes)
    }
    return _by_group(records, groups, replicates, seed)


def by_range(
    records: Records, edges: Sequence[float] = (0, 15, 30, 50), replicates: int = 200, seed: int = 0
) -> dict[str, dict[str, Any]]:
    """``summarise`` for boxes at distances between ``edges`` from the sensor, in metres, and beyond the last, where there are any.

    >>> from boxcov.evaluate.matching import match
    >>> box, one = np.array([[30.0, 40.0, 2.0, 4.0, 0.0]]), np.zeros(1, int)
    >>> found = match(box, np.array([0.9]), one, one, box, one, one, ("x", "y", "w", "l", "yaw"), ("car",), np.ones(1))
    >>> list(by_range(found, replicates=2))
    ['50 m and more']
    """
    if not {"x", "y"} <= set(records.fields):
        raise BoxcovError(f"boxes of {records.fields} have no range: by_range needs x and y")
    distance = records.range
    groups = {
        f"{low:g} to {high:g} m": (distance >= low) & (distance < high)
        for low, high in pairwise(edges)
    }
    return _by_group(
        records, groups | {f"{edges[-1]:g} m and more": distance >= edges[-1]}, replicates, seed
    )


def compare(
    a: Records, b: Records, replicates: int = 200, seed: int = 0
) -> dict[str, dict[str, Any]]:
    """``a`` minus ``b`` on the same frames, for each metric and error: value, low and high, both drawing the same frames in each replicate.

    >>> from boxcov.evaluate.matching import match
    >>> boxes, number = np.array([[0.0, 0.0, 4.0, 4.0], [9.0, 9.0, 14.0, 14.0]]), np.arange(2)
    >>> found = match(boxes, np.array([0.9, 0.3]), 0 * number, number, boxes[:1], [0], [0], ("x1", "y1", "x2", "y2"), ("car",), number + 1)
    >>> compare(found, found.with_uncertainty(-found.uncertainty), replicates=9)["AUROC"]["IoU"]["value"]
    1.0
    """
    of_a, of_b = _statistics(a), _statistics(b)
    low, high = paired_difference(of_a, a.frame, of_b, b.frame, replicates=replicates, seed=seed)
    values = of_a(np.arange(len(a))) - of_b(np.arange(len(b)))
    found: dict[str, dict[str, Any]] = {name: {} for name in MEASURES}
    for (name, error), *ends in zip(_names(), values, low, high):
        found[name][error] = _plain(dict(zip(("value", "low", "high"), ends)))
    return found


def table(
    methods: Mapping[str, Records], replicates: int = 200, seed: int = 0
) -> list[dict[str, Any]]:
    """One row a method, then the baselines on the same boxes, then these with a covariance; after each its own chance: the same u, shuffled.

    A row has ``method`` (its name), ``kind`` ("method", "baseline", "combined", "chance" or "difference"), ``boxes``, ``paired``, and a cell
    for each of ``COLUMNS``: a dict of value, low and high, or None where there is nothing to say. The baselines are 1 - score and the
    cross-validated score + size, once for each different set of boxes. Combined is the same regression with the log variances of a method as
    columns more; the last rows are its differences from score + size, with intervals of the difference.

    >>> from boxcov.evaluate.matching import match
    >>> box, one = np.array([[0.0, 0.0, 4.0, 4.0]]), np.zeros(1, int)
    >>> found = match(box, np.array([0.9]), one, one, box, one, one, ("x1", "y1", "x2", "y2"), ("car",), np.ones(1))
    >>> [row["method"] for row in table({"exact": found}, replicates=2)]
    ['exact', 'exact, shuffled', '1 - score', '1 - score, shuffled', 'score + size', 'score + size, shuffled']
    """
    entries = [(name, "method", records) for name, records in methods.items()]
    seen: list[tuple[Records, Records]] = []  # those that have baselines, and their score + size
    combined = []
    for name, records in methods.items():
        known = next((baseline for other, baseline in seen if _same_boxes(records, other)), None)
        if known is None:
            of = (
                f" ({name})" if seen else ""
            )  # a method with boxes of its own has baselines of its own
            known = score_and_size(records, seed=seed)
            seen.append((records, known))
            entries.append((f"1 - score{of}", "baseline", one_minus_score(records)))
            entries.append((f"score + size{of}", "baseline", known))
        if records.covariance is not None:
            title = f"score + size + covariance{f' ({name})' if len(methods) > 1 else ''}"
            combined.append(
                (title, score_and_size(records, covariance_features(records), seed=seed), known)
            )
    entries += [(name, "combined", records) for name, records, _ in combined]
    rows = []
    for name, kind, records in entries:
        summary = summarise(records, replicates, seed)
        rows.append({"method": name, "kind": kind, **_row(summary)})
        rows.append(
            {
                "method": f"{name}, shuffled",
                "kind": "chance",
                **_row(summary, "chance", "chance_low", "chance_high", fit=False),
            }
        )
    return rows + [
        _difference(name, records, known, replicates, seed) for name, records, known in combined
    ]


def _difference(
    name: str, records: Records, known: Records, replicates: int, seed: int
) -> dict[str, Any]:
    measures = compare(records, known, replicates, seed)
    cells = {
        f"{measure} {error}": cell
        for measure in METRICS + RANKINGS
        for error, cell in measures[measure].items()
    }
    counts = {"boxes": len(records), "paired": int(records.paired.sum())}
    return {
        "method": f"{name}, minus score + size",
        "kind": "difference",
        **counts,
        **dict.fromkeys(COLUMNS),
        **cells,
    }


def _statistics(records: Records) -> Callable[[Array], Array]:
    """A function of row numbers: the numbers named by ``_names``. Sorting is done once, here, for it is called many times."""
    iou, l2, u, paired = (
        records.iou,
        records.l2,
        np.asarray(records.uncertainty, dtype=float),
        records.paired,
    )
    place, place_iou, place_l2 = ranks(u), ranks(1 - iou), np.zeros(len(l2), int)
    place_l2[paired] = ranks(l2[paired])

    def statistics(rows: Array) -> Array:
        found = quality(iou[rows], l2[rows], u[rows])
        some = rows[paired[rows]]
        values = [found[name][error] for name in METRICS + SHARES for error in ERRORS]
        values.append(auroc_of_ranks(~accurate_iou(iou[rows]), place[rows]))
        values.append(auroc_of_ranks(~accurate_l2(l2[some]), place[some]))
        values.append(ause_of_ranks(1 - iou[rows], place[rows], place_iou[rows]))
        values.append(ause_of_ranks(l2[some], place[some], place_l2[some]))
        return np.array(values)

    return statistics


def _names() -> list[tuple[str, str]]:
    return [(name, error) for name in MEASURES for error in ERRORS]


def _chances(records: Records, replicates: int, seed: int) -> dict[tuple[str, str], Chance]:
    found: dict[tuple[str, str], Chance] = {}
    for error, part in partitions(records.iou, records.l2, records.uncertainty).items():
        found |= {(name, error): value for name, value in chance(part, seed=seed).items()}
    place, paired = ranks(records.uncertainty), records.paired
    wrong = {"IoU": 1 - records.iou, "l2": records.l2[paired]}
    bad = {"IoU": ~accurate_iou(records.iou), "l2": ~accurate_l2(records.l2[paired])}
    for error, u in (("IoU", place), ("l2", place[paired])):
        ause = partial(ause_of_ranks, wrong[error], oracle=ranks(wrong[error]))
        found["AUROC", error] = shuffled(partial(auroc_of_ranks, bad[error]), u, replicates, seed)
        found["AUSE", error] = shuffled(ause, u, replicates, seed)
    return found


def _gaussian(records: Records, covariance: Array | None) -> dict[str, Any] | None:
    if covariance is None:
        return None
    paired = records.paired
    return gaussian(records.errors[paired], covariance[paired], records.fields)


def _by_group(
    records: Records, groups: Mapping[str, Array], replicates: int, seed: int
) -> dict[str, dict[str, Any]]:
    return {
        name: summarise(records[rows], replicates, seed)
        for name, rows in groups.items()
        if rows.any()
    }


def _row(
    summary: dict[str, Any],
    value: str = "value",
    low: str = "low",
    high: str = "high",
    fit: bool = True,
) -> dict[str, Any]:
    """Counts and the cells of one row; of a shuffled u nothing is said of the covariances."""
    row: dict[str, Any] = {
        "boxes": summary["boxes"],
        "paired": summary["paired"],
        **dict.fromkeys(COLUMNS),
    }
    measures = {**summary["quality"], "AUROC": summary["AUROC"], "AUSE": summary["AUSE"]}
    for name in METRICS + RANKINGS:
        for error, cell in measures[name].items():
            row[f"{name} {error}"] = {"value": cell[value], "low": cell[low], "high": cell[high]}
    for part, suffix in (("covariance", ""), ("predictive", " calibrated")):
        found = summary[part]
        if found is None or not fit:
            continue
        values = [
            found["NLL"],
            found["ENCE"],
            *(found["coverage"][str(level)] for level in LEVELS),
            found["ANEES"],
        ]
        row |= {
            name + suffix: {"value": number, "low": None, "high": None}
            for name, number in zip(_GAUSSIAN, values)
        }
    return row


def _same_boxes(a: Records, b: Records) -> bool:
    return all(
        np.array_equal(getattr(a, name), getattr(b, name))
        for name in ("boxes", "scores", "labels", "frame", "iou")
    )


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, (float, np.floating)):
        return float(value) if isfinite(value) else None
    return value
