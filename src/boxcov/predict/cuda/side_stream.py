"""A second CUDA stream: work beside that of the current one, inside a CUDA graph or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


class SideStream:
    """Runs work beside that of the current stream, until ``join``; at once on a CPU.

    Kernels of a few boxes leave most of a GPU idle, so two chains of them take the time of one.
    Tensors that the work reads must live until ``join``.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._working = False  # since the last join

    def run(self, work: Callable[[], T]) -> T:
        """Return the result of work that starts after what the current stream did so far."""
        if self._stream is None:
            return work()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self._working = True
        with torch.cuda.stream(self._stream):
            return work()

    def join(self) -> None:
        """Let the current stream wait for all work.

        Without work there is nothing to wait for, and a CUDA graph that is being captured must not
        wait for a stream that is no part of it.
        """
        if self._stream is not None and self._working:
            self._working = False
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
