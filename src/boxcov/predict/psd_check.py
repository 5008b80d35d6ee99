"""No covariance leaves a method that is none: finite, symmetric and positive semi-definite, or an error that names the box."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from boxcov._torch.precision import full_precision
from boxcov.detections import Detections
from boxcov.errors import NotFiniteError

_FLOOR = (
    1e-6  # a field's standard deviation beside the box's greatest, below which it counts as this
)


def check_covariance(result: Detections, method: str, settings: Mapping[str, Any]) -> None:
    """Refuse detections of which a covariance is none.

    >>> two = torch.eye(2).repeat(2, 1, 1)
    >>> two[1, 0, 0] = -1
    >>> found = Detections(torch.zeros(2, 2), torch.ones(2), torch.zeros(2), torch.zeros(2), ("x", "y"), ("car",), two)
    >>> check_covariance(found, "exact", {})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    boxcov.errors.NotFiniteError: exact: the covariance of 1 of 2 boxes is not positive semi-definite (box 1: [0.0, 0.0]): ...
    """
    assert result.covariance is not None
    if not len(result):
        return
    kinds = _kinds(result.covariance)
    if bool(torch.stack(list(kinds.values())).all()):  # one look at the device for everything
        return
    what, good = next((what, good) for what, good in kinds.items() if not bool(good.all()))
    rows = (~good).nonzero()[:, 0].tolist()
    raise NotFiniteError(
        f"{method}: the covariance of {len(rows)} of {len(result)} boxes is not {what} (box {rows[0]}: "
        f"{result.boxes[rows[0]].tolist()}): the weights, or a step of {settings}, are out of range"
    )


def tolerance(covariance: Tensor) -> float:
    """How far from symmetric, and below zero, a covariance may lie in units of its own variances: products round early on a GPU (TF32).

    >>> tolerance(torch.zeros(1, 2, 2))
    0.001
    """
    return 1e-3 if covariance.device.type == "cpu" else 1e-2


@full_precision
def _kinds(C: Tensor) -> dict[str, Tensor]:
    """For each property, whether every covariance (m, D, D) has it (m,)."""
    slack = tolerance(C)
    spread = C.diagonal(dim1=1, dim2=2).abs().sqrt()  # (m, D)
    most = spread.amax(1, keepdim=True)
    spread = torch.maximum(spread, torch.where(most > 0, _FLOOR * most, 1))
    scaled = (
        C / spread.unsqueeze(2) / spread.unsqueeze(1)
    )  # a correlation: metres, radians and metres a second weigh the same
    lifted = (scaled + scaled.transpose(1, 2)) / 2 + slack * torch.eye(
        C.shape[1], dtype=C.dtype, device=C.device
    )
    _, failed = torch.linalg.cholesky_ex(lifted)  # a tenth of the time of eigenvalues
    return {
        "finite": C.isfinite().flatten(1).all(1),
        "positive semi-definite": failed == 0,
        "symmetric": ((scaled - scaled.transpose(1, 2)).abs() <= slack).flatten(1).all(1),
    }
