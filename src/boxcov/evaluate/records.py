"""Records: one row a prediction over all frames, with the object it was paired with. What every metric, table and picture is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import pi
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
PERIODS: Mapping[str, float] = {
    "yaw": 2 * pi
}  # fields that wrap around: differences are taken the short way


@dataclass(frozen=True)
class Records:
    """n predictions of one method: parallel arrays that slice as a whole.

    >>> two = Records(
    ...     fields=("x", "yaw"), classes=("car",), boxes=np.array([[1.0, 3.1], [5.0, 0.0]]), uncertainty=np.array([0.1, 0.9]),
    ...     scores=np.array([0.8, 0.3]), labels=np.zeros(2, int), frame=np.zeros(2, int), truth=np.array([[1.5, -3.1], [np.nan, np.nan]]),
    ...     iou=np.array([0.7, 0.0]), l2=np.array([0.5, np.nan]),
    ... )
    >>> two.paired.tolist(), two[two.paired].errors.round(3).tolist()
    ([True, False], [[-0.5, -0.083]])
    """

    fields: tuple[str, ...]  # D names
    classes: tuple[str, ...]
    boxes: Array  # (n, D)
    uncertainty: Array  # (n,) u of the paper: the trace of the covariance, or a baseline's number
    scores: Array  # (n,)
    labels: Array  # (n,) index into classes
    frame: Array  # (n,) which frame
    truth: Array  # (n, D) the paired object; NaN where there is none
    iou: Array  # (n,) with the paired object; 0 where there is none
    l2: Array  # (n,) distance of the centres; NaN where there is no pair
    covariance: Array | None = None  # (n, D, D)
    predictive: Array | None = None  # (n, D, D) calibrated: with what the weights cannot explain
    score_variance: Array | None = None  # (n,) of the logit of the score

    def __len__(self) -> int:
        return len(self.scores)

    def __getitem__(self, rows: Any) -> Records:
        """Some of the rows, by mask, slice or indices."""
        cut = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.name not in ("fields", "classes")
        }
        return replace(
            self, **{name: value[rows] for name, value in cut.items() if value is not None}
        )

    @property
    def paired(self) -> Array:
        """Which rows (n,) have an object."""
        return ~np.isnan(self.l2)

    @property
    def errors(self) -> Array:
        """Prediction minus object (n, D), angles the short way round; NaN where there is no pair, or the object's field is unknown."""
        difference = self.boxes - self.truth
        for name, period in PERIODS.items():
            if name in self.fields:
                column = self.fields.index(name)
                difference[:, column] = (difference[:, column] + period / 2) % period - period / 2
        return difference

    @property
    def range(self) -> Array:
        """Distance of each box's centre from the sensor, in the plane (n,)."""
        columns = [self.fields.index(name) for name in ("x", "y")]
        distance: Array = np.linalg.norm(self.boxes[:, columns], axis=1)
        return distance

    def as_axes(self) -> Records:
        """The same with objects turned by half where that is nearer: errors of the heading are then those of the box's axis, a quarter turn at most.

        Front or back is a question of yes or no, which no variance answers: half turns would drown what is known of the axis.

        >>> one = Records(
        ...     fields=("x", "yaw"), classes=("car",), boxes=np.array([[0.0, 3.0]]), uncertainty=np.ones(1), scores=np.ones(1),
        ...     labels=np.zeros(1, int), frame=np.zeros(1, int), truth=np.array([[0.0, 0.1]]), iou=np.ones(1), l2=np.zeros(1),
        ... )
        >>> one.errors.round(3).tolist(), one.as_axes().errors.round(3).tolist()
        ([[0.0, 2.9]], [[0.0, -0.242]])
        """
        if "yaw" not in self.fields:
            return self
        at = self.fields.index("yaw")
        truth = np.array(self.truth, dtype=float)
        turned = np.abs(self.errors[:, at]) > pi / 2
        truth[turned, at] += pi
        return replace(self, truth=truth)

    def with_uncertainty(self, uncertainty: Array) -> Records:
        """The same predictions with another u (n,)."""
        return replace(self, uncertainty=uncertainty)

    def without_covariance(self, uncertainty: Array) -> Records:
        """The same predictions with the u (n,) of a baseline, which says nothing of a covariance."""
        return replace(
            self, uncertainty=uncertainty, covariance=None, predictive=None, score_variance=None
        )
