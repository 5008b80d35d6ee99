"""A scene: what was laid out, given bodies and sizes, cleared of what would stand inside something else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from math import pi

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from boxcov.data.nuscenes.classes import CLASSES
from boxcov.data.simulated.catalogue import BODIES, KINDS, UNSEEN_BODIES
from boxcov.data.simulated.layout import Placed, Road, joined, lay_out
from boxcov.data.simulated.rng import Rng
from boxcov.data.simulated.scenarios import Scenario

HISTORY = (
    0.45  # seconds that nine sweeps at 20 Hz reach back: nothing may collide on the way here either
)
_MARGIN = 0.1  # metres between things
_WAVES = 2


@dataclass(frozen=True)
class Scene:
    """Objects and the parts of their bodies; a batch of scenes has a dimension more in front, padded with things of no extent."""

    kind: Tensor  # (n,) index into KINDS, -1 for padding
    pose: Tensor  # (n, 3) x y yaw in the key frame's LiDAR axes
    size: Tensor  # (n, 3) w l h
    motion: Tensor  # (n, 2) speed along yaw, rate of yaw; the ego car is object 0
    owner: Tensor  # (p,) the object a part belongs to
    edges: Tensor  # (p, 6) x0 x1 y0 y1 z0 z1 in metres, in the object's axes, z from the ground
    surface: Tensor  # (p, 3) round, reflectivity, depth
    waves: Tensor  # (W, 4) of the ground
    road: Tensor  # (4,) heading, t of the ego car, edge, s of the crossing


@dataclass(frozen=True)
class _Catalogue:
    shares: Tensor  # (2, kinds, T) of what stands and what moves
    sizes: Tensor  # (T, 3)
    spread: Tensor  # (T,)
    edges: Tensor  # (T, K, 6), 0 for parts a body does not have
    surface: Tensor  # (T, K, 4) round, reflectivity, depth, shade


@dataclass(frozen=True)
class _Things:
    """The looks of what was placed."""

    body: Tensor  # (n,) index into the catalogue
    size: Tensor  # (n, 3)
    shade: Tensor  # (n,) logarithm of how much lighter than usual
    warp: Tensor  # (n, 3) how far each axis is bent, -1 to 1

    def where(self, mask: Tensor) -> _Things:
        return _Things(self.body[mask], self.size[mask], self.shade[mask], self.warp[mask])

    def followed_by(self, other: _Things) -> _Things:
        return _Things(
            *(
                torch.cat([getattr(self, field.name), getattr(other, field.name)])
                for field in fields(self)
            )
        )


def build(rng: Rng, scenario: Scenario) -> Scene:
    """A scene of a scenario.

    >>> from boxcov.data.simulated.rng import make_rng
    >>> scene = build(make_rng(0, 0, "cpu"), Scenario())
    >>> scene.pose.shape[1], scene.edges.shape[1]
    (3, 6)
    """
    road, placed = lay_out(rng, scenario)
    catalogue = _catalogue(scenario.unseen)
    body = torch.multinomial(
        catalogue.shares[(placed.speed > 0).long(), placed.kind], 1, generator=rng.generator
    )[:, 0]  # (n,)
    size = _sizes(rng, catalogue, body, (placed.kind < len(CLASSES)) & scenario.unseen)
    # drawn before anything is taken out, so that the draws that follow do not depend on what is
    things = _Things(body, size, rng.normal(0, 0.6, len(body)), rng.uniform(-1, 1, len(body), 3))
    keep = _apart(placed, size)
    placed, things = placed.where(keep), things.where(keep)
    if scenario.wet:
        placed, things = _with_spray(catalogue, placed, things)
    owner, edges, surface = _parts(catalogue, things)
    pose, motion = (
        torch.stack([placed.x, placed.y, placed.yaw], 1),
        torch.stack([placed.speed, placed.rate], 1),
    )
    return Scene(
        placed.kind, pose, things.size, motion, owner, edges, surface, _waves(rng), _numbers(road)
    )


def stack(scenes: Sequence[Scene], device: str | torch.device) -> Scene:
    """Scenes as one batch on a device.

    >>> from boxcov.data.simulated.rng import make_rng
    >>> stack([build(make_rng(0, i, "cpu"), Scenario()) for i in range(2)], "cpu").waves.shape
    torch.Size([2, 2, 4])
    """
    padding = {"kind": -1.0}

    def merged(name: str) -> Tensor:
        return pad_sequence(
            [getattr(scene, name) for scene in scenes],
            batch_first=True,
            padding_value=padding.get(name, 0.0),
        )

    return Scene(*(merged(field.name).to(device, non_blocking=True) for field in fields(Scene)))


def _sizes(rng: Rng, catalogue: _Catalogue, body: Tensor, odd: Tensor) -> Tensor:
    n, spread = len(body), catalogue.spread[body, None]
    # as a whole and each way, in equal parts
    factor = 1 + spread * 0.7 * (rng.normal(0, 1, n, 1) + rng.normal(0, 1, n, 3)).clamp(-2.5, 2.5)
    dwarf = rng.chance(0.5, n, 1)
    giant = torch.where(dwarf, rng.uniform(0.6, 0.8, n, 1), rng.uniform(1.25, 1.6, n, 1))
    return catalogue.sizes[body] * factor.clamp(min=0.3) * torch.where(odd[:, None], giant, 1.0)


def _apart(placed: Placed, size: Tensor) -> Tensor:
    """Which things stand in nothing that was placed before them, now and when the first sweep was taken."""
    scale = torch.ones(len(KINDS))
    scale[KINDS.index("ego")], scale[KINDS.index("tree")] = (
        3.0,
        0.15,
    )  # a car below its roof, a trunk below its crown
    half = size[:, :2] * scale[placed.kind, None] / 2 + _MARGIN / 2
    now = _overlap(placed.x, placed.y, placed.yaw, half)
    yaw = placed.yaw - placed.rate * HISTORY
    way = (placed.yaw + yaw) / 2
    then = _overlap(
        placed.x - HISTORY * placed.speed * way.cos(),
        placed.y - HISTORY * placed.speed * way.sin(),
        yaw,
        half,
    )
    return ~(now | then).tril(-1).any(1)


def _overlap(x: Tensor, y: Tensor, yaw: Tensor, half: Tensor) -> Tensor:
    """Which oriented rectangles overlap, (n, n): no axis of either separates them."""
    width, length = half.unbind(1)
    cos, sin = yaw.cos(), yaw.sin()
    dx, dy = x - x[:, None], y - y[:, None]  # (n, n) from i to j
    turn = yaw - yaw[:, None]
    tc, ts = turn.cos().abs(), turn.sin().abs()
    along = (dx * cos[:, None] + dy * sin[:, None]).abs() > length[
        :, None
    ] + length * tc + width * ts
    across = (dy * cos[:, None] - dx * sin[:, None]).abs() > width[
        :, None
    ] + length * ts + width * tc
    apart = along | across
    return ~(apart | apart.T)


def _with_spray(catalogue: _Catalogue, placed: Placed, things: _Things) -> tuple[Placed, _Things]:
    """A cloud of spray follows each vehicle that moves."""
    vehicle = (placed.kind < KINDS.index("barrier")) & (placed.speed > 3)
    cars, clouds = placed.where(vehicle), things.where(vehicle)
    length = 2 + 0.4 * cars.speed
    back = (clouds.size[:, 1] + length) / 2
    kind = torch.full_like(cars.kind, KINDS.index("spray"))
    spray = Placed(
        kind,
        cars.x - back * cars.yaw.cos(),
        cars.y - back * cars.yaw.sin(),
        cars.yaw,
        cars.speed,
        cars.rate,
    )
    size = torch.stack([clouds.size[:, 0] * 1.1, length, torch.full_like(length, 1.3)], 1)
    plume = int(catalogue.shares[1, KINDS.index("spray")].argmax())
    clouds = replace(clouds, body=torch.full_like(kind, plume), size=size)
    return joined([placed, spray]), things.followed_by(clouds)


def _parts(catalogue: _Catalogue, things: _Things) -> tuple[Tensor, Tensor, Tensor]:
    """The parts of all bodies: owner (p,), edges in metres (p, 6), and surface (p, 3)."""
    edges, surface = (
        catalogue.edges[things.body],
        catalogue.surface[things.body],
    )  # (n, K, 6), (n, K, 4)
    there = edges[..., 5] > 0  # (n, K)
    # every body a little different: each axis is bent within itself, so that parts still meet and the ends stay where they are
    bend_x, bend_y, bend_z = (things.warp[:, i, None, None] for i in range(3))
    x, y, z = edges[..., :2], edges[..., 2:4], edges[..., 4:]
    x = x + 0.3 * bend_x * (0.25 - x.square())
    y = y.sign() * 0.5 * (2 * y.abs()) ** (1 + 0.1 * bend_y)
    z = z ** (1 + 0.08 * bend_z)
    width, length, height = (things.size[:, None, i, None] for i in range(3))
    owner = torch.arange(len(edges))[:, None].expand(there.shape)[there]
    is_round, reflectivity, depth, shade = surface.unbind(-1)
    reflectivity = (reflectivity * (things.shade[:, None] * shade).exp()).clamp(max=1.0)
    return (
        owner,
        torch.cat([x * length, y * width, z * height], -1)[there],
        torch.stack([is_round, reflectivity, depth], -1)[there],
    )


def _waves(rng: Rng) -> Tensor:
    number = 2 * pi / rng.uniform(30, 70, _WAVES)
    way = rng.uniform(-pi, pi, _WAVES)
    amplitude = rng.uniform(0.0, 0.09, _WAVES)
    return torch.stack(
        [number * way.cos(), number * way.sin(), rng.uniform(-pi, pi, _WAVES), amplitude], 1
    )


def _numbers(road: Road) -> Tensor:
    return torch.tensor([road.heading, road.ego, road.edge, road.crossing])


@cache
def _catalogue(unseen: bool) -> _Catalogue:
    bodies = UNSEEN_BODIES if unseen else BODIES
    most = max(len(body.parts) for body in bodies)
    shares = torch.zeros(2, len(KINDS), len(bodies))
    edges, surface = torch.zeros(len(bodies), most, 6), torch.zeros(len(bodies), most, 4)
    for i, body in enumerate(bodies):
        shares[:, KINDS.index(body.kind), i] = torch.tensor([body.share, body.share * body.moves])
        for j, part in enumerate(body.parts):
            edges[i, j] = torch.tensor(part[:6])
            surface[i, j] = torch.tensor([part.round, *part.material])
    sizes, spread = (
        torch.tensor([body.size for body in bodies]),
        torch.tensor([body.spread for body in bodies]),
    )
    return _Catalogue(shares, sizes, spread, edges, surface)
