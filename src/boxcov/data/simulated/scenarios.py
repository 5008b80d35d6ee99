"""The scenarios: what the weather, the sensor and the street are like."""

from __future__ import annotations

from dataclasses import dataclass

from boxcov.errors import BoxcovError


@dataclass(frozen=True)
class Scenario:
    """What sets a scenario apart; the defaults are a clear day.

    >>> Scenario(beam_step=2).reach
    70.0
    """

    beam_step: int = 1  # every n-th of the 32 beams
    reach: float = 70.0  # metres beyond which nothing comes back
    dropout: float = 0.03  # share of good returns that are lost all the same
    noise: float = 0.02  # metres, standard deviation of a range
    extinction: float = 0.0  # 1 / metres, of the air, one way
    scatter: float = 0.0  # share of rays that meet a drop or a bank of fog
    scatter_distance: float = 5.0  # metres, mean distance at which they do, beyond the first metre
    wet: bool = False  # dark, mirror-like ground, and spray behind what moves
    people: float = 1.0  # pedestrians and cycles, relative to a clear day
    unseen: bool = False  # bodies and sizes of no other scenario


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
    # 150 m of visibility (3 / extinction, Koschmieder's law at a contrast of 5 %), back-scatter within a few metres of the sensor
    "fog": Scenario(dropout=0.05, noise=0.03, extinction=0.02, scatter=0.1, scatter_distance=1.5),
    "sparse": Scenario(beam_step=2),
    "crowd": Scenario(people=9.0),
    "unseen": Scenario(unseen=True),
}


def named(name: str) -> Scenario:
    """The scenario of that name.

    >>> named("sparse").beam_step
    2
    >>> named("snow")
    Traceback (most recent call last):
    ...
    boxcov.errors.BoxcovError: unknown scenario 'snow': choose one of clear, rain, fog, sparse, crowd, unseen
    """
    if name not in SCENARIOS:
        raise BoxcovError(f"unknown scenario {name!r}: choose one of {', '.join(SCENARIOS)}")
    return SCENARIOS[name]
