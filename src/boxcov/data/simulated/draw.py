"""Random draws from one generator: the little words the layout is written in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Draw:
    """Draws of float32 tensors, or of one number where no shape is given, on the generator's device.

    >>> draw = Draw(generator(0, 1, "cpu"))
    >>> draw.uniform(2.0, 3.0, 4, 5).shape, draw.choice({0: 0.5, 7: 0.5}, 100).unique()
    (torch.Size([4, 5]), tensor([0, 7]))
    """

    generator: torch.Generator

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(
            shape, generator=self.generator, device=self.generator.device
        )

    def normal(self, mean: float, deviation: float, *shape: int) -> Tensor:
        return mean + deviation * torch.randn(
            shape, generator=self.generator, device=self.generator.device
        )

    def chance(self, probability: float | Tensor, *shape: int) -> Tensor:
        return (
            torch.rand(shape, generator=self.generator, device=self.generator.device) < probability
        )

    def sign(self, *shape: int) -> Tensor:
        return 1.0 - 2.0 * self.chance(0.5, *shape).float()

    def choice(self, weights: Mapping[int, float], count: int) -> Tensor:
        picked = torch.multinomial(
            torch.tensor(list(weights.values())), count, replacement=True, generator=self.generator
        )
        return torch.tensor(list(weights))[picked]

    def maybe(self, probability: float) -> bool:
        return bool(self.chance(probability))

    def number(self, low: float, high: float) -> float:
        return float(self.uniform(low, high))


def generator(seed: int, index: int, device: str | torch.device) -> torch.Generator:
    """A generator for one frame of one seed.

    >>> generator(0, 1, "cpu").initial_seed() == generator(1, 0, "cpu").initial_seed()
    False
    """
    # splitmix64, so that neighbouring seeds and indices share nothing; torch's own CPU generator reads the low 32 bits only
    state = 0
    for value in (seed, index):
        state = (state + value + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return torch.Generator(device).manual_seed(state >> 1)
