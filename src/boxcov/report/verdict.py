"""The numbers of a report's first screen, and what they say in two sentences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import degrees, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcov.box_layout import IMAGE
from boxcov.errors import counted
from boxcov.evaluate.covariance_metrics import (
    LEVELS,
    calibration_error,
    coverage,
    gaussian_fit,
)
from boxcov.evaluate.quality import auroc
from boxcov.evaluate.records import Records
from boxcov.evaluate.summary import region_shares
from boxcov.report.study import Method, Study

Array = NDArray[Any]
LEVEL = 0.9  # of the regions that are shown
_TOLERANCE = 0.03  # a coverage this near to its level keeps the promise
_FEW = 30  # boxes with an object


@dataclass(frozen=True)
class Headline:
    """How good the numbers of a method are: its risk, or its u if it is uncalibrated."""

    boxes: int
    paired: int  # boxes with an object: those whose errors are known
    bad: float  # share of bad boxes
    risk: float  # mean risk: the share that is predicted; NaN if uncalibrated
    auroc: float  # of risk or u, for bad boxes
    baseline: float  # AUROC of 1 - score
    ece: float  # calibration error of the risk; NaN if uncalibrated
    inside: Mapping[float, float]  # share of the errors inside the regions (or ellipsoids) by level

    @property
    def is_calibrated(self) -> bool:
        return not np.isnan(self.risk)


def headline(records: Records) -> Headline:
    """Return the numbers of one method."""
    risk, bad = records.risk, records.bad
    return Headline(
        boxes=len(records),
        paired=int(records.paired.sum()),
        bad=float(bad.mean()) if len(bad) else float("nan"),
        risk=float("nan") if risk is None or not len(bad) else float(risk.mean()),
        auroc=auroc(bad, records.uncertainty if risk is None else risk),
        baseline=auroc(bad, 1 - records.scores),
        ece=float("nan") if risk is None else calibration_error(risk, bad),
        inside=_inside(records),
    )


def _inside(records: Records) -> dict[float, float]:
    """Return the share of the errors in the regions, or in the ellipsoids without regions."""
    if records.regions is not None:
        return region_shares(records)
    paired = records[records.paired]
    if paired.covariance is None:
        return dict.fromkeys(LEVELS, float("nan"))
    fit = gaussian_fit(paired.errors_under(paired.covariance), paired.covariance)
    return dict(zip(LEVELS, coverage(fit).tolist()))


def first_method(study: Study) -> Method | None:
    """Return the method that the first screen is about: the first with a risk, or the first."""
    methods = [method for method in study.methods if len(method.records)]
    calibrated = (method for method in methods if method.records.risk is not None)
    return next(calibrated, methods[0] if methods else None)


def sentences(numbers: Headline) -> tuple[str, str]:
    """Return what the numbers say: on the ranking, and on the regions."""
    return _ranking(numbers), _coverage(numbers)


def _ranking(numbers: Headline) -> str:
    if np.isnan(numbers.auroc):
        share = "All boxes are bad" if numbers.bad > 0 else "No box is bad"
        return f"{share}: there is no ranking to judge."
    name = "The risk" if numbers.is_calibrated else "The uncertainty u"
    found, score = f"{100 * numbers.auroc:.1f} %", f"{100 * numbers.baseline:.1f} %"
    return f"{name} ranks a bad box above a good one in {found} of all pairs (1 - score: {score})."


def _coverage(numbers: Headline) -> str:
    inside = numbers.inside[LEVEL]
    if not numbers.is_calibrated:
        return "These boxes are uncalibrated: boxcov calibrate adds a risk, and regions that hold."
    if np.isnan(inside):
        return "No box lies on an object of its class: there are no errors to judge the regions by."
    off, chance = abs(inside - LEVEL), 2 * sqrt(LEVEL * (1 - LEVEL) / numbers.paired)
    if off > max(_TOLERANCE, chance):
        side = inside < LEVEL
        judgement = "they are too narrow for these frames" if side else "wider than promised"
    elif off > _TOLERANCE or numbers.paired < _FEW:
        judgement = f"{counted(numbers.paired, 'box')} with an object cannot tell whether they hold"
    else:
        judgement = "as promised"
    return f"The 90 % regions hold {100 * inside:.0f} % of the errors: {judgement}."


def display_unit(field: str) -> tuple[str, float]:
    """Return the unit in which a field is shown, and the factor from the stored value.

    >>> display_unit("yaw")[0], display_unit("vx"), display_unit("x2")
    ('°', ('m/s', 1.0), ('px', 1.0))
    """
    if field == "yaw":
        return "°", degrees(1)
    return {"vx": "m/s", "vy": "m/s"}.get(field, "px" if field in IMAGE else "m"), 1.0
