"""How the objects of a street move.

Vehicles and cycles keep to their line, follow the one ahead, stop at red lights, and some brake or
turn off at a crossing. Pedestrians walk, pause and go on in another direction. Nothing overlaps:
whatever would run into something stands still for that step.
"""

from __future__ import annotations

from math import pi

import torch
from torch import Tensor

from boxcov.data.poses import into_axes, wrap_angle
from boxcov.data.simulated.catalogue import KINDS
from boxcov.data.simulated.layout import LANE
from boxcov.data.simulated.rng import Rng
from boxcov.data.simulated.scene import Street, outlines, overlap

STEP = 0.1  # seconds
_LOOK_AHEAD = 40.0  # metres
_HEADWAY, _SPACE = 1.2, 2.0  # seconds and metres to the one ahead
_ACCELERATION, _BRAKING, _HARDEST = 1.8, 2.5, 7.0  # metres per second squared
_GREEN, _CLEAR = 8.0, 2.5  # seconds of a green light, and with every light red
_ON_WHEELS = [KINDS.index(k) for k in ("car", "truck", "bus", "trailer", "construction_vehicle")]


def move(street: Street, crossings: Tensor, rng: Rng, steps: int) -> Tensor:
    """Return x y yaw speed rate of every object after 0 ... ``steps`` steps, (steps + 1, n, 5).

    ``crossings`` (c,) are the s of the crossing roads. Motion is that of the last step.
    """
    traffic = Traffic(street, crossings, rng, seconds=steps * STEP)
    states = [traffic.state.clone()]
    for step in range(steps):
        traffic.advance(step * STEP)
        states.append(traffic.state.clone())
    return torch.stack(states)


class Traffic:
    """The state of all n objects, and what each of the m that can move wants."""

    def __init__(self, street: Street, crossings: Tensor, rng: Rng, seconds: float) -> None:
        placed = street.placed
        columns = (placed.x, placed.y, placed.yaw, placed.speed, placed.rate)
        self.state = torch.stack(columns, 1).double()  # (n, 5)
        self.road, self.crossings = street.road, crossings.double()
        self.heading = torch.tensor(street.road.heading).double()
        self.half = outlines(street).double()  # (n, 2)
        self.half[0] = torch.tensor([1.0, 2.4])  # its outline keeps a distance at the start
        can_move = _can_move(street)
        self.obstacles = _on_road(street, 2.5) & ~can_move  # (n,)
        self.movers = can_move.nonzero()[:, 0]  # (m,), the ego car first
        self.walks = placed.kind[self.movers] == KINDS.index("pedestrian")
        self.line = self._first_lines()  # (m, 3) x y heading to follow
        m = len(self.movers)
        self.offset = torch.zeros(m).double()  # to the left of the line, to pass an obstacle
        speed, cruise = self.state[self.movers, 3], rng.uniform(4, 12, m).double()
        cruise = torch.where(self.walks, 1.3, cruise)
        self.cruise = torch.where(speed > 0, speed.clamp(min=0.5), cruise)
        self.cruise[0] = torch.maximum(speed[0], cruise[0])  # the ego car does not creep
        self.start = torch.where(speed > 0, 0.0, rng.uniform(0, 8, m).double())
        pause = rng.uniform(0, 1, m).double() * max(seconds, 20.0)
        length = torch.where(rng.chance(0.35, m), rng.uniform(2, 5, m).double(), 0.0)
        self.pause = torch.stack([pause, pause + length], 1)  # (m, 2) from and to, in seconds
        turn = torch.where(rng.chance(0.4, m), rng.sign(m).double(), 0.0)  # 1: left, -1: right
        angle = rng.normal(0, 0.9, m).double()  # of a pedestrian after a pause, radians
        self.turn = torch.where(self.walks, angle, turn)
        self.turn[0] = self.pause[0, 1] = 0.0  # the street is laid out along the ego car's way
        self.lights = rng.uniform(0, 2 * (_GREEN + _CLEAR), len(crossings)).double()

    def _first_lines(self) -> Tensor:
        """Return the lines (m, 3): those of pedestrians as they walk, of others along a lane."""
        self.line = line = self.state[self.movers, :3]
        lane = self.heading + (wrap_angle(line[:, 2] - self.heading) / (pi / 2)).round() * (pi / 2)
        line[:, 2] = torch.where(self.walks, line[:, 2], lane)
        _, t, direction = self._road_position()
        centre = t.sign() * ((t.abs() / LANE).floor() + 0.5) * LANE
        # cycles keep to the edge of their lane
        centred = (self.half[self.movers, 0] > 0.8) & (direction != 0) & (t.abs() < self.road.edge)
        shift = torch.where(centred & ~self.walks, centre - t, 0.0)
        line[:, 0] -= shift * self.heading.sin()
        line[:, 1] += shift * self.heading.cos()
        return line

    def advance(self, time: float) -> None:
        """Move everything by one step."""
        self._choose_lines(time)
        self._pass_obstacles()
        old = self.state
        pose, speed = old[self.movers, :3], old[self.movers, 3]
        speed = (speed + STEP * self._acceleration(time)).clamp(min=0)
        rate = self._steering(speed)
        way = pose[:, 2] + rate * STEP / 2
        x, y = pose[:, 0] + speed * STEP * way.cos(), pose[:, 1] + speed * STEP * way.sin()
        new = old.clone()
        new[self.movers] = torch.stack([x, y, pose[:, 2] + rate * STEP, speed, rate], 1)
        stuck = self._hits(new, old)  # not the one that is run into
        while True:
            rows = self.movers[stuck]
            new[rows, :3], new[rows, 3:] = old[rows, :3], 0.0
            hit = self._hits(new, new) & ~stuck
            if not bool(hit.any()):
                break
            stuck |= hit
        self.state = new
        turned = stuck & self.walks
        self.line[turned] = new[self.movers[turned], :3] + torch.tensor([0.0, 0.0, 2.0]).double()

    def _hits(self, state: Tensor, others: Tensor) -> Tensor:
        """Return which movers overlap anything in the state ``others``, (m,)."""
        rows = self.movers
        hit = overlap(state[rows, :3], self.half[rows], others[:, :3], self.half)
        hit[torch.arange(len(rows)), rows] = False
        return hit.any(1)

    def _choose_lines(self, time: float) -> None:
        """Let pedestrians turn after their pause, and vehicles at their crossing."""
        now = (self.pause[:, 1] > self.pause[:, 0]) & (self.pause[:, 1] - time).abs().le(STEP / 2)
        walkers = now & self.walks
        self.line[walkers, :2] = self.state[self.movers[walkers], :2]
        self.line[walkers, 2] += self.turn[walkers]
        s, t, direction = self._road_position()
        along = self.walks & (t.abs() < self.road.edge) & (direction != 0)
        self.line[along, :2] = self.state[self.movers[along], :2]
        self.line[along, 2] = self.road.heading + pi / 2 * t[along].sign()  # off the road
        if not len(self.crossings):
            return
        heading = direction * self.turn * (pi / 2)  # relative to the road
        lane = self.crossings + heading.sign()[:, None] * LANE / 2  # (m, c) keep to the right
        ahead = direction[:, None] * (lane - s[:, None])
        nearest, which = ahead.where(ahead > 0, torch.inf).min(1)
        turns = (self.turn != 0) & ~self.walks & (direction != 0) & (nearest < 6.0)
        point = lane.gather(1, which[:, None])[:, 0]
        x, y = point * self.heading.cos(), point * self.heading.sin()
        line = torch.stack([x, y, heading + self.road.heading], 1)
        self.line[turns], self.turn[turns] = line[turns], 0.0

    def _pass_obstacles(self) -> None:
        """Choose the smallest offset from each line that leads past the obstacles ahead."""
        things, half = self.state[self.obstacles], self.half[self.obstacles]
        x0, y0, heading = self.line.T[:, :, None]
        x, y = self.state[self.movers, :2].T[:, :, None]
        turn = things[:, 2] - heading  # (m, k)
        along, _ = into_axes(things[:, 0] - x, things[:, 1] - y, heading)
        _, across = into_axes(things[:, 0] - x0, things[:, 1] - y0, heading)
        ahead = (along > -8.0) & (along < 25.0) & ~self.walks[:, None]
        reach = half[:, 1] * turn.sin().abs() + half[:, 0] * turn.cos().abs()
        reach = (reach + self.half[self.movers, :1] + 0.5).where(ahead, -1.0)
        _, t, direction = self._road_position()
        _, away = into_axes(x - x0, y - y0, heading)
        line_t = direction * t - away[:, 0]  # of the line, to the left of the mover
        shifts = [0.0, 0.7, -0.7, 1.4, -1.4, 2.1, -2.1, 2.8, -2.8, 3.5, -3.5]
        chosen, is_open = torch.zeros_like(self.offset), torch.zeros_like(self.walks)
        for shift in shifts:
            fits = (line_t + shift).abs() < self.road.edge - self.half[self.movers, 0]
            clear = ~((across - shift).abs() < reach).any(1) & (fits | (shift == 0.0))
            chosen = torch.where(clear & ~is_open & (direction != 0), shift, chosen)
            is_open |= clear
        self.offset += (chosen - self.offset).clamp(-STEP, STEP)

    def _road_position(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return s, t and the direction along the road (-1, 0 or 1) of each mover."""
        x, y = self.state[self.movers, :2].T
        s, t = into_axes(x, y, self.heading)
        cos = (self.line[:, 2] - self.heading).cos()
        return s, t + self.road.ego, cos.sign().where(cos.abs() > 0.7, 0.0)

    def _acceleration(self, time: float) -> Tensor:
        """Return the acceleration of the intelligent driver model, (m,)."""
        speed = self.state[self.movers, 3]
        gap, closing = self._ahead()
        light = self._red_light(time)
        closing = torch.where(light < gap, speed, closing)
        gap = torch.minimum(gap, light).clamp(min=0.1)
        waits = (time < self.start) | ((self.pause[:, 0] <= time) & (time < self.pause[:, 1]))
        wanted = torch.where(self.turn != 0, self.cruise.clamp(max=7.0), self.cruise)
        free = 1 - (speed / wanted) ** 4
        root = 2 * (_ACCELERATION * _BRAKING) ** 0.5
        space = _SPACE + (speed * _HEADWAY + speed * closing / root).clamp(min=0)
        push = torch.where(self.walks, 0.0, (space / gap).square())
        wish = torch.where(waits, -_BRAKING, _ACCELERATION * (free - push))
        return wish.clamp(-_HARDEST, _ACCELERATION)

    def _ahead(self) -> tuple[Tensor, Tensor]:
        """Return the gap to what is ahead in the way of each mover, and the closing speed."""
        rows = self.movers
        x, y, yaw, speed, rate = self.state[rows].T[:, :, None]
        other = self.state
        along, across = into_axes(other[:, 0] - x, other[:, 1] - y, yaw)  # (m, n)
        turn = other[:, 2] - yaw
        across = across - 0.5 * rate / speed.clamp(min=2.0) * along.square()  # along the arc
        tc, ts = turn.cos().abs(), turn.sin().abs()
        width, length = self.half.T
        gap = along - self.half[rows, 1:] - length * tc - width * ts
        reach = self.half[rows, :1] + length * ts + width * tc + 0.1
        blocks = (across.abs() < reach) & (gap > -0.5) & (gap < _LOOK_AHEAD)
        blocks[torch.arange(len(rows)), rows] = False
        nearest, which = gap.where(blocks, torch.inf).min(1)
        other_speed = (other[:, 3] * turn.cos()).gather(1, which[:, None])
        return nearest, self.state[rows, 3] - other_speed[:, 0]

    def _red_light(self, time: float) -> Tensor:
        """Return the way to the next red light, (m,); infinite without one."""
        if not len(self.crossings):
            return torch.full((len(self.movers),), torch.inf).double()
        s, t, direction = self._road_position()
        phase = torch.remainder(time + self.lights, 2 * (_GREEN + _CLEAR))  # (c,)
        main, cross = phase < _GREEN, (phase > _GREEN + _CLEAR) & (phase < 2 * _GREEN + _CLEAR)
        from_s = direction[:, None] * (self.crossings - s[:, None]) - 2 * LANE - 2.0
        over = (self.line[:, 2] - self.road.heading).sin().sign() * t
        from_t = (-over - self.road.edge - 2.0)[:, None].expand_as(from_s)
        on_cross = (s[:, None] - self.crossings).abs() < 2 * LANE
        is_red = torch.where(direction[:, None] != 0, ~main, ~cross & on_cross)
        way = torch.where(direction[:, None] != 0, from_s, from_t) - self.half[self.movers, 1:]
        speed = self.state[self.movers, 3:4]
        in_time = (way > speed.square() / (2 * _HARDEST)) & (way < _LOOK_AHEAD)
        return way.where(is_red & in_time & ~self.walks[:, None], torch.inf).amin(1)

    def _steering(self, speed: Tensor) -> Tensor:
        """Return the rate of yaw (m,) that leads back to the line."""
        x, y, yaw, _, rate = self.state[self.movers].T
        x0, y0, heading = self.line.T
        off = into_axes(x - x0, y - y0, heading)[1] - self.offset
        wanted = heading - torch.atan(off / speed.clamp(min=4.0))
        most = torch.where(self.walks, 2.0, speed / 5.0).clamp(max=1.5)  # a turning circle of 5 m
        target = wrap_angle(wanted - yaw)
        target = torch.minimum(torch.maximum(1.5 * target, -most), most)
        step = rate + (target - rate).clamp(-3.0 * STEP, 3.0 * STEP)
        return torch.where(speed > 0, torch.minimum(torch.maximum(step, -most), most), 0.0)


def _can_move(street: Street) -> Tensor:
    """Return which objects can move: those that do, the ego car, vehicles and people in a lane."""
    placed = street.placed
    in_lane = _on_road(street, -1.0) & ((placed.yaw - street.road.heading).sin().abs() < 0.2)
    wheels = torch.isin(placed.kind, torch.tensor(_ON_WHEELS))
    walks = placed.kind == KINDS.index("pedestrian")
    can = (placed.speed > 0) | (wheels & in_lane) | (walks & _on_road(street, 0.5))
    can[0] = True
    return can


def _on_road(street: Street, margin: float) -> Tensor:
    """Return which objects are on the road, (n,)."""
    heading = torch.tensor(street.road.heading)
    _, t = into_axes(street.placed.x, street.placed.y, heading)
    return (t + street.road.ego).abs() < street.road.edge + margin
