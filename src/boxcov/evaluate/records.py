"""Records: one row per prediction over all frames, with its paired object."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import pi
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from boxcov.box_layout import IMAGE, clipped_sides, columns
from boxcov.errors import counted

Array = NDArray[Any]
_NEAR_BORDER = 1.0  # pixels: an object that ends nearer to the border reaches it


@dataclass(frozen=True)
class Records:
    """n predictions of one method: parallel arrays that slice as a whole.

    >>> n, zero = np.ones(2), np.zeros(2, int)
    >>> boxes, truth = np.array([[1.0, 3.1], [5.0, 0.0]]), np.array([[1.5, -3.1], [np.nan, np.nan]])
    >>> records = Records(
    ...     fields=("x", "yaw"), classes=("car",), boxes=boxes, uncertainty=n, scores=n,
    ...     labels=zero, frame=zero, truth=truth, iou=np.array([0.7, 0.0]),
    ...     l2=np.array([0.5, np.nan]),
    ... )
    >>> records
    Records(2 predictions in 1 frame, 1 paired; fields x yaw; 1 class; without covariance)
    >>> records[records.paired].errors.round(3).tolist()
    [[-0.5, -0.083]]
    """

    fields: tuple[str, ...]  # D names
    classes: tuple[str, ...]
    boxes: Array  # (n, D)
    uncertainty: Array  # (n,) the paper's u: trace of the covariance, or the value of a baseline
    scores: Array  # (n,)
    labels: Array  # (n,) index into classes
    frame: Array  # (n,) frame number
    truth: Array  # (n, D) the paired object, NaN without one
    iou: Array  # (n,) IoU with the paired object, 0 without one
    l2: Array  # (n,) distance between the centres, NaN without an object
    covariance: Array | None = None  # (n, D, D) epistemic
    predictive: Array | None = None  # (n, D, D) calibrated: covariance of the error
    score_variance: Array | None = None  # (n,) variance of the score logit
    signals: Array | None = None  # (n, S) free numbers of the detector, see Detector.signals
    risk: Array | None = None  # (n,) calibrated: P(the box is bad)
    regions: Array | None = None  # (n, 3, D) calibrated: half widths of 50, 90 and 95 %; yaw: axis
    scale: Array | None = None  # (n, D) calibrated: Student-t scale of the error; yaw: axis
    dof: tuple[float, ...] | None = None  # (D,) calibrated: degrees of freedom of the Student-t
    bad_below: float = 0.4  # a box is bad if its IoU is lower; risk is the probability of that
    pair: Array | None = None  # (n,) number of the paired object in the ground truth, -1 for none

    def __repr__(self) -> str:
        frames = counted(len(np.unique(self.frame)), "frame")
        classes = counted(len(self.classes), "class")
        return (
            f"Records({counted(len(self), 'prediction')} in {frames}, "
            f"{int(self.paired.sum())} paired; fields {' '.join(self.fields)}; {classes}; "
            f"{'without' if self.covariance is None else 'with'} covariance)"
        )

    def __len__(self) -> int:
        return len(self.scores)

    def __getitem__(self, rows: Any) -> Records:
        """Return some rows, by mask, slice or indices."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        arrays = {name: v for name, v in values.items() if isinstance(v, np.ndarray)}
        return replace(self, **{name: array[rows] for name, array in arrays.items()})

    @property
    def paired(self) -> Array:
        """Which rows (n,) have an object."""
        return ~np.isnan(self.l2)

    @property
    def bad(self) -> Array:
        """Which rows (n,) have no object, or a lower IoU than ``bad_below``."""
        return np.asarray(self.iou) < self.bad_below

    @property
    def errors(self) -> Array:
        """Prediction minus object (n, D), with angles wrapped to half a turn.

        NaN where there is no object, its field is unknown, or the error is censored: the side is
        clipped at the image border, and the object reaches that border.
        """
        difference = self.boxes - self.truth
        if "yaw" in self.fields:
            yaw = self.fields.index("yaw")
            difference[:, yaw] = (difference[:, yaw] + pi) % (2 * pi) - pi
        outward = np.array([1.0 if name in IMAGE[:2] else -1.0 for name in self.fields])
        difference[self.clipped & (outward * difference >= -_NEAR_BORDER)] = np.nan
        return difference

    @property
    def clipped(self) -> Array:
        """Which numbers (n, D) are sides that the detector clipped at the image border."""
        if self.covariance is None:
            return np.zeros(self.boxes.shape, dtype=bool)
        variances = np.diagonal(self.covariance, axis1=1, axis2=2)
        found = clipped_sides(self.fields, torch.tensor(self.boxes), torch.tensor(variances))
        return found.numpy()

    def errors_under(self, covariance: Array) -> Array:
        """Return the errors (n, D) that a covariance (n, D, D) describes; others are NaN.

        The epistemic covariance does not describe clipped sides: its variance there is 0.
        """
        variances = np.diagonal(covariance, axis1=1, axis2=2)
        return np.where(self.clipped & (variances == 0), np.nan, self.errors)

    @property
    def range(self) -> Array:
        """Distance (n,) of each box centre from the sensor in the plane."""
        return np.linalg.norm(self.boxes[:, columns(self.fields, ("x", "y"))], axis=1)

    def as_axes(self) -> Records:
        """Return the records with objects turned by pi where that is nearer to the prediction.

        The error of yaw is then that of the box's axis, at most a quarter turn. Whether front and
        back are swapped is a yes-or-no question that no variance describes.

        >>> one, zero = np.ones(1), np.zeros(1, int)
        >>> records = Records(
        ...     ("x", "yaw"), ("car",), np.array([[0.0, 3.0]]), one, one, zero, zero,
        ...     truth=np.array([[0.0, 0.1]]), iou=one, l2=one,
        ... )
        >>> records.errors.round(3).tolist(), records.as_axes().errors.round(3).tolist()
        ([[0.0, 2.9]], [[0.0, -0.242]])
        """
        if "yaw" not in self.fields:
            return self
        yaw, truth = self.fields.index("yaw"), np.array(self.truth, dtype=float)
        truth[np.abs(self.errors[:, yaw]) > pi / 2, yaw] += pi
        return replace(self, truth=truth)

    def with_uncertainty(self, uncertainty: Array) -> Records:
        """Return the same predictions with another u (n,)."""
        return replace(self, uncertainty=uncertainty)

    def without_covariance(self, uncertainty: Array) -> Records:
        """Return the same predictions with the u (n,) of a baseline that has no covariance."""
        names = ("covariance", "predictive", "score_variance", "signals")
        bare: dict[str, Any] = dict.fromkeys((*names, "risk", "regions", "scale", "dof"))
        return replace(self, uncertainty=uncertainty, **bare)
