"""A second stream, which keeps a GPU busy with two chains of small kernels, in a graph or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """Work in ``beside()`` runs beside that of the current stream, until ``join()``.

    Kernels of a few boxes leave most of a GPU idle, so two chains of them take the time of one. On
    a CPU the work runs where it stands. Tensors that it reads must live, and keep their values,
    until ``join()``.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._working = False  # since the last join

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Start the work of the block after what the current stream did so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self._working = True
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Let the current stream wait for all work.

        Without work there is nothing to wait for, and a CUDA graph that is being captured must not
        wait for a stream that is no part of it.
        """
        if self._stream is not None and self._working:
            self._working = False
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


AT_ONCE = SideStream(torch.device("cpu"))
