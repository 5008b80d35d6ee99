"""Measurements and their noise R for a tracker's Kalman filter.

What the weights do not know is not R: a measurement also has the noise of the sensor, of the labels, and of a network that is too simple.
That residual is in ``Detections.predictive``, where the posterior is calibrated, or is given here by name; without either there is no R.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from boxcov.data.poses import Pose, transform_detections
from boxcov.detections import Detections
from boxcov.errors import BoxcovError

Measured = Callable[[Tensor], Tensor]
"""From a box (D,) to what the filter measures (E,), by differentiable operations."""


class Measurements(NamedTuple):
    """What a filter takes in."""

    z: Tensor  # (m, E) in float64
    R: Tensor  # (m, E, E)
    fields: tuple[str, ...]  # E names
    residual: str  # where the part that is not epistemic comes from: "predictive" or "given"


def measurements(
    detections: Detections,
    fields: Sequence[str] | None = None,
    *,
    residual: Mapping[str, float] | Tensor | None = None,
    pose: Pose | None = None,
    measured: Measured | None = None,
) -> Measurements:
    """The boxes as measurements z (m, E) with their noise R (m, E, E), positive definite, in float64.

    fields: which fields, in the order of the filter; all of them unless given. With ``measured`` they are the names of what it gives.
    residual: variances of the noise beside the epistemic covariance, by field, or a matrix (D, D) or (m, D, D); unless given, the
    detections must be calibrated: their ``predictive`` covariance holds it.
    pose: into another frame of reference first (``x y z w l h yaw vx vy``), as from the LiDAR to the world.
    measured: any other numbers, as range and bearing: R goes through the Jacobian, taken by autograd.

    >>> one = Detections(torch.tensor([[3.0, 4.0]]), torch.ones(1), torch.zeros(1), torch.zeros(1), ("x", "y"), ("car",), torch.eye(2)[None])
    >>> measurements(one, ("y", "x"), residual={"x": 0.5, "y": 0.0}).R
    tensor([[[1.0000, 0.0000],
             [0.0000, 1.5000]]], dtype=torch.float64)
    >>> polar = lambda box: torch.stack([box.norm(), torch.atan2(box[1], box[0])])
    >>> measurements(one, ("range", "bearing"), residual=torch.zeros(2, 2), measured=polar).R.diagonal(dim1=1, dim2=2)
    tensor([[1.0000, 0.0400]], dtype=torch.float64)
    >>> measurements(one)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    boxcov.errors.BoxcovError: the epistemic covariance alone is no measurement noise R: ...
    """
    there, source = _with_noise(detections, residual)
    if pose is not None:
        there = transform_detections(there, pose)
    z, C = there.boxes.detach().double(), there.predictive
    assert C is not None
    C = C.double()
    names = tuple(there.fields if fields is None else fields)
    if measured is not None:
        z, C = _through(z, C, measured, names)
    else:
        unknown = [name for name in names if name not in there.fields]
        if unknown or len(set(names)) < len(names) or not names:
            raise BoxcovError(
                f"no fields {', '.join(unknown or names) or 'at all'} to measure: the boxes have {', '.join(there.fields)}"
            )
        at = [there.fields.index(name) for name in names]
        z, C = z[:, at], C[:, at][:, :, at]
    _check_definite(z, C, names)
    return Measurements(z, C, names, source)


def measurement_noise(
    detections: Detections,
    fields: Sequence[str] | None = None,
    *,
    residual: Mapping[str, float] | Tensor | None = None,
    pose: Pose | None = None,
    measured: Measured | None = None,
) -> Tensor:
    """R (m, E, E) alone; see ``measurements``.

    >>> one = Detections(torch.ones(1, 1), torch.ones(1), torch.zeros(1), torch.zeros(1), ("x",), ("car",), torch.ones(1, 1, 1))
    >>> measurement_noise(one, residual={"x": 0.25}).item()
    1.25
    """
    return measurements(detections, fields, residual=residual, pose=pose, measured=measured).R


def _with_noise(
    detections: Detections, residual: Mapping[str, float] | Tensor | None
) -> tuple[Detections, str]:
    """The detections with ``predictive`` filled, and where from."""
    if residual is None:
        if detections.predictive is None:
            raise BoxcovError(
                "the epistemic covariance alone is no measurement noise R: it leaves out the noise of sensor and labels. Take calibrated "
                "detections (boxcov calibrate, then calibrated=True), or say what to add: residual={'x': 0.04, ...}, variances by field"
            )
        return detections, "predictive"
    if detections.predictive is not None:
        raise BoxcovError(
            "these detections are calibrated: their predictive covariance holds the residual already; leave residual= out"
        )
    if detections.covariance is None:
        raise BoxcovError(
            "these are plain detections without a covariance: make them with MCGLM, ExactGLM, GLM or MCI"
        )
    C = detections.covariance.detach().double()
    return replace(detections, predictive=C + _matrix(residual, detections.fields, C)), "given"


def _matrix(
    residual: Mapping[str, float] | Tensor, fields: tuple[str, ...], like: Tensor
) -> Tensor:
    D = len(fields)
    if isinstance(residual, Tensor):
        if tuple(residual.shape) not in ((D, D), tuple(like.shape)):
            raise BoxcovError(
                f"residual has shape {tuple(residual.shape)}, expected ({D}, {D}) or {tuple(like.shape)}"
            )
        return residual.detach().to(like)
    missing, unknown = (
        [name for name in fields if name not in residual],
        sorted(set(residual) - set(fields)),
    )
    if missing or unknown:
        raise BoxcovError(
            f"residual must name the variance of each field of {', '.join(fields)}; "
            f"{'it has none for ' + ', '.join(missing) if missing else 'there is no ' + ', '.join(unknown)}"
        )
    values = torch.tensor([float(residual[name]) for name in fields]).to(like)
    if not bool((values.isfinite() & (values >= 0)).all()):
        raise BoxcovError(f"residual variances must be finite and at least 0, got {dict(residual)}")
    return torch.diag(values)


def _through(
    z: Tensor, C: Tensor, measured: Measured, names: tuple[str, ...]
) -> tuple[Tensor, Tensor]:
    found = torch.stack([measured(box) for box in z]) if len(z) else z.new_zeros(0, len(names))
    if found.dim() != 2 or found.shape[1] != len(names):
        raise BoxcovError(
            f"measured gives {tuple(found.shape[1:])} numbers of a box, fields names {len(names)}: {', '.join(names)}"
        )
    if not len(z):
        return found, z.new_zeros(0, len(names), len(names))
    with torch.enable_grad():
        J = torch.stack(
            [torch.autograd.functional.jacobian(measured, box) for box in z]
        )  # (m, E, D)
    R = J @ C @ J.transpose(1, 2)
    return found.detach(), (R + R.transpose(1, 2)) / 2


def _check_definite(z: Tensor, R: Tensor, names: tuple[str, ...]) -> None:
    """A filter inverts R, or adds it to something that may be singular: one that is none must not get there."""
    if not len(R):
        return
    size = R.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()
    scaled = R / (size[:, :, None] * size[:, None, :])
    bad = (
        (~R.isfinite()).flatten(1).any(1)
        | (size == 0).any(1)
        | (torch.linalg.cholesky_ex(scaled.nan_to_num(0.0))[1] != 0)
    )
    rows = bad.nonzero()[:, 0].tolist()
    if rows:
        row = rows[0]
        raise BoxcovError(
            f"R of {len(rows)} boxes is not positive definite (box {row}: {z[row].tolist()}, variances {R[row].diagonal().tolist()} of "
            f"{', '.join(names)}): give residual variances above 0"
        )
