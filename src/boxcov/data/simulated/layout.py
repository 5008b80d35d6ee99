"""The layout of a street: traffic, parked cars, pedestrians, roadworks, yards and backdrop.

Objects are placed along the road first: s runs along it, t to its left, with 0 at its middle line;
traffic keeps to the right. Objects that overlap an earlier one are removed later.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import pi
from typing import TypeVar

import torch
from torch import Tensor

from boxcov.data.simulated.catalogue import KINDS
from boxcov.data.simulated.rng import Rng
from boxcov.data.simulated.scenarios import Scenario

LANE = 3.6  # metres
_END = 60.0  # the road is laid out from -60 to 60 m
_SIDES = torch.tensor([[-1.0], [1.0]])  # of the road: right, left
_ID = {kind: number for number, kind in enumerate(KINDS)}
_IN_TRAFFIC = {
    "car": 0.62,
    "truck": 0.1,
    "bus": 0.08,
    "trailer": 0.03,
    "construction_vehicle": 0.02,
    "motorcycle": 0.09,
    "bicycle": 0.06,
}
_IN_YARDS = {"trailer": 0.3, "bus": 0.17, "truck": 0.2, "construction_vehicle": 0.13, "car": 0.2}
C = TypeVar("C", bound="Columns")


@dataclass(frozen=True)
class Road:
    """The road that the ego car is on."""

    heading: float  # of the road's s axis, radians from x
    lanes: int  # in each direction
    ego: float  # t of the sensor
    crossing: float  # s of the crossing road, far away if there is none

    @property
    def edge(self) -> float:
        return self.lanes * LANE


@dataclass(frozen=True)
class Columns:
    """Tensors with one row per object, selected and joined together."""

    def where(self: C, mask: Tensor) -> C:
        return type(self)(*(getattr(self, field.name)[mask] for field in fields(self)))

    def append(self: C, *others: C) -> C:
        every = (self, *others)
        columns = (torch.cat([getattr(one, field.name) for one in every]) for field in fields(self))
        return type(self)(*columns)


@dataclass(frozen=True)
class Placement(Columns):
    """Kinds and poses of n objects; every field is (n,). In road coordinates x is s and y is t."""

    kind: Tensor
    x: Tensor
    y: Tensor
    yaw: Tensor
    speed: Tensor  # along yaw, metres per second
    rate: Tensor  # of yaw, radians per second


def lay_out(rng: Rng, scenario: Scenario, along: Road | None = None) -> tuple[Road, Placement]:
    """Draw a road and all objects in LiDAR coordinates (x right, y forward), ego car first.

    ``along`` is a road to continue: only the crossing is drawn.
    """
    road = _road(rng)
    if along is not None:
        road = replace(along, crossing=road.crossing)
    traffic = _traffic(rng, road)
    others = [*_roadworks(rng, road), _people(rng, road, scenario.people)]
    others += [_cycles(rng, road, scenario.people), _parked(rng, road)]
    objects = traffic.append(*others, *_yards(rng, road), *_backdrop(rng, road))
    # off the road, the crossing road stays free
    is_apart = (objects.x - road.crossing).abs() > 2 * LANE
    objects = objects.where((objects.y.abs() < road.edge) | is_apart)
    ego, crossing = _ego(rng, road), _crossing_traffic(rng, road)
    return road, ego.append(_to_lidar(road, crossing.append(objects)))


def _road(rng: Rng) -> Road:
    bend = rng.number(-0.7, 0.7) if rng.flag(0.2) else float(rng.normal(0, 0.04))
    lanes = 2 if rng.flag(0.5) else 1
    ego = -LANE * (0.5 + (lanes - 1) * float(rng.flag(0.5))) + float(rng.normal(0, 0.2))
    crossing = rng.number(-40, 40) if rng.flag(0.45) else 1e3
    return Road(pi / 2 + bend, lanes, ego, crossing)


def _ego(rng: Rng, road: Road) -> Placement:
    moving = float(rng.flag(0.75))
    speed = moving * rng.uniform(1, 13, 1)
    rate = moving * (rng.normal(0, 0.03, 1) + 0.3 * (road.heading - pi / 2))
    zero = torch.zeros(1)
    return Placement(torch.tensor([_ID["ego"]]), zero, zero, zero + pi / 2, speed, rate)


def _traffic(rng: Rng, road: Road) -> Placement:
    slots, lanes = 9, 2 * road.lanes
    # -1: right, in the ego car's direction
    side = _SIDES.repeat(road.lanes, 1)
    t = side * LANE * (0.5 + torch.arange(lanes)[:, None] // 2) + rng.normal(0, 0.2, lanes, slots)
    s = torch.arange(slots) * 13.5 - 54 + rng.uniform(-3.5, 3.5, lanes, slots)
    speed = rng.uniform(2, 14, lanes, 1) * rng.chance(0.7, lanes, 1)  # of a lane
    speed = speed * rng.uniform(0.9, 1.1, lanes, slots)
    kind = _kinds(rng, _IN_TRAFFIC, lanes * slots)
    yaw = (side > 0) * pi + rng.normal(0, 0.03, lanes, slots)
    return _moving(rng, kind, s, t, yaw, speed).where(rng.chance(0.42, lanes * slots))


def _crossing_traffic(rng: Rng, road: Road) -> Placement:
    if road.crossing > _END:
        none = torch.zeros(0)
        return _standing(none.long(), none, none, none)
    t = torch.arange(8) * 13 - 45 + rng.uniform(-3.5, 3.5, 2, 8)
    s = road.crossing + _SIDES * LANE / 2 + rng.normal(0, 0.15, 2, 8)
    speed = rng.uniform(1, 10, 2, 8) * rng.chance(0.6, 2, 1)
    shares = {"car": 0.68, "truck": 0.1, "bus": 0.07, "motorcycle": 0.09, "bicycle": 0.06}
    kind = _kinds(rng, shares, 16)
    placed = _moving(rng, kind, s, t, _SIDES * pi / 2 + rng.normal(0, 0.03, 2, 8), speed)
    return placed.where(rng.chance(0.4, 16) & (placed.y.abs() > road.edge + 3))


def _parked(rng: Rng, road: Road) -> Placement:
    slots = 17
    s = torch.arange(slots) * 6.9 - 55 + rng.uniform(-0.5, 0.5, 2, slots)
    t = _SIDES * (road.edge + 1.3 + rng.normal(0, 0.12, 2, slots).abs())
    yaw = (_SIDES > 0) * pi * rng.chance(0.8, 2, 1) + rng.normal(0, 0.03, 2, slots)
    shares = {"car": 0.84, "truck": 0.08, "motorcycle": 0.04, "trailer": 0.02, "bus": 0.02}
    kind = _kinds(rng, shares, 2 * slots)
    full = rng.uniform(-0.35, 0.7, 2, 1).expand(2, slots).flatten()
    return _standing(kind, s, t, yaw).where(rng.chance(full, 2 * slots))


def _people(rng: Rng, road: Road, many: float) -> Placement:
    n = int(rng.number(8, 20) * many)
    # in groups: each near one of n / 2 meeting points
    groups = max(1, n // 2)
    member = torch.randint(groups, (n,), generator=rng.generator)
    on_road = rng.chance(0.15, groups)
    s = rng.uniform(-40, 40, groups)[member] + rng.normal(0, 0.9, n)
    off_road = rng.sign(groups) * (road.edge + rng.uniform(2.8, 6.5, groups))
    middle = torch.where(on_road, rng.uniform(-road.edge, road.edge, groups), off_road)
    t = middle[member] + rng.normal(0, 0.6, n)
    along = rng.chance(0.5, groups)[member] * pi
    yaw = torch.where(on_road[member], along + pi / 2, along) + rng.normal(0, 0.25, n)
    yaw = torch.where(rng.chance(0.2, n), rng.uniform(-pi, pi, n), yaw)
    walking = rng.chance(0.7, groups)[member]
    kind = torch.full((n,), _ID["pedestrian"])
    return _moving(rng, kind, s, t, yaw, walking * rng.normal(1.3, 0.25, n).clamp(0.5, 2.2))


def _cycles(rng: Rng, road: Road, many: float) -> Placement:
    n = int(rng.number(4, 8) * (1 + many) / 2)
    side = rng.sign(n)
    riding = rng.chance(0.5, n)
    s = rng.uniform(-42, 42, n)
    t = side * (road.edge + torch.where(riding, rng.uniform(-0.9, -0.2, n), rng.uniform(2.6, 6, n)))
    yaw = torch.where(riding, (side > 0) * pi + rng.normal(0, 0.06, n), rng.uniform(-pi, pi, n))
    kind = _kinds(rng, {"bicycle": 0.55, "motorcycle": 0.45}, n)
    return _moving(rng, kind, s, t, yaw, riding * rng.uniform(2, 7, n))


def _roadworks(rng: Rng, road: Road) -> list[Placement]:
    """Return rows of cones and barriers with machines between them, on one side of the road."""
    if rng.flag(0.15):
        return []
    side, s0 = float(rng.sign()), rng.number(-28, 28)
    t0 = side * (road.edge + rng.number(-1.5, 5.0))
    cones = _rows(rng, "traffic_cone", (s0, t0), rng.number(1.4, 4.0), 0.0)
    barriers = _rows(rng, "barrier", (s0, t0), 2.95, pi / 2)
    n = 3
    kind = _kinds(rng, {"construction_vehicle": 0.75, "truck": 0.25}, n)
    s, t = s0 + rng.uniform(-14, 14, n), t0 + side * rng.uniform(2, 12, n)
    machines = _standing(kind, s, t, rng.uniform(-pi, pi, n)).where(rng.chance(0.55, n))
    return [cones, barriers, machines]


def _rows(rng: Rng, kind: str, middle: tuple[float, float], gap: float, turn: float) -> Placement:
    """Return two rows of up to 8 objects, ``gap`` apart, with yaw ``turn`` to their row."""
    rows, most, (s0, t0) = 2, 8, middle
    step = torch.arange(most)[None]
    direction = torch.where(
        rng.chance(0.7, rows, 1), rng.normal(0, 0.12, rows, 1), rng.uniform(-pi, pi, rows, 1)
    )
    along = (step - most / 2) * gap
    s = s0 + rng.uniform(-16, 16, rows, 1) + along * direction.cos()
    s = s + rng.normal(0, 0.05, rows, most)
    t = t0 + rng.uniform(-2.5, 2.5, rows, 1) + along * direction.sin()
    t = t + rng.normal(0, 0.05, rows, most)
    there = step < rng.uniform(0.35, 1.05, rows, 1) * most
    keep = there & rng.chance(0.8, rows, 1) & rng.chance(0.95, rows, most)
    yaw = direction + turn + rng.normal(0, 0.04, rows, most)
    return _standing(torch.full((rows * most,), _ID[kind]), s, t, yaw).where(keep.flatten())


def _yards(rng: Rng, road: Road) -> list[Placement]:
    """Return parked large vehicles off the road, in bays in two rows."""
    yards = []
    for side in (-1.0, 1.0):
        if not rng.flag(0.45):
            continue
        bays, rows = 6, 2
        s = rng.number(-25, 25) + (torch.arange(bays) - bays / 2) * 4.6
        s = s + rng.normal(0, 0.2, rows, bays)
        row = road.edge + 15 + torch.arange(rows)[:, None] * 15.0
        t = side * (row + rng.normal(0, 0.4, rows, bays))
        yaw = pi / 2 * rng.sign(rows, bays) + rng.normal(0, 0.04, rows, bays)
        kind = _kinds(rng, _IN_YARDS, rows * bays)
        yards.append(_standing(kind, s, t, yaw).where(rng.chance(0.4, rows * bays)))
    return yards


def _backdrop(rng: Rng, road: Road) -> list[Placement]:
    def along_road(kind: str, n: int, near: float, far: float, share: float) -> Placement:
        gap = 2 * _END / n
        s = (torch.arange(n) + 0.5) * gap - _END + rng.uniform(-0.3, 0.3, 2, n) * gap
        t = _SIDES * (road.edge + rng.uniform(near, far, 2, n))
        every = _standing(torch.full((2 * n,), _ID[kind]), s, t, rng.normal(0, 0.03, 2, n))
        return every.where(rng.chance(share, 2 * n))

    return [
        along_road("pole", 6, 2.6, 3.2, 0.8),
        along_road("sign", 4, 2.5, 3.5, 0.5),
        along_road("bin", 8, 2.4, 6, 0.35),
        along_road("building", 7, 13, 18, 0.7),
        along_road("wall", 8, 7, 9, 0.35),
        along_road("tree", 8, 4, 9, 0.5),
        along_road("bush", 8, 4, 10, 0.45),
        along_road("building", 5, 35, 45, 0.5),
    ]


def _kinds(rng: Rng, shares: dict[str, float], count: int) -> Tensor:
    return rng.choice({_ID[kind]: share for kind, share in shares.items()}, count)


def _moving(rng: Rng, kind: Tensor, s: Tensor, t: Tensor, yaw: Tensor, speed: Tensor) -> Placement:
    x, y, yaw, speed = (field.expand(s.shape).flatten() for field in (s, t, yaw, speed))
    return Placement(kind, x, y, yaw, speed, (speed > 0) * rng.normal(0, 0.06, len(kind)))


def _standing(kind: Tensor, s: Tensor, t: Tensor, yaw: Tensor) -> Placement:
    x, y, yaw = (field.expand(s.shape).flatten() for field in (s, t, yaw))
    return Placement(kind, x, y, yaw, torch.zeros(len(kind)), torch.zeros(len(kind)))


def _to_lidar(road: Road, placed: Placement) -> Placement:
    """Transform road coordinates into LiDAR coordinates."""
    heading = torch.tensor(road.heading)
    cos, sin, s, t = heading.cos(), heading.sin(), placed.x, placed.y - road.ego
    x, y = cos * s - sin * t, sin * s + cos * t
    return replace(placed, x=x, y=y, yaw=placed.yaw + heading)
