"""Every returned covariance is checked: finite, symmetric, positive semi-definite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from boxcov._torch.precision import full_precision
from boxcov.detections import Detections
from boxcov.errors import NotFiniteError

_FLOOR = 1e-6  # smallest standard deviation of a field that counts, relative to the box's largest


def check_covariance(result: Detections, method: str, settings: Mapping[str, Any]) -> None:
    """Raise ``NotFiniteError``, naming a box, if a covariance is not one.

    >>> two = torch.eye(2).repeat(2, 1, 1)
    >>> two[1, 0, 0] = -1
    >>> zeros = torch.zeros(2)
    >>> found = Detections(torch.zeros(2, 2), zeros, zeros, zeros, ("x", "y"), ("car",), two)
    >>> check_covariance(found, "exact", {})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    boxcov.errors.NotFiniteError: exact: the covariance of 1 of 2 boxes is not positive ...
    """
    assert result.covariance is not None
    if not len(result):
        return
    properties = _properties(result.covariance)
    if bool(torch.stack(list(properties.values())).all()):  # one synchronisation with the device
        return
    name, holds = next((name, holds) for name, holds in properties.items() if not bool(holds.all()))
    rows = (~holds).nonzero()[:, 0].tolist()
    raise NotFiniteError(
        f"{method}: the covariance of {len(rows)} of {len(result)} boxes is not {name} "
        f"(box {rows[0]}: {result.boxes[rows[0]].tolist()}): the weights, or a step of {settings}, "
        "are out of range"
    )


def tolerance(covariance: Tensor) -> float:
    """Allowed deviation from symmetry and positivity, relative to the variances.

    It is larger on a GPU, where products may be taken in TF32.

    >>> tolerance(torch.zeros(1, 2, 2))
    0.001
    """
    return 1e-3 if covariance.device.type == "cpu" else 1e-2


@full_precision
def _properties(C: Tensor) -> dict[str, Tensor]:
    """For each property, whether each covariance of (m, D, D) has it (m,)."""
    slack = tolerance(C)
    spread = C.diagonal(dim1=1, dim2=2).abs().sqrt()  # (m, D)
    most = spread.amax(1, keepdim=True)
    spread = torch.maximum(spread, torch.where(most > 0, _FLOOR * most, 1))
    # a correlation matrix: metres, radians and metres per second weigh the same
    scaled = C / spread.unsqueeze(2) / spread.unsqueeze(1)
    lifted = (scaled + scaled.transpose(1, 2)) / 2 + slack * torch.eye(
        C.shape[1], dtype=C.dtype, device=C.device
    )
    _, failed = torch.linalg.cholesky_ex(lifted)  # a tenth of the time of eigenvalues
    return {
        "finite": C.isfinite().flatten(1).all(1),
        "positive semi-definite": failed == 0,
        "symmetric": ((scaled - scaled.transpose(1, 2)).abs() <= slack).flatten(1).all(1),
    }
