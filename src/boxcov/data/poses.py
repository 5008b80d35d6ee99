"""Rigid poses, and detections with covariances transformed from one coordinate frame to another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import pi
from typing import Any

import torch
from torch import Tensor

from boxcov.box_layout import find_layout
from boxcov.detections import Detections
from boxcov.errors import BoxcovError

BOX_FIELDS = ("x", "y", "z", "w", "l", "h", "yaw", "vx", "vy")  # the paper's order
Sources = Mapping[str, str | None]
"""Mapped fields by name: the field that each is a multiple of, or None if it mixes several."""
_MIXED = ("x", "y", "z", "vx", "vy")  # by a rotation
_ROTATED: Sources = {name: None if name in _MIXED else name for name in BOX_FIELDS}


@dataclass(frozen=True)
class Pose:
    """A rigid transform ``R p + t``; ``pose @ other`` applies ``other`` first."""

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
    """Return rotation matrices (..., 3, 3) of quaternions (..., 4) w x y z of any length but 0."""
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


def into_axes(x: Tensor, y: Tensor, yaw: Tensor) -> tuple[Tensor, Tensor]:
    """Return vectors x y as their parts along a heading, and across it to its left.

    >>> into_axes(torch.tensor(0.0), torch.tensor(2.0), torch.tensor(pi / 2))
    (tensor(2.), tensor(-8.7423e-08))
    """
    cos, sin = yaw.cos(), yaw.sin()
    return x * cos + y * sin, y * cos - x * sin


def wrap_angle(angle: Tensor) -> Tensor:
    """Return the angles in [-pi, pi)."""
    return torch.remainder(angle + pi, 2 * pi) - pi


def propagate(
    detections: Detections, boxes: Tensor, jacobian: Tensor, sources: Sources
) -> Detections:
    """Return the detections with mapped boxes (m, E) and covariances J C J^T, in J's dtype.

    ``jacobian`` (m, E, D) is that of the map. It may have fewer columns than the boxes have
    fields: the map then ignores the last fields. ``sources`` names the E mapped fields, and for
    each the field that it is a multiple of, or None where it mixes several fields.

    Probabilities and signals stay. A scale or a half width is exact if it has a source. It cannot
    be computed for a field that mixes several, as x and y in a rotation: the scale is NaN there,
    and the half width one that holds at least the same share of the errors, but is wider, see
    ``_mixed_widths``. ``predictive`` is exact for every field.
    """
    ignored = len(detections.fields) - jacobian.shape[2]
    J = torch.nn.functional.pad(jacobian, (0, ignored))
    score = detections.score_covariance

    def transform(C: Tensor | None) -> Tensor | None:
        if C is None:
            return None
        # a field that is NaN, as velocities without labels, does not spoil the others
        unknown = J.abs() @ C.isnan().to(J) @ J.abs().transpose(1, 2) > 0
        C = J @ C.to(J).where(~C.isnan(), 0) @ J.transpose(1, 2)
        C = (C + C.transpose(1, 2)) / 2  # exactly symmetric despite rounding
        return C.masked_fill(unknown, torch.nan)

    return replace(
        detections,
        boxes=boxes,
        fields=tuple(sources),
        covariance=transform(detections.covariance),
        predictive=transform(detections.predictive),
        score_covariance=None if score is None else (J @ score.to(J)[:, :, None])[:, :, 0],
        **_scales_and_widths(detections, J, sources),
    )


def _scales_and_widths(detections: Detections, J: Tensor, sources: Sources) -> dict[str, Any]:
    """Return scale, half widths and meta after the map with the Jacobian J (m, E, D)."""
    about = detections.meta.get("error_model")
    if about is None:
        return {}
    of = [None if s is None else detections.fields.index(s) for s in sources.values()]
    is_single = torch.tensor([i is not None for i in of])  # (E,)
    size = J.abs()
    scale, single, joint = detections.scale, detections.region_widths, detections.joint_widths
    mapped: dict[str, Any] = {}
    if scale is not None:
        sums = _weighted_sum(scale.to(J)[:, None], size)[:, 0]
        mapped["scale"] = sums.where(is_single, torch.nan)
    if single is not None and joint is not None:
        mapped["joint_widths"] = around = _weighted_sum(joint.to(J), size)
        mixed = _mixed_widths(single.to(J), around, size, about["levels"])
        mapped["region_widths"] = _weighted_sum(single.to(J), size).where(is_single, mixed)
    dof = [None if i is None else about["dof"][i] for i in of]
    return {**mapped, "meta": {**detections.meta, "error_model": {**about, "dof": dof}}}


def _mixed_widths(single: Tensor, around: Tensor, size: Tensor, levels: Sequence[float]) -> Tensor:
    """Return half widths (m, L, E) of fields that mix several, from those of each field (m, L, D).

    n fields that are all inside at a level of ``1 - alpha / n`` each bound their sum at 1 - alpha.
    Where there is no such level, or too few boxes for it, ``around`` (m, L, E) is taken: it bounds
    the joint region, but one field with large errors, as a velocity, widens it for all.
    """
    if not len(single):
        return around
    counts = (size > 0).sum(2).amax(0)  # (E,)
    widths, beyond = around, torch.cat([single, torch.full_like(single[:, :1], torch.inf)], 1)
    for n in counts.unique().tolist():
        needed = [1 - (1 - level) / max(n, 1) - 1e-9 for level in levels]
        index = [sum(level < least for level in levels) for least in needed]  # L if there is none
        bound = _weighted_sum(beyond[:, index], size)
        widths = bound.where((counts == n) & (bound < torch.inf), widths)
    return widths.cummax(1).values  # a higher level is nowhere narrower


def _weighted_sum(widths: Tensor, size: Tensor) -> Tensor:
    """Return sums (m, L, E) of half widths (m, L, D) with weights (m, E, D); 0 times inf is 0."""
    weights = size[:, None]  # (m, 1, E, D)
    return torch.where(weights > 0, weights * widths[:, :, None], 0).sum(3)


def transform_detections(detections: Detections, pose: Pose) -> Detections:
    """Return the detections (``x y z w l h yaw vx vy``) in another coordinate frame, in float64.

    Covariances are transformed by the Jacobian. Scales of x y z vx vy become NaN and their half
    widths wider, because a rotation mixes them, see ``propagate``. Yaw is that of the rotated
    heading, and the velocity that of the rotated vector, both projected to the horizontal plane. A
    round trip of boxes and covariances is exact if the pose keeps z upright; a tilt of 2 degrees
    changes yaw by 0.0006 rad.

    >>> quarter_turn = rotation_matrix(torch.tensor([1.0, 0.0, 0.0, 1.0]).double())
    >>> car = torch.tensor([[10.0, 0, 0, 2, 4, 1.5, 0, 5, 0]])
    >>> one, zero, C = torch.ones(1), torch.zeros(1), torch.diag(torch.arange(1.0, 10.0))[None]
    >>> found = Detections(car, one, zero, zero, BOX_FIELDS, ("car",), C)
    >>> turned = transform_detections(found, Pose(quarter_turn, torch.zeros(3).double()))
    >>> turned.field("y").item(), turned.field("vy").item(), turned.std("y").item()
    (10.0, 5.0, 1.0)
    """
    find_layout(detections.fields, (BOX_FIELDS,), "a change of coordinates", exact=True)
    boxes = detections.boxes.detach().cpu().double()
    R, t = pose.R.double(), pose.t.double()
    if not (R.isfinite().all() and t.isfinite().all()):
        raise BoxcovError("the pose is not finite: leave out frames whose place is unknown")
    yaw, slope = rotate_yaw(R, boxes[:, 6])
    velocity = boxes[:, 7:] @ R[:2, :2].T
    transformed = torch.cat([boxes[:, :3] @ R.T + t, boxes[:, 3:6], yaw[:, None], velocity], 1)
    J = torch.zeros(len(boxes), 9, 9, dtype=torch.float64)
    J[:, :3, :3] = R
    J[:, 3:6, 3:6] = torch.eye(3)
    J[:, 6, 6] = slope
    J[:, 7:, 7:] = R[:2, :2]
    return propagate(detections.to("cpu"), transformed, J, _ROTATED)
