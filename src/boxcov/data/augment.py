"""Data augmentation of LiDAR frames: rotation, reflection, scaling, and resized objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import pi
from typing import Any

import torch
from torch import Tensor

from boxcov._torch.process_state import item_seed
from boxcov.data.poses import into_axes, wrap_angle
from boxcov.data.sequence import FrameSequence
from boxcov.errors import check_seed

_MARGIN = 0.08  # metres around a box that still belong to it: noise of the points
_GROUND = 0.03  # metres above the bottom of a box from which on points belong to it


@dataclass(frozen=True)
class Augmentation:
    """Ranges of the random transforms."""

    turn: float = pi / 4  # largest rotation about the vertical, radians
    scale: float = 0.05  # largest relative change of the size
    mirror_x: bool = True  # whether x may change its sign
    mirror_y: bool = True

    def __call__(
        self,
        points: Sequence[Tensor],
        targets: Sequence[dict[str, Any]],
        generator: torch.Generator,
    ) -> tuple[list[Tensor], list[Any]]:
        """Transform each frame of a batch at random.

        Points are (N, 5), boxes (n, 9) ``x y z w l h yaw vx vy``, or (n, 7) without velocity.
        """
        clouds, changed = [], []
        for cloud, target in zip(points, targets):
            plane, scale = self._draw(generator)
            xy = cloud[:, :2] @ plane.to(cloud).T * scale
            clouds.append(torch.cat([xy, cloud[:, 2:3] * scale, cloud[:, 3:]], 1))
            boxes = torch.as_tensor(target["boxes"])  # labels may be numpy's
            changed.append({**target, "boxes": _transform_boxes(boxes, plane, scale)})
        return clouds, changed

    def _draw(self, generator: torch.Generator) -> tuple[Tensor, float]:
        """Draw a map of the plane (2, 2), and a scale."""
        u = torch.rand(4, generator=generator).tolist()
        angle, scale = (2 * u[0] - 1) * self.turn, 1 + (2 * u[1] - 1) * self.scale
        cos, sin = torch.tensor(angle).cos(), torch.tensor(angle).sin()
        flips = (self.mirror_x and u[2] < 0.5, self.mirror_y and u[3] < 0.5)
        mirror = torch.tensor([-1.0 if flip else 1.0 for flip in flips])
        return torch.stack([torch.stack([cos, -sin]), torch.stack([sin, cos])]) * mirror, scale


def _transform_boxes(boxes: Tensor, plane: Tensor, scale: float) -> Tensor:
    """Return boxes with other centres, sizes, headings and velocities."""
    plane = plane.to(boxes)
    yaw = boxes[:, 6]
    heading = torch.stack([yaw.cos(), yaw.sin()], 1) @ plane.T
    new_yaw = wrap_angle(torch.atan2(heading[:, 1], heading[:, 0])).unsqueeze(1)
    centre, *velocity = (v @ plane.T * scale for v in (boxes[:, :2], boxes[:, 7:9]) if v.shape[1])
    return torch.cat([centre, boxes[:, 2:6] * scale, new_yaw, *velocity], 1)


class ResizedObjects(FrameSequence):
    """Frames whose objects have other sizes; made by ``resize_objects``."""

    def __init__(self, frames: Sequence[Any], seed: int, logarithms: tuple[float, float]) -> None:
        super().__init__(len(frames))
        self.frames, self.seed, self.logarithms = frames, check_seed(seed), logarithms

    def load(self, index: int) -> tuple[list[Tensor], list[Any]]:
        generator = torch.Generator().manual_seed(item_seed(self.seed, index))
        clouds, targets = self.frames[index]
        pairs = [self._resize(*pair, generator) for pair in zip(clouds, targets)]
        return [cloud for cloud, _ in pairs], [target for _, target in pairs]

    def _resize(
        self, cloud: Tensor, target: dict[str, Any], generator: torch.Generator
    ) -> tuple[Tensor, dict[str, Any]]:
        low, high = self.logarithms
        boxes, resized = target["boxes"].clone(), cloud.clone()
        u = torch.rand(len(boxes), 2, generator=generator)
        factors = torch.exp((low + (high - low) * u[:, 0]) * torch.where(u[:, 1] < 0.5, -1, 1))
        for box, factor in zip(boxes, factors.to(boxes)):
            bottom = box[:3].clone()
            bottom[2] -= box[5] / 2
            velocity = box[7:9].nan_to_num()  # unknown: as if at rest
            since = torch.zeros_like(cloud[:, :3])  # the way of the object since each point's sweep
            since[:, : len(velocity)] = cloud[:, 4:5] * velocity
            place = cloud[:, :3] + since - bottom
            along, across = into_axes(place[:, 0], place[:, 1], box[6])
            inside = (along.abs() <= box[4] / 2 + _MARGIN) & (across.abs() <= box[3] / 2 + _MARGIN)
            inside &= (place[:, 2] > _GROUND) & (place[:, 2] <= box[5] + _MARGIN)
            resized[inside, :3] = (bottom + factor * place - since)[inside]
            box[3:6] *= factor
            box[2] = bottom[2] + box[5] / 2
        return resized, {**target, "boxes": boxes}


def resize_objects(
    frames: Sequence[Any], seed: int = 0, logarithms: tuple[float, float] = (0.1, 0.6)
) -> ResizedObjects:
    """Return labelled LiDAR frames with every object, its points and its box, larger or smaller.

    logarithms: smallest and largest logarithm of the factor; 0.1 to 0.6 is 0.55 to 0.9 and 1.1 to
    1.8 times the size. An object stays where it stands. Stress frames for ``boxcov.calibrate``.

    >>> cloud = torch.tensor([[0.5, 0.0, 0.5, 1.0, 0.0], [9.0, 0.0, 0.5, 1.0, 0.0]])
    >>> box = torch.tensor([[0.0, 0.0, 0.5, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]])
    >>> doubled = resize_objects([([cloud], [{"boxes": box}])], logarithms=(0.7, 0.7))
    >>> (points,), (target,) = doubled[0]
    >>> bool(points[1, 0] == 9), points[0, 0] / target["boxes"][0, 4]
    (True, tensor(0.5000))
    """
    return ResizedObjects(frames, seed, logarithms)
