"""Scenes as the sensor meets them: where everything, the ego car included, was at the time of each sweep."""

from __future__ import annotations

from math import pi

import torch
from torch import Tensor

from boxcov.data.simulated.ground import SENSOR_HEIGHT, height
from boxcov.data.simulated.raycast import Fan, Prisms
from boxcov.data.simulated.scene import Scene

PERIOD = 0.05  # seconds between sweeps: 20 Hz
COLUMNS = 1080
BEAMS = 32
_LOWEST, _HIGHEST = -30.67, 10.67  # degrees, as of the HDL-32E
_FAR = 1e6  # metres: where padding is put


def fan(scene: Scene, sweeps: int, phases: Tensor, beam_step: int) -> tuple[Fan, Tensor]:
    """The rays of every sweep of every scene, B x S views, and the direction (V,) the ego car faces in each, 0 for the key frame.

    ``phases`` (V,) are the fractions of a column by which each turn of the sensor starts late.

    >>> from boxcov.data.simulated.draw import Draw, generator
    >>> from boxcov.data.simulated.scenarios import Scenario
    >>> from boxcov.data.simulated.scene import build, stack
    >>> scene = stack([build(Draw(generator(0, 0, "cpu")), Scenario())], "cpu")
    >>> rays, heading = fan(scene, 2, torch.zeros(2), 1)
    >>> rays.origins[0].tolist(), rays.tangents.shape, float(heading[0])
    ([0.0, 0.0, 0.0], torch.Size([32]), 0.0)
    """
    pose = _poses(scene, sweeps)[:, 0]  # (V, 3)
    heading = pose[:, 2] - pi / 2
    waves = scene.waves.repeat_interleave(sweeps, 0)
    z = height(waves, pose[:, 0], pose[:, 1]) + SENSOR_HEIGHT
    origins = torch.stack([pose[:, 0], pose[:, 1], z], 1)
    elevations = torch.linspace(_LOWEST, _HIGHEST, BEAMS, device=pose.device)[::beam_step]
    return Fan(
        origins, heading + phases * (2 * pi / COLUMNS), torch.deg2rad(elevations).tan(), COLUMNS
    ), heading


def prisms(scene: Scene, sweeps: int) -> Prisms:
    """The parts of all bodies in each of the B x S views.

    >>> from boxcov.data.simulated.draw import Draw, generator
    >>> from boxcov.data.simulated.scenarios import Scenario
    >>> from boxcov.data.simulated.scene import build, stack
    >>> prisms(stack([build(Draw(generator(0, 0, "cpu")), Scenario())], "cpu"), 3).x.shape[0]
    3
    """
    pose = _poses(scene, sweeps)  # (V, n, 3)
    ground = height(scene.waves.repeat_interleave(sweeps, 0), pose[..., 0], pose[..., 1])  # (V, n)
    owner = scene.owner.repeat_interleave(sweeps, 0)  # (V, p)
    x, y, yaw, ground = (field.gather(1, owner) for field in (*pose.unbind(-1), ground))
    x0, x1, y0, y1, z0, z1 = scene.edges.repeat_interleave(sweeps, 0).unbind(-1)
    along, across, cos, sin = (x0 + x1) / 2, (y0 + y1) / 2, yaw.cos(), yaw.sin()
    x = torch.where(z1 > 0, x + cos * along - sin * across, _FAR)  # padding has no height
    is_round, _, depth = scene.surface.repeat_interleave(sweeps, 0).unbind(-1)
    half_length, half_width = ((x1 - x0) / 2).clamp(min=1e-3), ((y1 - y0) / 2).clamp(min=1e-3)
    return Prisms(
        x,
        y + sin * along + cos * across,
        yaw,
        half_length,
        half_width,
        ground + z0,
        ground + z1,
        is_round,
        depth,
    )


def boxes(scene: Scene) -> Tensor:
    """x y z w l h yaw vx vy of every object in the key frame, (B, n, 9).

    >>> from boxcov.data.simulated.draw import Draw, generator
    >>> from boxcov.data.simulated.scenarios import Scenario
    >>> from boxcov.data.simulated.scene import build, stack
    >>> boxes(stack([build(Draw(generator(0, 0, "cpu")), Scenario())], "cpu")).shape[2]
    9
    """
    x, y, yaw = scene.pose.unbind(-1)
    speed = scene.motion[..., 0]
    z = height(scene.waves, x, y) + scene.size[..., 2] / 2
    wrapped = torch.remainder(yaw + pi, 2 * pi) - pi
    return torch.cat(
        [
            torch.stack([x, y, z], -1),
            scene.size,
            torch.stack([wrapped, speed * yaw.cos(), speed * yaw.sin()], -1),
        ],
        -1,
    )


def _poses(scene: Scene, sweeps: int) -> Tensor:
    """x y yaw of every object at the time of every sweep, (V, n, 3)."""
    past = torch.arange(sweeps, device=scene.pose.device)[:, None] * PERIOD  # (S, 1)
    (x, y, yaw), (speed, rate) = (
        scene.pose[:, None].unbind(-1),
        scene.motion[:, None].unbind(-1),
    )  # (B, 1, n) each
    way = yaw - rate * past / 2  # of the chord
    return torch.stack(
        [x - speed * past * way.cos(), y - speed * past * way.sin(), yaw - rate * past], -1
    ).flatten(0, 1)
