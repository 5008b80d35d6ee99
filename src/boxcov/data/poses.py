"""Where things are: rigid poses, and carrying boxes with their covariances from one frame of reference to another."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import pi

import torch
from torch import Tensor

from boxcov.detections import Detections
from boxcov.errors import BoxcovError

BOX_FIELDS = ("x", "y", "z", "w", "l", "h", "yaw", "vx", "vy")  # the paper's order


@dataclass(frozen=True)
class Pose:
    """The way from one frame of reference to another: ``R p + t``. ``pose @ other`` goes by ``other`` first.

    >>> up = Pose(torch.eye(3).double(), torch.tensor([0.0, 0.0, 1.0]).double())
    >>> (up @ up)(torch.zeros(1, 3).double()), up.inverse()(torch.zeros(1, 3).double())[0, 2].item()
    (tensor([[0., 0., 2.]], dtype=torch.float64), -1.0)
    """

    R: Tensor  # (3, 3)
    t: Tensor  # (3,)

    def __call__(self, points: Tensor) -> Tensor:
        """Points (n, 3), or as many columns of them as three."""
        return points @ self.R.T.to(points.dtype) + self.t.to(points.dtype)

    def __matmul__(self, other: Pose) -> Pose:
        return Pose(self.R @ other.R, self.R @ other.t + self.t)

    def inverse(self) -> Pose:
        # not R^T: calibration files give rotations to 7 digits, and there and back should end where it began
        R = torch.linalg.inv(self.R)
        return Pose(R, -R @ self.t)


def rotation_matrix(quaternion: Tensor) -> Tensor:
    """Rotation matrices (..., 3, 3) of quaternions (..., 4) as w x y z, of any length but 0.

    >>> rotation_matrix(torch.tensor([1.0, 0.0, 0.0, 1.0]))  # a quarter turn to the left
    tensor([[ 0., -1.,  0.],
            [ 1.,  0.,  0.],
            [ 0.,  0.,  1.]])
    """
    w, x, y, z = quaternion.unbind(-1)
    s = 2 / quaternion.square().sum(-1)
    rows = (
        (1 - s * (y * y + z * z), s * (x * y - z * w), s * (x * z + y * w)),
        (s * (x * y + z * w), 1 - s * (x * x + z * z), s * (y * z - x * w)),
        (s * (x * z - y * w), s * (y * z + x * w), 1 - s * (x * x + y * y)),
    )
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


def rotate_yaw(R: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    """The angle (m,) from x to y of the heading ``(cos, sin, 0)`` after the rotation R, and its derivative (m,).

    >>> rotate_yaw(rotation_matrix(torch.tensor([1.0, 0.0, 0.0, 1.0])), torch.tensor([0.0]))
    (tensor([1.5708]), tensor([1.]))
    """
    zero = torch.zeros_like(angle)
    heading = torch.stack([angle.cos(), angle.sin(), zero], 1) @ R.T  # (m, 3)
    slope = torch.stack([-angle.sin(), angle.cos(), zero], 1) @ R.T  # (m, 3) its derivative
    x, y = heading[:, 0], heading[:, 1]
    return torch.atan2(y, x), (x * slope[:, 1] - y * slope[:, 0]) / (x * x + y * y)


def wrapped(angle: Tensor) -> Tensor:
    """Angles in [-pi, pi).

    >>> wrapped(torch.tensor([0.5, 2 * pi + 0.5]))
    tensor([0.5000, 0.5000])
    """
    return torch.remainder(angle + pi, 2 * pi) - pi


def propagate(
    detections: Detections, boxes: Tensor, jacobian: Tensor, fields: tuple[str, ...]
) -> Detections:
    """The detections with other boxes (m, E), the image of theirs under a map with this Jacobian (m, E, D): C becomes J C J^T.

    >>> one = Detections(torch.ones(1, 1), torch.ones(1), torch.zeros(1), torch.zeros(1), ("x",), ("car",), torch.ones(1, 1, 1))
    >>> propagate(one, one.boxes * 3, torch.full((1, 1, 1), 3.0), ("mm",)).covariance
    tensor([[[9.]]])
    """
    J, A = jacobian, detections.factor

    def there(C: Tensor | None) -> Tensor | None:
        if C is None:
            return None
        C = J @ C.to(J) @ J.transpose(1, 2)
        return (C + C.transpose(1, 2)) / 2  # rounding must not leave it lopsided

    covariance, predictive = there(detections.covariance), there(detections.predictive)
    factor = None if A is None else J @ A.to(J)
    return replace(
        detections,
        boxes=boxes,
        fields=fields,
        covariance=covariance,
        predictive=predictive,
        factor=factor,
    )


def moved(detections: Detections, pose: Pose) -> Detections:
    """Detections (``x y z w l h yaw vx vy``) seen from another frame of reference, in float64, with their covariances.

    Positions turn in space. Yaw is that of the turned heading, and the velocity, which has no third component, that of the turned vector,
    both seen from above. There and back is exact for a pose that keeps z upright; a tilt of 2 degrees costs 0.0006 rad of yaw.

    >>> left = Pose(rotation_matrix(torch.tensor([1.0, 0.0, 0.0, 1.0]).double()), torch.zeros(3).double())
    >>> car = torch.tensor([[10.0, 0, 0, 2, 4, 1.5, 0, 5, 0]])
    >>> C = torch.diag(torch.arange(1.0, 10.0))[None]
    >>> there = moved(Detections(car, torch.ones(1), torch.zeros(1), torch.zeros(1), BOX_FIELDS, ("car",), C), left)
    >>> there.field("y"), there.field("vy"), there.std("y") ** 2
    (tensor([10.], dtype=torch.float64), tensor([5.], dtype=torch.float64), tensor([1.], dtype=torch.float64))
    """
    if detections.fields != BOX_FIELDS:
        raise BoxcovError(
            f"boxes of the fields {' '.join(detections.fields)} cannot be moved: they must be {' '.join(BOX_FIELDS)}"
        )
    boxes = detections.boxes.detach().cpu().double()
    R, t = pose.R.double(), pose.t.double()
    yaw, slope = rotate_yaw(R, boxes[:, 6])
    there = torch.cat(
        [boxes[:, :3] @ R.T + t, boxes[:, 3:6], yaw[:, None], boxes[:, 7:] @ R[:2, :2].T], 1
    )
    J = torch.zeros(len(boxes), 9, 9, dtype=torch.float64)
    J[:, :3, :3] = R
    J[:, 3:6, 3:6] = torch.eye(3)
    J[:, 6, 6] = slope
    J[:, 7:, 7:] = R[:2, :2]
    return propagate(detections.to("cpu"), there, J, BOX_FIELDS)
