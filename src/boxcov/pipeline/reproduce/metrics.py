"""The metrics of the paper's tables, with their chance levels."""

from __future__ import annotations

from typing import Any

from boxcov.errors import import_package
from boxcov.evaluate.intervals import partition_chance
from boxcov.evaluate.quality import METRICS, accurate_iou, accurate_l2, auroc, partitions
from boxcov.evaluate.records import Records


def measure(records: Records) -> dict[str, dict[str, dict[str, float]]]:
    """Return value and chance level by error ("IoU", "l2") and metric.

    The paper's metrics, AUROC, and the shares P(U) and P(A) of uncertain and accurate boxes.
    """
    out = {}
    for error, partition in partitions(records.iou, records.l2, records.uncertainty).items():
        levels, values = partition_chance(partition), partition.metrics()
        found = {name: {"value": values[name], "chance": levels[name].mean} for name in METRICS}
        found["AUROC"] = {"value": auroc(*_inaccurate(records, error)), "chance": 0.5}
        out[error] = {**found, **{name: {"value": values[name]} for name in ("P(U)", "P(A)")}}
    return out


def _inaccurate(records: Records, error: str) -> tuple[Any, Any]:
    """Return which predictions are inaccurate, and their u."""
    if error == "IoU":
        return ~accurate_iou(records.iou), records.uncertainty
    return ~accurate_l2(records.l2[records.paired]), records.uncertainty[records.paired]


def spearman(a: Any, b: Any) -> float:
    """Return the rank correlation of two arrays (n,)."""
    return float(import_package("scipy.stats").spearmanr(a, b).statistic)
