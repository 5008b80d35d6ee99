"""What comes back of each ray: whether, from how far, and how bright."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from boxcov.data.simulated.draw import Draw
from boxcov.data.simulated.layout import LANE
from boxcov.data.simulated.raycast import Fan, Hits
from boxcov.data.simulated.scenarios import Scenario
from boxcov.data.simulated.scene import Scene

# metres: a return is as likely as not where sqrt(reflectivity * cosine) of it is the range. Ground is lost at 40 to 50 m, dark cars at 60 m
_GAIN = 480.0
_ASPHALT, _PAVEMENT, _MARKING, _DROP = 0.09, 0.12, 0.35, 0.012  # reflectivities


@dataclass(frozen=True)
class Chance:
    """The random numbers of every ray; every field but ``phase`` is (V, C, b)."""

    phase: Tensor  # (V,) of the sensor's turn, in columns
    penetration: Tensor  # mean free paths into what is not solid
    lost: Tensor  # uniform: the return's own luck
    scattered: Tensor  # uniform: whether a drop is met
    drop: Tensor  # how far away, in units of the mean
    noise: Tensor  # standard normal, of the range
    flicker: Tensor  # standard normal, of the intensity


def chance(draws: Sequence[Draw], sweeps: int, columns: int, beams: int) -> Chance:
    """The random numbers of the rays of one frame after the other, each frame from its own draw.

    >>> from boxcov.data.simulated.draw import generator
    >>> chance([Draw(generator(0, 0, "cpu"))], 2, 1080, 32).lost.shape
    torch.Size([2, 1080, 32])
    """
    phase = torch.cat([draw.uniform(0, 1, sweeps) for draw in draws])
    uniform = torch.cat([draw.uniform(0, 1, 4, sweeps, columns, beams) for draw in draws], 1)
    normal = torch.cat([draw.normal(0, 1, 2, sweeps, columns, beams) for draw in draws], 1)
    penetration, drop = -torch.log1p(-uniform[:2])
    return Chance(phase, penetration, uniform[2], uniform[3], drop, normal[0], normal[1])


def measure(
    fan: Fan, scene: Scene, hits: Hits, ground: Tensor, luck: Chance, scenario: Scenario
) -> tuple[Tensor, Tensor, Tensor]:
    """Whether each ray returns, its point x y z, and its intensity: (V, C, b), (V, C, b, 3), (V, C, b).

    ``hits`` is what the rays meet of the scene's bodies, ``ground`` (V, C, b) how far away in the plane they meet the ground.

    >>> from boxcov.data.simulated import draw, raycast, scene, views
    >>> street = scene.stack([scene.build(Draw(draw.generator(0, 0, "cpu")), Scenario())], "cpu")
    >>> luck = chance([Draw(draw.generator(0, 1, "cpu"))], 1, 1080, 32)
    >>> rays, _ = views.fan(street, 1, luck.phase, 1)
    >>> hits = raycast.cast(rays, views.prisms(street, 1), luck.penetration, 70.0)
    >>> returned, points, intensity = measure(rays, street, hits, torch.full_like(luck.lost, torch.inf), luck, Scenario())
    >>> points.shape, bool((intensity[returned] <= 255).all())
    (torch.Size([1, 1080, 32, 3]), True)
    """
    floor = ground <= hits.distance
    flat = 1 / (1 + fan.tangents.square()).sqrt()  # cosine of the elevation
    distance = torch.minimum(ground, hits.distance).clamp(
        max=1e4
    )  # in the plane; rays into the sky are out of reach
    reflectivity = torch.where(
        floor, _floor(fan, scene, distance, scenario.wet), _body(scene, hits.prism, scenario.wet)
    )
    cosine = torch.where(floor, (fan.tangents * flat).abs().expand_as(distance), hits.cosine)
    length = distance / flat  # of the ray
    fading = (-2 * scenario.extinction * length).exp()
    signal = (reflectivity * cosine * fading * (_GAIN / length).square()).clamp(min=1e-9)
    # likelihood of a return: signal^2 / (1 + signal^2), a logistic in the signal's logarithm
    likely = signal.square() / (1 + signal.square()) * (1 - scenario.dropout)
    returned = (luck.lost < likely) & (length < scenario.reach)
    brightness = reflectivity * (0.4 + 0.6 * cosine) * fading
    drop = 1 + luck.drop * scenario.scatter_distance
    scattered = (luck.scattered < scenario.scatter) & (drop < length) & (drop < scenario.reach)
    length, brightness = (
        torch.where(scattered, drop, length),
        torch.where(scattered, _DROP, brightness),
    )
    distance = (length + scenario.noise * luck.noise).clamp(min=0.05) * flat
    intensity = (255 * brightness * (0.2 * luck.flicker).exp()).round().clamp(0, 255)
    angle = fan.angles()[..., None]
    x, y, z = (fan.origins[:, i, None, None] for i in range(3))
    points = torch.stack(
        [x + distance * angle.cos(), y + distance * angle.sin(), z + distance * fan.tangents], -1
    )
    return returned | scattered, points, intensity


def _body(scene: Scene, prism: Tensor, wet: bool) -> Tensor:
    frames, parts = scene.owner.shape
    first = (
        torch.arange(frames, device=prism.device).repeat_interleave(len(prism) // frames) * parts
    )
    # rays that meet nothing read the first part; they are out of reach
    reflectivity = scene.surface[..., 1].flatten()[prism.clamp(min=0) + first[:, None, None]]
    return reflectivity * (0.8 if wet else 1.0)


def _floor(fan: Fan, scene: Scene, distance: Tensor, wet: bool) -> Tensor:
    """Reflectivity of the ground: asphalt with lane markings, and pavement beside it."""
    sweeps = len(distance) // len(scene.road)
    heading, ego, edge, crossing = scene.road.repeat_interleave(sweeps, 0)[:, :, None, None].unbind(
        1
    )
    angle = fan.angles()[..., None] - heading
    ox, oy = fan.origins[:, 0, None, None], fan.origins[:, 1, None, None]
    s = ox * heading.cos() + oy * heading.sin() + distance * angle.cos()
    t = oy * heading.cos() - ox * heading.sin() + ego + distance * angle.sin()
    open_road = (s - crossing).abs() > 2 * LANE
    line = (t - LANE * (t / LANE).round()).abs() < 0.09
    dashed = torch.remainder(s, 9.0) < 4.0
    border = t.abs() > edge - 0.5 * LANE
    reflectivity = torch.where((t.abs() > edge + 0.1) & open_road, _PAVEMENT, _ASPHALT)
    reflectivity = torch.where(
        line & (dashed | border) & (t.abs() < edge + 0.1) & open_road, _MARKING, reflectivity
    )
    return reflectivity * (0.3 if wet else 1.0)
