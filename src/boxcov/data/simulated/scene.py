"""A scene: the objects of a layout with bodies and sizes, without those that overlap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from math import pi

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from boxcov.data.nuscenes.classes import CLASSES
from boxcov.data.poses import into_axes
from boxcov.data.simulated.catalogue import KINDS, read_bodies
from boxcov.data.simulated.layout import Columns, Placement, Road, lay_out
from boxcov.data.simulated.rng import Rng
from boxcov.data.simulated.scenarios import Scenario

HISTORY = 0.45  # seconds: the age of the oldest of ten sweeps, at which nothing may overlap either
_MARGIN = 0.1  # metres between objects
_WAVES = 2


@dataclass(frozen=True)
class Scene:
    """Objects and the parts of their bodies.

    A batch of scenes has one more dimension in front, padded with objects without extent.
    """

    kind: Tensor  # (n,) index into KINDS, -1 for padding
    pose: Tensor  # (n, 3) x y yaw in the key frame's LiDAR axes
    size: Tensor  # (n, 3) w l h
    motion: Tensor  # (n, 2) speed along yaw, rate of yaw; the ego car is object 0
    owner: Tensor  # (p,) the object of each part
    edges: Tensor  # (p, 6) x0 x1 y0 y1 z0 z1 in metres, in the object's axes
    surface: Tensor  # (p, 3) round, reflectivity, depth
    waves: Tensor  # (W, 4) of the ground
    road: Tensor  # (5,) heading, s and t of the ego car, edge, s of the crossing


@dataclass(frozen=True)
class _Catalogue:
    """The T bodies as tensors."""

    shares: Tensor  # (2, kinds, T) of standing and of moving objects
    sizes: Tensor  # (T, 3)
    spread: Tensor  # (T,)
    edges: Tensor  # (T, K, 6), 0 for missing parts
    surface: Tensor  # (T, K, 4) round, reflectivity, depth, shade


@dataclass(frozen=True)
class Looks(Columns):
    """The appearance of the placed objects."""

    body: Tensor  # (n,) index into the catalogue
    size: Tensor  # (n, 3)
    shade: Tensor  # (n,) logarithm of the relative brightness
    warp: Tensor  # (n, 3) deformation of each axis, -1 to 1


@dataclass(frozen=True)
class Street:
    """A road with objects that have bodies; they may still overlap."""

    road: Road
    placed: Placement
    looks: Looks
    waves: Tensor  # (W, 4) of the ground

    def where(self, mask: Tensor) -> Street:
        return replace(self, placed=self.placed.where(mask), looks=self.looks.where(mask))


def build(rng: Rng, scenario: Scenario) -> Scene:
    """Draw a scene of a scenario."""
    street = draw_street(rng, scenario)
    return assemble(street.where(is_free(street)), scenario)


def draw_street(rng: Rng, scenario: Scenario, along: Road | None = None) -> Street:
    """Draw a street; ``along`` is a road to continue."""
    road, placed = lay_out(rng, scenario, along)
    catalogue = _catalogue(scenario.unseen)
    body = torch.multinomial(
        catalogue.shares[(placed.speed > 0).long(), placed.kind], 1, generator=rng.generator
    )[:, 0]  # (n,)
    size = _sizes(rng, catalogue, body, (placed.kind < len(CLASSES)) & scenario.unseen)
    # drawn before objects are removed, so that later draws do not depend on the removed ones
    looks = Looks(body, size, rng.normal(0, 0.6, len(body)), rng.uniform(-1, 1, len(body), 3))
    return Street(road, placed, looks, _draw_waves(rng))


def assemble(street: Street, scenario: Scenario, s: float = 0.0) -> Scene:
    """Return the scene of a street seen from the ego car at ``s`` of the road."""
    catalogue, placed, looks = _catalogue(scenario.unseen), street.placed, street.looks
    if scenario.wet:
        placed, looks = _add_spray(catalogue, placed, looks)
    pose = torch.stack([placed.x, placed.y, placed.yaw], 1)
    motion = torch.stack([placed.speed, placed.rate], 1)
    owner, edges, surface = _parts(catalogue, looks)
    road = street.road
    line = torch.tensor([road.heading, s, road.ego, road.edge, road.crossing])
    return Scene(placed.kind, pose, looks.size, motion, owner, edges, surface, street.waves, line)


def stack(scenes: Sequence[Scene], device: str | torch.device) -> Scene:
    """Return scenes as one padded batch on a device."""
    merged = {}
    for name in (field.name for field in fields(Scene)):
        columns, padding = [getattr(scene, name) for scene in scenes], -1 if name == "kind" else 0
        merged[name] = pad_sequence(columns, True, padding).to(device, non_blocking=True)
    return Scene(**merged)


def _sizes(rng: Rng, catalogue: _Catalogue, body: Tensor, odd: Tensor) -> Tensor:
    n, spread = len(body), catalogue.spread[body, None]
    # half of the variation is common to all three sides
    factor = 1 + spread * 0.7 * (rng.normal(0, 1, n, 1) + rng.normal(0, 1, n, 3)).clamp(-2.5, 2.5)
    is_small = rng.chance(0.5, n, 1)
    factor_unseen = torch.where(is_small, rng.uniform(0.6, 0.8, n, 1), rng.uniform(1.25, 1.6, n, 1))
    sizes = catalogue.sizes[body] * factor.clamp(min=0.3)
    return sizes * torch.where(odd[:, None], factor_unseen, 1.0)


def is_free(street: Street) -> Tensor:
    """Return which objects overlap no earlier one, now and at the oldest sweep."""
    placed = street.placed
    half = outlines(street) + _MARGIN / 2
    yaw = placed.yaw - placed.rate * HISTORY
    way = (placed.yaw + yaw) / 2
    x = placed.x - HISTORY * placed.speed * way.cos()
    y = placed.y - HISTORY * placed.speed * way.sin()
    now = torch.stack([placed.x, placed.y, placed.yaw], 1)
    then = torch.stack([x, y, yaw], 1)
    hit = overlap(now, half, now, half) | overlap(then, half, then, half)
    return ~hit.tril(-1).any(1)


def outlines(street: Street) -> Tensor:
    """Return half the width and length (n, 2) that each object takes of the ground."""
    scale = torch.ones(len(KINDS))
    scale[KINDS.index("ego")] = 3.0  # its body is only the roof of the car
    scale[KINDS.index("tree")] = 0.15  # the trunk
    return street.looks.size[:, :2] * scale[street.placed.kind, None] / 2


def overlap(pose: Tensor, half: Tensor, others: Tensor, other_half: Tensor) -> Tensor:
    """Return which oriented rectangles overlap, (n, m): no axis of either separates them.

    Poses are x y yaw; the half sides are width, length.
    """
    return ~(_apart(pose, half, others, other_half) | _apart(others, other_half, pose, half).T)


def _apart(pose: Tensor, half: Tensor, others: Tensor, other_half: Tensor) -> Tensor:
    """Return which pairs (n, m) an axis of the first rectangle separates."""
    x, y, yaw = pose.T[:, :, None]
    width, length = half.T[:, :, None]
    other_width, other_length = other_half.T
    along, across = into_axes(others[:, 0] - x, others[:, 1] - y, yaw)  # (n, m)
    turn = others[:, 2] - yaw
    tc, ts = turn.cos().abs(), turn.sin().abs()
    apart_along = along.abs() > length + other_length * tc + other_width * ts
    return apart_along | (across.abs() > width + other_length * ts + other_width * tc)


def _add_spray(catalogue: _Catalogue, placed: Placement, looks: Looks) -> tuple[Placement, Looks]:
    """Add a cloud of spray behind each moving vehicle."""
    vehicle = (placed.kind < KINDS.index("barrier")) & (placed.speed > 3)
    cars, clouds = placed.where(vehicle), looks.where(vehicle)
    length = 2 + 0.4 * cars.speed
    back = (clouds.size[:, 1] + length) / 2
    kind = torch.full_like(cars.kind, KINDS.index("spray"))
    x, y = cars.x - back * cars.yaw.cos(), cars.y - back * cars.yaw.sin()
    spray = replace(cars, kind=kind, x=x, y=y)
    size = torch.stack([clouds.size[:, 0] * 1.1, length, torch.full_like(length, 1.3)], 1)
    plume = int(catalogue.shares[1, KINDS.index("spray")].argmax())
    clouds = replace(clouds, body=torch.full_like(kind, plume), size=size)
    return placed.append(spray), looks.append(clouds)


def _parts(catalogue: _Catalogue, looks: Looks) -> tuple[Tensor, Tensor, Tensor]:
    """Return the parts of all bodies: owner (p,), edges in metres (p, 6) and surface (p, 3)."""
    edges = catalogue.edges[looks.body]  # (n, K, 6)
    surface = catalogue.surface[looks.body]  # (n, K, 4)
    present = edges[..., 5] > 0  # (n, K)
    # every body is deformed a little along its axes; parts still meet, and the ends stay in place
    bend_x, bend_y, bend_z = looks.warp.T[..., None, None]
    x, y, z = edges[..., :2], edges[..., 2:4], edges[..., 4:]
    x = x + 0.3 * bend_x * (0.25 - x.square())
    y = y.sign() * 0.5 * (2 * y.abs()) ** (1 + 0.1 * bend_y)
    z = z ** (1 + 0.08 * bend_z)
    width, length, height = looks.size.T[..., None, None]
    owner = torch.arange(len(edges))[:, None].expand(present.shape)[present]
    is_round, reflectivity, depth, shade = surface.unbind(-1)
    reflectivity = (reflectivity * (looks.shade[:, None] * shade).exp()).clamp(max=1.0)
    return (
        owner,
        torch.cat([x * length, y * width, z * height], -1)[present],
        torch.stack([is_round, reflectivity, depth], -1)[present],
    )


def _draw_waves(rng: Rng) -> Tensor:
    number = 2 * pi / rng.uniform(30, 70, _WAVES)
    way = rng.uniform(-pi, pi, _WAVES)
    amplitude = rng.uniform(0.0, 0.09, _WAVES)
    return torch.stack(
        [number * way.cos(), number * way.sin(), rng.uniform(-pi, pi, _WAVES), amplitude], 1
    )


@cache
def _catalogue(unseen: bool) -> _Catalogue:
    bodies = read_bodies(unseen)
    most = max(len(body.parts) for body in bodies)
    shares = torch.zeros(2, len(KINDS), len(bodies))
    edges, surface = torch.zeros(len(bodies), most, 6), torch.zeros(len(bodies), most, 4)
    for i, body in enumerate(bodies):
        shares[:, KINDS.index(body.kind), i] = torch.tensor([body.share, body.share * body.moves])
        for j, part in enumerate(body.parts):
            edges[i, j] = torch.tensor(part[:6])
            surface[i, j] = torch.tensor([part.round, *part.material])
    sizes = torch.tensor([body.size for body in bodies])
    spread = torch.tensor([body.spread for body in bodies])
    return _Catalogue(shares, sizes, spread, edges, surface)
