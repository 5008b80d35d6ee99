"""Where the sensor, the objects and the ground are at the time of each sweep.

Each of the S sweeps of B scenes is one view; V = B x S.
"""

from __future__ import annotations

from math import pi

import torch
from torch import Tensor

from boxcov.data.poses import wrap_angle
from boxcov.data.simulated.raycast import Fan, Prisms
from boxcov.data.simulated.scene import Scene

PERIOD = 0.05  # seconds between sweeps: 20 Hz
COLUMNS = 1080
BEAMS = 32
SENSOR_HEIGHT = 1.84  # metres above the ground, as on the nuScenes car
_LOWEST, _HIGHEST = -30.67, 10.67  # degrees, as of the HDL-32E
_FAR = 1e6  # metres: the place of padding
_NEWTON_STEPS = 3


def sensor_rays(scene: Scene, sweeps: int, phases: Tensor, beam_step: int) -> tuple[Fan, Tensor]:
    """Return the rays of every view, and the ego car's heading (V,), 0 in the key frame.

    ``phases`` (V,) are the fractions of a column by which each rotation of the sensor starts late.
    """
    pose = _poses(scene, sweeps)[:, 0]  # (V, 3)
    heading = pose[:, 2] - pi / 2
    waves = scene.waves.repeat_interleave(sweeps, 0)
    z = ground_height(waves, pose[:, 0], pose[:, 1]) + SENSOR_HEIGHT
    origins = torch.stack([pose[:, 0], pose[:, 1], z], 1)
    elevations = torch.linspace(_LOWEST, _HIGHEST, BEAMS, device=pose.device)[::beam_step]
    starts = heading + phases * (2 * pi / COLUMNS)
    return Fan(origins, starts, torch.deg2rad(elevations).tan(), COLUMNS), heading


def body_prisms(scene: Scene, sweeps: int) -> Prisms:
    """Return the prisms of all bodies in every view."""
    pose = _poses(scene, sweeps)  # (V, n, 3)
    waves = scene.waves.repeat_interleave(sweeps, 0)
    ground = ground_height(waves, pose[..., 0], pose[..., 1])  # (V, n)
    owner = scene.owner.repeat_interleave(sweeps, 0)  # (V, p)
    x, y, yaw, ground = (field.gather(1, owner) for field in (*pose.unbind(-1), ground))
    x0, x1, y0, y1, z0, z1 = scene.edges.repeat_interleave(sweeps, 0).unbind(-1)
    along, across, cos, sin = (x0 + x1) / 2, (y0 + y1) / 2, yaw.cos(), yaw.sin()
    is_round, _, depth = scene.surface.repeat_interleave(sweeps, 0).unbind(-1)
    return Prisms(
        x=torch.where(z1 > 0, x + cos * along - sin * across, _FAR),  # padding has no height
        y=y + sin * along + cos * across,
        yaw=yaw,
        half_length=((x1 - x0) / 2).clamp(min=1e-3),
        half_width=((y1 - y0) / 2).clamp(min=1e-3),
        bottom=ground + z0,
        top=ground + z1,
        round=is_round,
        depth=depth,
    )


def key_boxes(scene: Scene) -> Tensor:
    """Return x y z w l h yaw vx vy of every object in the key frame, (B, n, 9)."""
    x, y, yaw = scene.pose.unbind(-1)
    speed = scene.motion[..., 0]
    z = ground_height(scene.waves, x, y) + scene.size[..., 2] / 2
    centre = torch.stack([x, y, z], -1)
    heading = torch.stack([wrap_angle(yaw), speed * yaw.cos(), speed * yaw.sin()], -1)
    return torch.cat([centre, scene.size, heading], -1)


def ground_height(waves: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return z of the ground at ``x``, ``y`` (V, ...); z is 0 at the sensor above the origin.

    ``waves`` (V, W, 4) are kx, ky (radians per metre), phase and amplitude.
    """
    z = torch.full_like(x, -SENSOR_HEIGHT)
    for kx, ky, phase, amplitude in _broadcast_waves(waves, x.dim()):
        z = z + amplitude * ((kx * x + ky * y + phase).sin() - phase.sin())
    return z


def ground_distance(fan: Fan, waves: Tensor) -> Tensor:
    """Return the horizontal distance (V, C, b) to the ground; inf for beams that point upwards."""
    angle = fan.angles()
    cos, sin = angle.cos()[..., None], angle.sin()[..., None]  # (V, C, 1)
    x, y, z = (fan.origins[:, i, None, None] for i in range(3))
    slope = fan.tangents.clamp(max=-1e-3)  # (b,)
    distance = ((z + SENSOR_HEIGHT) / -slope).expand(-1, fan.columns, -1)
    for _ in range(_NEWTON_STEPS):
        gap, climb = z + distance * slope + SENSOR_HEIGHT, torch.zeros_like(distance)
        for kx, ky, phase, amplitude in _broadcast_waves(waves, 3):
            argument = (kx * cos + ky * sin) * distance + (kx * x + ky * y + phase)
            gap = gap - amplitude * (argument.sin() - phase.sin())
            climb = climb + amplitude * (kx * cos + ky * sin) * argument.cos()
        # the bound keeps Newton's method from diverging where a beam nearly grazes the ground
        distance = (distance - gap / torch.minimum(slope - climb, slope / 2)).clamp(0, 1e4)
    return torch.where(fan.tangents < 0, distance, torch.inf)


def _broadcast_waves(waves: Tensor, dims: int) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Return kx, ky, phase and amplitude of each wave, to broadcast over (V, ...)."""
    shaped = waves.reshape(len(waves), -1, 4, *[1] * (dims - 1))
    return [
        (shaped[:, i, 0], shaped[:, i, 1], shaped[:, i, 2], shaped[:, i, 3])
        for i in range(shaped.shape[1])
    ]


def _poses(scene: Scene, sweeps: int) -> Tensor:
    """Return x y yaw of every object in every view, (V, n, 3)."""
    past = torch.arange(sweeps, device=scene.pose.device)[:, None] * PERIOD  # (S, 1)
    x, y, yaw = scene.pose[:, None].unbind(-1)  # (B, 1, n)
    speed, rate = scene.motion[:, None].unbind(-1)
    chord = yaw - rate * past / 2
    x, y = x - speed * past * chord.cos(), y - speed * past * chord.sin()
    return torch.stack([x, y, yaw - rate * past], -1).flatten(0, 1)
