"""Rigid poses, and detections with covariances transformed from one coordinate frame to another."""

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
    """A rigid transform ``R p + t``; ``pose @ other`` applies ``other`` first.

    >>> up = Pose(torch.eye(3), torch.tensor([0.0, 0.0, 1.0]))
    >>> (up @ up)(torch.zeros(1, 3)), up.inverse()(torch.zeros(1, 3))[0, 2].item()
    (tensor([[0., 0., 2.]]), -1.0)
    """

    R: Tensor  # (3, 3)
    t: Tensor  # (3,)

    def __call__(self, points: Tensor) -> Tensor:
        """Transform points (n, 3)."""
        return points @ self.R.T.to(points.dtype) + self.t.to(points.dtype)

    def __matmul__(self, other: Pose) -> Pose:
        return Pose(self.R @ other.R, self.R @ other.t + self.t)

    def inverse(self) -> Pose:
        # not R^T: calibration files give R to 7 digits, and a round trip must be exact
        R = torch.linalg.inv(self.R)
        return Pose(R, -R @ self.t)


def rotation_matrix(quaternion: Tensor) -> Tensor:
    """Return rotation matrices (..., 3, 3) of quaternions (..., 4) w x y z of any length but 0.

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


def rotate_yaw(R: Tensor, yaw: Tensor) -> tuple[Tensor, Tensor]:
    """Return the yaw (m,) of the headings ``(cos, sin, 0)`` rotated by R, and its derivative (m,).

    >>> rotate_yaw(rotation_matrix(torch.tensor([1.0, 0.0, 0.0, 1.0])), torch.tensor([0.0]))
    (tensor([1.5708]), tensor([1.]))
    """
    zero = torch.zeros_like(yaw)
    heading = torch.stack([yaw.cos(), yaw.sin(), zero], 1) @ R.T  # (m, 3)
    slope = torch.stack([-yaw.sin(), yaw.cos(), zero], 1) @ R.T  # (m, 3) its derivative
    x, y = heading[:, 0], heading[:, 1]
    return torch.atan2(y, x), (x * slope[:, 1] - y * slope[:, 0]) / (x * x + y * y)


def wrap_angle(angle: Tensor) -> Tensor:
    """Return the angles in [-pi, pi).

    >>> wrap_angle(torch.tensor([0.5, 2 * pi + 0.5]))
    tensor([0.5000, 0.5000])
    """
    return torch.remainder(angle + pi, 2 * pi) - pi


def propagate(
    detections: Detections, boxes: Tensor, jacobian: Tensor, fields: tuple[str, ...]
) -> Detections:
    """Return the detections with mapped boxes (m, E) and covariances J C J^T, in J's dtype.

    ``jacobian`` (m, E, D) is that of the map. It may have fewer columns than the boxes have
    fields: the map then ignores the last fields.

    >>> from torch import ones, zeros
    >>> fields, classes = ("x",), ("car",)
    >>> C = ones(1, 1, 1)
    >>> box = Detections(ones(1, 1), ones(1), zeros(1), zeros(1), fields, classes, C)
    >>> propagate(box, box.boxes * 3, 3 * C, ("mm",)).covariance
    tensor([[[9.]]])
    """
    ignored = len(detections.fields) - jacobian.shape[2]
    J = torch.nn.functional.pad(jacobian, (0, ignored))
    A = detections.factor

    def transform(C: Tensor | None) -> Tensor | None:
        if C is None:
            return None
        C = J @ C.to(J) @ J.transpose(1, 2)
        return (C + C.transpose(1, 2)) / 2  # exactly symmetric despite rounding

    return replace(
        detections,
        boxes=boxes,
        fields=fields,
        covariance=transform(detections.covariance),
        predictive=transform(detections.predictive),
        factor=None if A is None else J @ A.to(J),
    )


def transform_detections(detections: Detections, pose: Pose) -> Detections:
    """Return the detections (``x y z w l h yaw vx vy``) in another coordinate frame, in float64.

    Covariances are transformed by the Jacobian. Yaw is that of the rotated heading, and the
    velocity that of the rotated vector, both projected to the horizontal plane. A round trip is
    exact if the pose keeps z upright; a tilt of 2 degrees changes yaw by 0.0006 rad.

    >>> quarter_turn = rotation_matrix(torch.tensor([1.0, 0.0, 0.0, 1.0]).double())
    >>> car = torch.tensor([[10.0, 0, 0, 2, 4, 1.5, 0, 5, 0]])
    >>> one, zero, C = torch.ones(1), torch.zeros(1), torch.diag(torch.arange(1.0, 10.0))[None]
    >>> found = Detections(car, one, zero, zero, BOX_FIELDS, ("car",), C)
    >>> turned = transform_detections(found, Pose(quarter_turn, torch.zeros(3).double()))
    >>> turned.field("y").item(), turned.field("vy").item(), turned.std("y").item()
    (10.0, 5.0, 1.0)
    """
    if detections.fields != BOX_FIELDS:
        raise BoxcovError(
            f"cannot transform boxes with the fields {' '.join(detections.fields)}: they must be "
            f"{' '.join(BOX_FIELDS)}"
        )
    boxes = detections.boxes.detach().cpu().double()
    R, t = pose.R.double(), pose.t.double()
    yaw, slope = rotate_yaw(R, boxes[:, 6])
    velocity = boxes[:, 7:] @ R[:2, :2].T
    transformed = torch.cat([boxes[:, :3] @ R.T + t, boxes[:, 3:6], yaw[:, None], velocity], 1)
    J = torch.zeros(len(boxes), 9, 9, dtype=torch.float64)
    J[:, :3, :3] = R
    J[:, 3:6, 3:6] = torch.eye(3)
    J[:, 6, 6] = slope
    J[:, 7:, 7:] = R[:2, :2]
    return propagate(detections.to("cpu"), transformed, J, BOX_FIELDS)
