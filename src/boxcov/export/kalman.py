"""Measurements and their noise R for a tracker's Kalman filter.

The epistemic covariance alone is not R: a measurement also has the noise of the sensor and of the
labels, and the error of a network that is too simple. This residual is part of
``Detections.predictive`` if the model is calibrated, or is passed here as ``residual``.

The variance of yaw is that of the axis. A box whose front and back are swapped, which happens with
the probability ``flipped``, is not covered by R: before the update, turn a measured yaw that lies
more than a quarter turn from the track's by half a turn, or weight both hypotheses by ``flipped``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from boxcov.box_layout import columns
from boxcov.data.poses import Pose, transform_detections
from boxcov.detections import Detections
from boxcov.errors import BoxcovError
from boxcov.result_check import check_result


class Measurements(NamedTuple):
    """Input of a Kalman filter."""

    z: Tensor  # (m, E) in float64
    R: Tensor  # (m, E, E)
    fields: tuple[str, ...]  # E names
    residual: str  # source of the part that is not epistemic: "predictive" or "given"
    # by the error model, for the gate and the birth of tracks; None if uncalibrated
    risk: Tensor | None = None  # (m,) P(the box is bad)
    no_object: Tensor | None = None  # (m,) P(there is no object)
    flipped: Tensor | None = None  # (m,) P(the heading is off by half a turn)


def measurements(
    detections: Detections,
    fields: Sequence[str] | None = None,
    *,
    residual: Mapping[str, float] | Tensor | None = None,
    pose: Pose | None = None,
) -> Measurements:
    """Return boxes as measurements z (m, E) with positive definite noise R (m, E, E), in float64.

    fields: the fields to measure, in the order of the filter; all by default.
    residual: variances to add to the epistemic covariance, by field, or a matrix (D, D) or
        (m, D, D). By default the detections must be calibrated, and R is their ``predictive``.
    pose: move the boxes (``x y z w l h yaw vx vy``) to another frame of reference first.

    Calibrated detections also give ``risk``, ``no_object`` and ``flipped`` (m,) for each
    measurement, for example to start no track from a box that is probably no object.

    >>> frame = label = torch.zeros(1)
    >>> box, C = torch.tensor([[3.0, 4.0]]), torch.eye(2)[None]
    >>> box = Detections(box, torch.ones(1), label, frame, ("x", "y"), ("car",), C)
    >>> measurements(box, ("y", "x"), residual={"x": 0.5, "y": 0.0}).R
    tensor([[[1.0000, 0.0000],
             [0.0000, 1.5000]]], dtype=torch.float64)
    """
    check_result(detections, "these detections cannot be exported")
    noisy, source = _add_residual(detections, residual)
    if pose is not None:
        noisy = transform_detections(noisy, pose)
    assert noisy.predictive is not None
    names = tuple(noisy.fields if fields is None else fields)
    unknown = [name for name in names if name not in noisy.fields]
    if unknown or len(set(names)) < len(names) or not names:
        raise BoxcovError(
            f"cannot measure the fields {', '.join(unknown or names) or '(none)'}: "
            f"the boxes have {', '.join(noisy.fields)}"
        )
    index = columns(noisy.fields, names)
    z = noisy.boxes.detach().double()[:, index]
    R = noisy.predictive.detach().double()[:, index][:, :, index]
    check_known(R, names, "measure the other fields with fields=")
    if missing := [name for name, known in zip(names, z.isfinite().all(0)) if not known]:
        raise BoxcovError(
            f"{', '.join(missing)} of some boxes is not finite: leave out these boxes, or measure "
            "the other fields with fields="
        )
    _check_positive_definite(z, R, names)
    risk = None if noisy.no_object is None else noisy.risk
    return Measurements(z, R, names, source, risk, noisy.no_object, noisy.flipped)


def _add_residual(
    detections: Detections, residual: Mapping[str, float] | Tensor | None
) -> tuple[Detections, str]:
    """Return the detections with ``predictive``, and the source of the residual."""
    if residual is None:
        if detections.predictive is None:
            raise BoxcovError(
                "the epistemic covariance alone is no measurement noise R: it leaves out the noise "
                "of sensor and labels. Run boxcov calibrate, or pass residual={'x': 0.04, ...}"
            )
        return detections, "predictive"
    if detections.predictive is not None:
        raise BoxcovError(
            "these detections are calibrated: their predictive covariance contains the residual "
            "already. Leave out residual="
        )
    if detections.covariance is None:
        raise BoxcovError("these are plain detections: make them with MCGLM, ExactGLM, GLM or MCI")
    C = detections.covariance.detach().double()
    noise = _residual_matrix(residual, detections.fields, C)
    return replace(detections, predictive=C + noise), "given"


def _residual_matrix(
    residual: Mapping[str, float] | Tensor, fields: tuple[str, ...], C: Tensor
) -> Tensor:
    """Return the residual as a matrix (D, D) or (m, D, D) that can be added to C (m, D, D)."""
    if isinstance(residual, Tensor):
        shape, shapes = tuple(residual.shape), (tuple(C.shape[1:]), tuple(C.shape))
        if shape not in shapes:
            raise BoxcovError(f"residual has shape {shape}, expected {shapes[0]} or {shapes[1]}")
        return residual.detach().to(C)
    if set(residual) != set(fields):
        raise BoxcovError(
            f"residual must have one variance for each field of {', '.join(fields)}, and has "
            f"{', '.join(residual)}"
        )
    values = torch.tensor([float(residual[name]) for name in fields]).to(C)
    if not bool((values.isfinite() & (values >= 0)).all()):
        raise BoxcovError(f"residual variances must be finite and at least 0, got {dict(residual)}")
    return torch.diag(values)


def check_known(C: Tensor, fields: Sequence[str], way_out: str) -> None:
    """Raise if a predictive covariance (m, f, f) of ``fields`` is NaN, and say why."""
    is_unknown = C.diagonal(dim1=1, dim2=2).isnan().any(0)
    if unknown := [name for name, is_nan in zip(fields, is_unknown) if is_nan]:
        raise BoxcovError(
            f"the predictive covariance of {', '.join(unknown)} is NaN: the calibration frames "
            "have too few labels of it. Calibrate on frames with such labels, or " + way_out
        )


def _check_positive_definite(z: Tensor, R: Tensor, names: tuple[str, ...]) -> None:
    """Raise if a filter could not invert R."""
    sd = R.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()
    correlation = R / (sd[:, :, None] * sd[:, None, :])
    has_factor = torch.linalg.cholesky_ex(correlation.nan_to_num(0.0))[1] == 0
    is_bad = ~(R.isfinite().flatten(1).all(1) & (sd > 0).all(1) & has_factor)
    rows = is_bad.nonzero()[:, 0].tolist()
    if rows:
        row = rows[0]
        raise BoxcovError(
            f"R of {len(rows)} boxes is not positive definite (box {row}: {z[row].tolist()}, "
            f"variances {R[row].diagonal().tolist()} of {', '.join(names)}): pass residual "
            "variances above 0"
        )
