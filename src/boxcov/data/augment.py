"""Data augmentation of LiDAR frames: rotation, reflection and scaling."""

from __future__ import annotations

from dataclasses import dataclass
from math import pi
from typing import Any

import torch
from torch import Tensor

from boxcov.data.poses import wrap_angle


@dataclass(frozen=True)
class Augmentation:
    """Ranges of the random transforms.

    >>> identity = Augmentation(turn=0.0, scale=0.0, mirror_x=False, mirror_y=False)
    >>> identity([torch.ones(1, 5)], [], torch.Generator())[0]
    [tensor([[1., 1., 1., 1., 1.]])]
    """

    turn: float = pi / 4  # largest rotation about the vertical, radians
    scale: float = 0.05  # largest relative change of the size
    mirror_x: bool = True  # whether x may change its sign
    mirror_y: bool = True

    def __call__(
        self, points: list[Tensor], targets: list[dict[str, Any]], generator: torch.Generator
    ) -> tuple[list[Tensor], list[Any]]:
        """Transform each frame of a batch at random.

        Points are (N, 5), boxes (n, 9) ``x y z w l h yaw vx vy``.
        """
        transforms = [self._draw(generator) for _ in points]
        clouds = [_points(cloud, *transform) for cloud, transform in zip(points, transforms)]
        boxes = [
            {**target, "boxes": _boxes(target["boxes"], *transform)}
            for target, transform in zip(targets, transforms)
        ]
        return clouds, boxes

    def _draw(self, generator: torch.Generator) -> tuple[Tensor, float]:
        """Draw a map of the plane (2, 2), and a scale."""
        u = torch.rand(4, generator=generator).tolist()
        angle, scale = (2 * u[0] - 1) * self.turn, 1 + (2 * u[1] - 1) * self.scale
        cos, sin = torch.tensor(angle).cos(), torch.tensor(angle).sin()
        mirror = torch.tensor(
            [
                -1.0 if self.mirror_x and u[2] < 0.5 else 1.0,
                -1.0 if self.mirror_y and u[3] < 0.5 else 1.0,
            ]
        )
        return torch.stack([torch.stack([cos, -sin]), torch.stack([sin, cos])]) * mirror, scale


def _points(cloud: Tensor, plane: Tensor, scale: float) -> Tensor:
    xy = cloud[:, :2] @ plane.to(cloud).T * scale
    return torch.cat([xy, cloud[:, 2:3] * scale, cloud[:, 3:]], 1)


def _boxes(boxes: Tensor, plane: Tensor, scale: float) -> Tensor:
    """Transform centres, sizes, headings and velocities."""
    plane = plane.to(boxes)
    yaw = boxes[:, 6]
    heading = torch.stack([yaw.cos(), yaw.sin()], 1) @ plane.T
    new_yaw = wrap_angle(torch.atan2(heading[:, 1], heading[:, 0])).unsqueeze(1)
    velocity = boxes[:, 7:9] @ plane.T * scale
    return torch.cat([boxes[:, :2] @ plane.T * scale, boxes[:, 2:6] * scale, new_yaw, velocity], 1)
