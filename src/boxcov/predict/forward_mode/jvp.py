"""Derivatives of a function along many directions, by torch's own forward mode: ``vmap(jvp)``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from boxcov._torch.process_state import ProcessLock

_LOCK = ProcessLock()


class NoRule(Exception):
    """Tangents cannot pass an operation; ``vmap(jvp)`` of the whole network still can."""


def vmap_jvp(
    function: Callable[..., list[Tensor]],
    primals: tuple[Tensor, ...],
    tangents: tuple[Tensor, ...],
    chunk_size: int | None = None,
) -> list[Tensor]:
    """Derivatives (k, ...) of each output along k tangents (k, *shape) of each input.

    One thread at a time: the levels of torch's forward mode belong to the process. Attention is
    computed by plain products: torch has no forward-mode derivative of a fused one.
    """

    def one(*moved: Tensor) -> list[Tensor]:
        found: list[Tensor] = torch.func.jvp(function, primals, moved)[1]
        # vmap can only stack what depends on the direction: add a zero that does
        zero = 0 * (moved[0].flatten()[0] if moved[0].numel() else moved[0].sum())
        return [t + zero.to(t.dtype) for t in found]

    with _LOCK, sdpa_kernel(SDPBackend.MATH):
        return list(torch.vmap(one, chunk_size=chunk_size)(*tangents))


def push_forward(
    function: Callable[..., list[Tensor]], primals: tuple[Tensor, ...], tangents: tuple[Tensor, ...]
) -> list[Tensor]:
    """As ``vmap_jvp``; raise ``NoRule`` where torch has no rule."""
    try:
        return vmap_jvp(function, primals, tangents)
    except (RuntimeError, ValueError, TypeError) as error:  # no forward mode, or no batching
        raise NoRule(str(error)) from error
