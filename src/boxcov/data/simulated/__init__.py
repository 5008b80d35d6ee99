"""Endless simulated LiDAR frames, labelled: streets seen by a spinning 32-beam sensor, in the manner of nuScenes.

A frame holds the key sweep and those before it, each cast from where the ego car was at its time, so that what stands still is
sharp and what moves is smeared. The scenarios differ in the weather, the sensor and the street; the frames of one seed and index show
the same street in ``clear``, ``rain``, ``fog`` and ``sparse``, so that these can be compared frame by frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch

from boxcov.data.nuscenes.classes import CLASSES
from boxcov.data.simulated.frame import Frame, make
from boxcov.data.simulated.scenarios import SCENARIOS, named
from boxcov.errors import BoxcovError

__all__ = ["CLASSES", "SCENARIOS", "Simulated", "frames"]


class Simulated(Sequence[Frame]):
    """Frames made when they are asked for, each from the scenario, the seed and its index alone.

    A frame is a list of one point cloud (N, 5), ``x y z intensity dt`` in the key frame's LiDAR axes (x right, y forward; dt >= 0 seconds),
    and a list of one dict: ``boxes`` (n, 9) as x y z w l h yaw vx vy, ``labels`` (n,) index into ``CLASSES``, and ``points`` (n,), how many
    points of the key sweep lie in each box, give or take 5 cm. Objects without a point hide others but have no label.

    >>> points, targets = Simulated("clear", seed=0, count=3, sweeps=1, device="cpu")[0]
    >>> points[0].shape[1], targets[0]["boxes"].shape[1], int(targets[0]["points"].min()) > 0
    (5, 9, True)
    """

    def __init__(
        self, scenario: str, seed: int, count: int, sweeps: int, device: str | torch.device
    ) -> None:
        self.scenario, self.seed, self.size, self.sweeps, self.device = (
            scenario,
            seed,
            count,
            sweeps,
            device,
        )

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        return self.batch([range(self.size)[index]])

    def batch(self, indices: Sequence[int]) -> Frame:
        """The frames of these indices, made together and merged: the same as one by one, and faster on a GPU.

        >>> points, targets = frames(count=3, sweeps=1).batch([0, 2])
        >>> len(points), len(targets)
        (2, 2)
        """
        numbers = [range(self.size)[index] for index in indices]
        if not numbers:
            return [], []
        return make(named(self.scenario), self.seed, numbers, self.sweeps, self.device)


def frames(
    scenario: str = "clear",
    seed: int = 0,
    count: int = 100,
    sweeps: int = 10,
    device: str | torch.device = "cpu",
) -> Simulated:
    """``count`` frames of a scenario: ``clear``, ``rain``, ``fog``, ``sparse``, ``crowd`` or ``unseen``.

    >>> len(frames("rain", count=3))
    3
    >>> frames(sweeps=0)
    Traceback (most recent call last):
    ...
    boxcov.errors.BoxcovError: sweeps must be a whole number from 1 to 10 (the key sweep counts), got 0
    """
    named(scenario)
    _check("seed", seed, 0, 2**63 - 1, "of at least 0")
    _check("count", count, 0, 2**62, "of at least 0")
    _check("sweeps", sweeps, 1, 10, "from 1 to 10 (the key sweep counts)")
    return Simulated(scenario, int(seed), int(count), int(sweeps), device)


def _check(name: str, value: object, low: int, high: int, wanted: str) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        raise BoxcovError(f"{name} must be a whole number {wanted}, got {value!r}")
