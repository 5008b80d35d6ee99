"""How the frameworks mean their numbers: head outputs converted on loading, boxes and covariances on request."""

from __future__ import annotations

from math import pi

import torch
from torch import Tensor

from boxcov.detectors.centerpoint.config import Framework
from boxcov.errors import BoxcovError


def head_rows(weight: Tensor, branch: str, framework: Framework, legacy: bool) -> Tensor:
    """The last layer of a branch, weight or bias (n, ...), with its rows meaning what they mean here: log (l, w, h), (sin, cos) of the yaw.

    ``legacy``: mmdetection3d before 1.0, which had det3d's conventions: (w, l, h), and a rotation of -yaw - pi / 2.

    >>> head_rows(torch.tensor([0.1, 0.2]), "rot", "openpcdet", legacy=False)
    tensor([0.2000, 0.1000])
    """
    if framework == "openpcdet":
        return weight.flip(0) if branch == "rot" else weight
    if framework == "det3d" or legacy:
        if branch == "dim":
            return weight[[1, 0, 2]]
        if branch == "rot":  # sin(yaw) = -cos(rot), cos(yaw) = -sin(rot)
            return -weight.flip(0)
    return weight


def to_framework(
    boxes: Tensor, covariance: Tensor | None, framework: Framework
) -> tuple[Tensor, Tensor | None]:
    """Boxes (m, 9) of boxcov, and their covariance (m, 9, 9), as ``framework`` writes boxes.

    mmdet3d: x y z l w h yaw vx vy, z at the bottom; det3d: x y z w l h vx vy rot, rot = -yaw - pi / 2; openpcdet: x y z l w h yaw vx vy.

    >>> box = torch.tensor([[1.0, 2.0, 0.0, 1.8, 4.5, 1.5, 0.3, 5.0, 0.0]])
    >>> to_framework(box, None, "mmdet3d")[0]
    tensor([[ 1.0000,  2.0000, -0.7500,  4.5000,  1.8000,  1.5000,  0.3000,  5.0000,
              0.0000]])
    """
    if boxes.shape[1] != 9:
        raise BoxcovError(
            f"boxes must be x y z w l h yaw vx vy, got {boxes.shape[1]} numbers a box"
        )
    order = [0, 1, 2, 3, 4, 5, 7, 8, 6] if framework == "det3d" else [0, 1, 2, 4, 3, 5, 6, 7, 8]
    J = torch.eye(9, dtype=boxes.dtype, device=boxes.device)[order]
    offset = boxes.new_zeros(9)
    if framework == "det3d":
        J[8] = -J[8]
        offset[8] = -pi / 2
    if framework == "mmdet3d":
        J[2, 5] = -0.5
    turned = None if covariance is None else J.to(covariance) @ covariance @ J.to(covariance).T
    return boxes @ J.T + offset, turned
