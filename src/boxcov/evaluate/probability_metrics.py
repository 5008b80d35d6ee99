"""Metrics of probabilities and regions: are they right as often as they say?"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcov.evaluate.intervals import bootstrap
from boxcov.evaluate.quality import auroc_from_ranks, ranks

Array = NDArray[Any]


def calibration_error(probability: Array, happened: Array, bins: int = 15) -> float:
    """Return the expected calibration error (ECE) over bins with equal numbers of boxes.

    >>> calibration_error(np.array([0.1, 0.1, 0.9, 0.9]), np.array([0, 0, 1, 1]), bins=2)
    0.1
    """
    order = np.argsort(probability, kind="stable")
    parts = [part for part in np.array_split(order, bins) if len(part)]
    gaps = [len(part) * abs(probability[part].mean() - happened[part].mean()) for part in parts]
    return round(float(sum(gaps) / len(probability)), 12)


def probability_metrics(
    probability: Array, happened: Array, baseline: Array, frame: Array
) -> dict[str, float]:
    """Return share, AUROC and ECE of a probability (n,), and the AUROC of a baseline (n,).

    "low" and "high" are the 95 % interval, over frames, of the difference of the two AUROCs.

    >>> p, bad = np.array([0.8, 0.1, 0.7, 0.2]), np.array([True, False, True, False])
    >>> found = probability_metrics(p, bad, np.full(4, 0.5), np.array([0, 0, 1, 1]))
    >>> found["AUROC"], found["baseline"], found["low"]
    (1.0, 0.5, 0.5)
    """
    own, other = ranks(probability), ranks(baseline)

    def gain(rows: Array) -> float:
        bad = happened[rows]
        return auroc_from_ranks(bad, own[rows]) - auroc_from_ranks(bad, other[rows])

    low, high = bootstrap(gain, frame)
    return {
        "share": float(np.mean(happened)),
        "AUROC": auroc_from_ranks(happened, own),
        "baseline": auroc_from_ranks(happened, other),
        "low": float(low),
        "high": float(high),
        "ECE": calibration_error(probability, happened),
    }


def region_coverage(errors: Array, widths: Array) -> float:
    """Return the share of the errors (n, D) within half widths (n, D); unknown errors are NaN.

    >>> region_coverage(np.array([[0.5, -3.0], [np.nan, 1.0]]), np.full((2, 2), 1.0))
    0.6666666666666666
    """
    known = ~np.isnan(errors)
    return float((np.abs(errors) <= widths)[known].mean()) if known.any() else float("nan")
