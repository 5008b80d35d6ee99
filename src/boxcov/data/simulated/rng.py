"""Random numbers of one frame: the distributions that scenes and rays are drawn from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Rng:
    """Draws float32 tensors of a shape, or scalars without one, on the generator's device."""

    generator: torch.Generator

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * self._rand(shape)

    def normal(self, mean: float, deviation: float, *shape: int) -> Tensor:
        noise = torch.randn(shape, generator=self.generator, device=self.generator.device)
        return mean + deviation * noise

    def chance(self, probability: float | Tensor, *shape: int) -> Tensor:
        """Return True with this probability."""
        return self._rand(shape) < probability

    def sign(self, *shape: int) -> Tensor:
        return 1.0 - 2.0 * self.chance(0.5, *shape).float()

    def choice(self, weights: Mapping[int, float], count: int) -> Tensor:
        """Return ``count`` keys of ``weights``, drawn in proportion to their values."""
        picked = torch.multinomial(
            torch.tensor(list(weights.values())), count, replacement=True, generator=self.generator
        )
        return torch.tensor(list(weights))[picked]

    def flag(self, probability: float) -> bool:
        return bool(self.chance(probability))

    def number(self, low: float, high: float) -> float:
        return float(self.uniform(low, high))

    def _rand(self, shape: tuple[int, ...]) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self.generator.device)


def make_rng(seed: int, index: int, device: str | torch.device) -> Rng:
    """Return the random numbers of one stream of a seed."""
    # splitmix64: neighbouring seeds and indices give unrelated streams. The shift at the end
    # matters because torch's CPU generator reads only the low 32 bits.
    state = 0
    for value in (seed, index):
        state = (state + value + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return Rng(torch.Generator(device).manual_seed(state >> 1))
