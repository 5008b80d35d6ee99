"""From the files of a run to the figures of a row."""

from __future__ import annotations

from typing import Any

import numpy as np

from boxcov.detections import Detections
from boxcov.evaluate.quality import METRICS, accurate_iou, accurate_l2, partitions
from boxcov.evaluate.ranking import auroc
from boxcov.evaluate.records import Records
from boxcov.evaluate.resampling import partition_chance
from boxcov.pipeline.records import records_of
from boxcov.pipeline.reproduce.runs import Workshop
from boxcov.pipeline.reproduce.setting import Run


def refused(workshop: Workshop, run: Run) -> str | None:
    """Why a run gave no covariances, where it did not."""
    meta = Detections.load(workshop.path(run)).meta
    return str(meta["refused"]) if "refused" in meta else None


def records(workshop: Workshop, run: Run) -> Records:
    """The predictions of a run with the objects of its frames, from their files alone."""
    return records_of(
        Detections.load(workshop.path(run)), workshop.truth(run.on), workshop.setting.threshold
    )


def milliseconds(workshop: Workshop, run: Run) -> list[float]:
    """Of each frame of a run."""
    return warm(Detections.load(workshop.path(run)).meta["ms"])


def warm(times: list[float]) -> list[float]:
    """Without the first, in which things are done once.

    >>> warm([9.0, 2.0, 2.1]), warm([9.0])
    ([2.0, 2.1], [9.0])
    """
    return times[1:] or times


def measured(rows: Records) -> dict[str, dict[str, dict[str, float]]]:
    """By error ("IoU", "l2") and metric: the value, what chance gives, and the interval of 95 % of the chances; AUROC, P(U) and P(A) beside.

    >>> two = Records(
    ...     ("x",), ("car",), np.zeros((4, 1)), np.array([1.0, 1.0, 1.0, 5.0]), np.ones(4), np.zeros(4), np.zeros(4), np.zeros((4, 1)),
    ...     iou=np.array([0.9, 0.8, 0.1, 0.0]), l2=np.array([0.1, 0.1, 1.0, np.nan]),
    ... )
    >>> measured(two)["IoU"]["P(U|I)"]["value"], measured(two)["IoU"]["P(U|I)"]["chance"]
    (0.5, 0.25)
    """
    out = {}
    for error, part in partitions(rows.iou, rows.l2, rows.uncertainty).items():
        by_chance, now = partition_chance(part), part.metrics()
        found = {
            name: {
                "value": now[name],
                "chance": by_chance[name].mean,
                "low": by_chance[name].low,
                "high": by_chance[name].high,
            }
            for name in METRICS
        }
        found["AUROC"] = {"value": auroc(*_bad(rows, error)), "chance": 0.5}
        out[error] = {**found, "P(U)": {"value": now["P(U)"]}, "P(A)": {"value": now["P(A)"]}}
    return out


def _bad(rows: Records, error: str) -> tuple[Any, Any]:
    """Which predictions are inaccurate, and their u."""
    if error == "IoU":
        return ~accurate_iou(rows.iou), rows.uncertainty
    return ~accurate_l2(rows.l2[rows.paired]), rows.uncertainty[rows.paired]


def one_minus_score(rows: Records) -> Records:
    """The baseline beside every method: the detector's own doubt."""
    return rows.with_uncertainty(1 - rows.scores)


def spearman(a: Any, b: Any) -> float:
    """The rank correlation of two arrays (n,).

    >>> spearman(np.array([1, 2, 3]), np.array([1, 4, 9]))
    1.0
    """
    ranks = np.stack([np.unique(x, return_inverse=True)[1].astype(float) for x in (a, b)])
    return float(np.corrcoef(ranks)[0, 1])


def known(value: float) -> float | None:
    """None for what has nothing to divide by: P(U|I) where no prediction is inaccurate.

    >>> known(0.5), known(float("nan"))
    (0.5, None)
    """
    return value if value == value else None
