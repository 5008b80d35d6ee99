"""The scenarios: weather, sensor and street."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Scenario:
    """The settings of a scenario; the defaults are a clear day."""

    beam_step: int = 1  # every n-th of the 32 beams
    reach: float = 70.0  # metres: the largest range of a return
    dropout: float = 0.03  # share of returns that are lost
    noise: float = 0.02  # metres, standard deviation of a range
    extinction: float = 0.0  # 1 / metres, of the air, one way
    scatter: float = 0.0  # share of rays that may meet a drop of rain or fog
    scatter_distance: float = 5.0  # metres, mean distance of the drop beyond the first metre
    wet: bool = False  # dark, mirror-like ground, and spray behind moving vehicles
    people: float = 1.0  # pedestrians and cycles, relative to a clear day
    unseen: bool = False  # bodies and sizes that no other scenario has


SCENARIOS = {
    "clear": Scenario(),
    "rain": Scenario(
        reach=55.0,
        dropout=0.12,
        noise=0.03,
        extinction=0.008,
        scatter=0.02,
        scatter_distance=8.0,
        wet=True,
    ),
    # 150 m of visibility (3 / extinction: Koschmieder's law at a contrast of 5 %), and
    # back-scatter within a few metres of the sensor
    "fog": Scenario(dropout=0.05, noise=0.03, extinction=0.02, scatter=0.1, scatter_distance=1.5),
    "sparse": Scenario(beam_step=2),
    "crowd": Scenario(people=9.0),
    "unseen": Scenario(unseen=True),
}
