"""Simulated, labelled LiDAR frames: streets seen by a rotating 32-beam sensor, as in nuScenes.

A frame holds the key sweep and the sweeps before it, each cast from the ego car's pose at its
time: standing objects are sharp, moving ones are smeared. Scenarios differ in the weather, the
sensor and the street. Frames of one seed and index show the same street in ``clear``, ``rain``,
``fog`` and ``sparse``.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

import torch

from boxcov.data.nuscenes.classes import CLASSES
from boxcov.data.sequence import FrameSequence
from boxcov.data.simulated.drive import LONGEST, RATES, Drive
from boxcov.data.simulated.scenarios import SCENARIOS
from boxcov.data.simulated.sensor import Frame, make_frames
from boxcov.errors import BoxcovError

__all__ = ["CLASSES", "SCENARIOS", "Drive", "Simulated", "frames", "sequences"]


class Simulated(FrameSequence):
    """Simulated frames; made by ``frames``. A frame depends on scenario, seed and index only."""

    def __init__(
        self, scenario: str, *, seed: int, count: int, sweeps: int, device: str | torch.device
    ) -> None:
        super().__init__(count)
        self.scenario, self.seed, self.sweeps, self.device = scenario, seed, sweeps, device

    def load(self, index: int) -> Frame:
        return make_frames(SCENARIOS[self.scenario], self.seed, [index], self.sweeps, self.device)

    def batch(self, items: Sequence[int]) -> Frame:
        """Return several frames merged into one batch: the same frames, faster on a GPU."""
        if not items:
            return [], []
        indices = [self.indices[item] for item in items]
        return make_frames(SCENARIOS[self.scenario], self.seed, indices, self.sweeps, self.device)


def frames(
    scenario: str = "clear",
    seed: int = 0,
    count: int = 100,
    sweeps: int = 10,
    device: str | torch.device = "cpu",
) -> Simulated:
    """Return ``count`` simulated frames, computed on ``device`` when they are indexed.

    ``scenario`` is ``clear``, ``rain``, ``fog``, ``sparse``, ``crowd`` or ``unseen``. A frame is
    ``(inputs, targets)``, each a list of one. The input is a point cloud (N, 5)
    ``x y z intensity dt`` in the LiDAR's coordinates at the key sweep (x right, y forward); dt is
    the age in seconds. The target is a dict: ``boxes`` (n, 9) ``x y z w l h yaw vx vy``;
    ``labels`` (n,), indices into ``CLASSES``; ``points`` (n,), the number of key sweep points in
    each box, with a tolerance of 5 cm. Objects without a point have no label.

    >>> points, targets = frames("rain", count=3, sweeps=1)[0]
    >>> points[0].shape[1], targets[0]["boxes"].shape[1]
    (5, 9)
    """
    _check(scenario, seed, sweeps, count, most=2**62)
    return Simulated(scenario, seed=int(seed), count=int(count), sweeps=int(sweeps), device=device)


def sequences(
    scenario: str = "clear",
    seed: int = 0,
    count: int = 10,
    seconds: float = 20.0,
    rate: int = 2,
    sweeps: int = 10,
) -> list[Drive]:
    """Return ``count`` simulated drives of ``seconds`` with ``rate`` (1, 2, 5 or 10) frames each.

    The ego car drives along its street. The others follow each other, stop at red lights, brake,
    turn off, hide one another, come into range and leave it. A drive is a sequence of frames as of
    ``frames``, whose targets also hold ``ids`` (n,), the identity of each object.
    ``drive.pose(item)`` leads from the LiDAR of a frame to the world, which is that of the first
    frame; ``drive.timestamp(item)`` is in microseconds.

    Drive i starts as frame i of ``frames`` with the same scenario and seed. Its frames at 2 Hz are
    among those at 10 Hz.

    >>> drive = sequences("crowd", count=2, seconds=1, sweeps=1)[1]
    >>> points, targets = drive[0]
    >>> len(drive), drive.timestamp(1), len(targets[0]["ids"]) == len(targets[0]["boxes"])
    (2, 500000, True)
    """
    _check(scenario, seed, sweeps, count, most=2**20)
    if rate not in RATES:
        raise BoxcovError(f"rate must be {', '.join(map(str, RATES))} frames per second: {rate!r}")
    if not 1 / rate <= seconds <= LONGEST:
        raise BoxcovError(f"seconds must be from {1 / rate} (one frame) to {LONGEST}: {seconds!r}")
    options = {"seed": int(seed), "rate": int(rate), "sweeps": int(sweeps)}
    return [
        Drive(SCENARIOS[scenario], number, seconds=float(seconds), **options)
        for number in range(int(count))
    ]


def _check(scenario: str, seed: int, sweeps: int, count: int, most: int) -> None:
    if scenario not in SCENARIOS:
        raise BoxcovError(f"unknown scenario {scenario!r}: choose one of {', '.join(SCENARIOS)}")
    limits = {
        "seed": (seed, 0, 2**63 - 1, "of at least 0 and below 2^63"),
        "count": (count, 0, most, f"of at least 0 and at most {most}"),
        "sweeps": (sweeps, 1, 10, "from 1 to 10 (the key sweep counts)"),
    }
    for name, (value, low, high, wanted) in limits.items():
        is_whole = isinstance(value, Integral) and not isinstance(value, bool)
        if not is_whole or not low <= value <= high:
            raise BoxcovError(f"{name} must be a whole number {wanted}, got {value!r}")
