"""Drives: one street over time, seen from a moving ego car, as frames with identities."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

import torch
from torch import Tensor

from boxcov.data.poses import Pose, into_axes, rotation_matrix
from boxcov.data.sequence import FrameSequence
from boxcov.data.simulated.layout import Placement
from boxcov.data.simulated.rng import make_rng
from boxcov.data.simulated.scenarios import Scenario
from boxcov.data.simulated.scene import Scene, Street, assemble, draw_street, is_free, stack
from boxcov.data.simulated.sensor import SENSOR_HEIGHT, Frame, ground_height, observe
from boxcov.data.simulated.traffic import STEP, move

WINDOW = 61.0  # metres along the road: a frame of ``frames`` has no objects beyond it either
RATES = (1, 2, 5, 10)  # frames per second that divide the steps of the traffic
LONGEST = 120.0  # seconds
_FASTEST = 13.0  # metres per second
_NEXT = 1 << 40  # distance of random streams: those of one frame's index are below


@dataclass(frozen=True)
class World:
    """A street with everything on it, over time."""

    street: Street
    crossings: Tensor  # (c,) s
    states: Tensor  # (steps + 1, n, 5) x y yaw speed rate in the LiDAR's axes at the start


class Drive(FrameSequence):
    """The frames of one drive; made by ``sequences``.

    A target has one more entry than one of ``frames``: ``ids`` (n,), the identity of each object.
    The first frame is frame ``number`` of ``frames``.
    """

    def __init__(
        self, scenario: Scenario, number: int, *, seed: int, seconds: float, rate: int, sweeps: int
    ) -> None:
        super().__init__(ceil(round(seconds * rate, 6)))
        self.scenario, self.number, self.seed = scenario, number, seed
        self.seconds, self.rate, self.sweeps = seconds, rate, sweeps  # rate: frames per second

    def timestamp(self, item: int) -> int:
        """Return the time of a frame in microseconds, 0 at the start."""
        return round(1e6 * self.indices[item] / self.rate)

    def pose(self, item: int) -> Pose:
        """Return the pose from the LiDAR of a frame to that of the first one: the world's axes."""
        x, y, turn = self._ego(self._step(self.indices[item]))
        zero, waves = torch.zeros_like(turn), self.world.street.waves[None].double()
        z = ground_height(waves, x[None], y[None])[0] + SENSOR_HEIGHT
        quaternion = torch.stack([(turn / 2).cos(), zero, zero, (turn / 2).sin()])
        return Pose(rotation_matrix(quaternion), torch.stack([x, y, z]))

    def load(self, index: int) -> Frame:
        step = self._step(index)
        scene, ids = self.scene(step)
        rng = make_rng(self.seed, 2 * (self.number + step * _NEXT) + 1, "cpu")
        clouds, targets = observe(stack([scene], "cpu"), [rng], self.scenario, self.sweeps)
        targets[0]["ids"] = ids[targets[0].pop("rows")]
        return clouds, targets

    def scene(self, step: int) -> tuple[Scene, Tensor]:
        """Return the scene around the ego car after a step of 0.1 s, and the objects' ids (n,)."""
        street, state = self.world.street, self.world.states[step]
        x0, y0, turn = self._ego(step)
        heading = torch.tensor(street.road.heading).double()
        dx, dy = state[:, 0] - x0, state[:, 1] - y0
        near = into_axes(dx, dy, heading)[0].abs() < WINDOW
        fields = (*into_axes(dx, dy, turn), state[:, 2] - turn, state[:, 3], state[:, 4])
        placed = Placement(street.placed.kind, *(field.float() for field in fields))
        ego_s, ego_t = map(float, into_axes(x0, y0, heading))
        crossings = self.world.crossings
        crossing = crossings[(crossings - ego_s).abs().argmin()] if len(crossings) else 1e3
        axis, ego = float(heading - turn), street.road.ego + ego_t
        road = replace(street.road, heading=axis, ego=ego, crossing=float(crossing))
        waves = _seen_from(street.waves, x0, y0, turn)
        here = Street(road, placed, street.looks, waves).where(near)
        return assemble(here, self.scenario, ego_s), near.nonzero()[:, 0]

    @cached_property
    def world(self) -> World:
        """The street, long enough for the ego car, and everything on it over time."""
        first = draw_street(make_rng(self.seed, 2 * self.number, "cpu"), self.scenario)
        last = ceil((_FASTEST * self.seconds + WINDOW) / (2 * WINDOW))
        roads = [(first.road, 0.0)]
        placed, looks = first.placed, first.looks
        heading = torch.tensor(first.road.heading)
        for number in [*range(1, last + 1), -1]:
            rng = make_rng(self.seed, 2 * (self.number + (number % (last + 2)) * _NEXT), "cpu")
            more = draw_street(rng, self.scenario, along=first.road)
            shift = 2 * WINDOW * number
            roads.append((more.road, shift))
            x, y = more.placed.x + shift * heading.cos(), more.placed.y + shift * heading.sin()
            is_other = torch.arange(len(x)) > 0  # there is one ego car
            placed = placed.append(replace(more.placed, x=x, y=y).where(is_other))
            looks = looks.append(more.looks.where(is_other))
        street = Street(first.road, placed, looks, first.waves)
        street = street.where(is_free(street))
        crossings = torch.tensor([road.crossing + s for road, s in roads if road.crossing < WINDOW])
        plan = make_rng(self.seed, 2 * (self.number + (1 << 20) * _NEXT), "cpu")
        steps = ceil(round(self.seconds / STEP, 6))
        return World(street, crossings, move(street, crossings, plan, steps))

    def _ego(self, step: int) -> Tensor:
        """Return x, y and the turn since the start of the ego car."""
        return self.world.states[step, 0, :3] - self.world.states[0, 0, :3]

    def _step(self, number: int) -> int:
        return round(number / (self.rate * STEP))


def _seen_from(waves: Tensor, x: Tensor, y: Tensor, turn: Tensor) -> Tensor:
    """Return the waves (W, 4) of the ground in the axes of a sensor at x, y."""
    kx, ky, phase, amplitude = waves.double().T
    rows = (*into_axes(kx, ky, turn), phase + kx * x + ky * y, amplitude)
    return torch.stack(rows, 1).float()
