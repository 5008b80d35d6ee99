"""Frames and small networks in float64 for fits that are out of the ordinary."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from helpers.nets import NetDetector


def item(count: int = 2, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(count, 2, 5, 5, generator=generator, dtype=torch.float64),
        torch.randn(count, 2, 25, generator=generator, dtype=torch.float64),
    )


def double(
    net: nn.Module | Callable[[], nn.Module], kind: Callable[[nn.Module], NetDetector] = NetDetector
) -> NetDetector:
    torch.manual_seed(0)
    return kind(net if isinstance(net, nn.Module) else net()).double().eval()
