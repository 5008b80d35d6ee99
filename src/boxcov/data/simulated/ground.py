"""Gently undulating ground: a sum of long waves, and where rays meet it."""

from __future__ import annotations

import torch
from torch import Tensor

from boxcov.data.simulated.raycast import Fan

SENSOR_HEIGHT = 1.84  # metres above the ground, as on the nuScenes car
_ITERATIONS = 3


def height(waves: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """z of the ground at ``x``, ``y`` (V, ...), with the sensor's height above the origin as 0.

    ``waves`` (V, W, 4) hold kx, ky (radians a metre), phase and amplitude.

    >>> height(torch.tensor([[[0.0, 0.0, 0.0, 1.0]]]), torch.zeros(1, 2), torch.zeros(1, 2))
    tensor([[-1.8400, -1.8400]])
    """
    z = torch.full_like(x, -SENSOR_HEIGHT)
    for kx, ky, phase, amplitude in _each(waves, x.dim()):
        z = z + amplitude * ((kx * x + ky * y + phase).sin() - phase.sin())
    return z


def meet(fan: Fan, waves: Tensor) -> Tensor:
    """Distance in the plane at which each ray meets the ground, (V, C, b); inf for beams that point upwards.

    >>> fan = Fan(torch.zeros(1, 3), torch.zeros(1), torch.tensor([-0.1, 0.1]), columns=1)
    >>> meet(fan, torch.zeros(1, 1, 4))
    tensor([[[18.4000,     inf]]])
    """
    angle = fan.angles()
    cos, sin = angle.cos()[..., None], angle.sin()[..., None]  # (V, C, 1)
    x, y, z = (fan.origins[:, i, None, None] for i in range(3))
    slope = fan.tangents.clamp(max=-1e-3)  # (b,)
    distance = ((z + SENSOR_HEIGHT) / -slope).expand(-1, fan.columns, -1)
    for _ in range(_ITERATIONS):
        gap, climb = z + distance * slope + SENSOR_HEIGHT, torch.zeros_like(distance)
        for kx, ky, phase, amplitude in _each(waves, 3):
            argument = (kx * cos + ky * sin) * distance + (kx * x + ky * y + phase)
            gap = gap - amplitude * (argument.sin() - phase.sin())
            climb = climb + amplitude * (kx * cos + ky * sin) * argument.cos()
        # Newton, kept from running away where a beam nearly grazes the ground
        distance = (distance - gap / torch.minimum(slope - climb, slope / 2)).clamp(0, 1e4)
    return torch.where(fan.tangents < 0, distance, torch.inf)


def _each(waves: Tensor, dims: int) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """kx, ky, phase, amplitude of each wave, ready to broadcast over (V, ...)."""
    shaped = waves.reshape(len(waves), -1, 4, *[1] * (dims - 1))
    return [
        (shaped[:, i, 0], shaped[:, i, 1], shaped[:, i, 2], shaped[:, i, 3])
        for i in range(shaped.shape[1])
    ]
