"""On a GPU: which precision products are taken in, and functions kept as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from threading import Condition, get_ident
from typing import Literal

import torch
from torch import Tensor

Precision = Literal["float32", "tf32", "half"]
Many = tuple[Tensor, ...]
_Kept = tuple[torch.cuda.CUDAGraph, Many]


@contextmanager
def matrix_precision(precision: Precision) -> Iterator[None]:
    """Take float32 products and convolutions on a GPU in float32 or in TF32 inside the block.

    The flags belong to the whole process: threads with the same precision run together, a thread
    with another one waits. A nested block gives up the outer block's precision until it ends, so
    that two threads with nested blocks cannot wait for each other forever.

    >>> before = torch.backends.cuda.matmul.allow_tf32
    >>> with matrix_precision("tf32"):
    ...     torch.backends.cuda.matmul.allow_tf32
    True
    >>> torch.backends.cuda.matmul.allow_tf32 == before
    True
    """
    outer = _holders.get(get_ident())
    _switch(precision != "float32")
    try:
        yield
    finally:
        _switch(outer)


Flags = tuple[bool, bool]
_turn = Condition()
_holders: dict[int, bool] = {}  # thread to whether it uses TF32
_outside: list[Flags] = []  # the flags before the first holder


def _flags() -> Flags:
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


def _set(flags: Flags) -> None:
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = flags


def _switch(tf32: bool | None) -> None:
    """Release what this thread holds, then wait for ``tf32``; None holds nothing."""
    me = get_ident()
    with _turn:
        _holders.pop(me, None)
        if not _holders and _outside:
            _set(_outside.pop())  # the last holder restores the flags
        _turn.notify_all()
        if tf32 is None:
            return
        while any(used != tf32 for used in _holders.values()):
            _turn.wait()
        if not _holders:
            _outside.append(_flags())
        _holders[me] = tf32
        _set((tf32, tf32))


class Graphs:
    """Calls a function of tensors that gives some; the second call with the same key is captured, and replayed from then on.

    What it gives is written over by the next replay. kept: how many graphs; each holds its own intermediates.
    """

    def __init__(self, kept: int = 16) -> None:
        self._most = kept
        self._met: set[Hashable] = set()
        self._kept: dict[Hashable, _Kept] = {}
        self._inputs: dict[
            Hashable, Tensor
        ] = {}  # what is given is written into these, which graphs of one shape share
        self.replayed = False  # whether the last call was
        self.capturing = False  # whether a graph is being made; still true if that failed

    def __call__(self, key: Hashable, run: Callable[..., Many], *given: Tensor) -> Many:
        key = key, tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in given)
        self.replayed = key in self._met
        if (
            not self.replayed
        ):  # libraries settle on their ways, which must not happen while capturing
            self._met.add(key)
            return run(*given)
        if key not in self._kept:
            if len(self._kept) >= self._most:
                self._kept.pop(next(iter(self._kept)))
            self.capturing = True
            self._kept[key] = self._captured(run, given)
            self.capturing = False
        graph, out = self._kept[key]
        self._written(given)
        graph.replay()
        return out

    def _captured(self, run: Callable[..., Many], given: Many) -> _Kept:
        inputs = self._written(given)
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(2):
                run(*inputs)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, capture_error_mode="thread_local"
        ):  # other threads may go on with their own work
            out = run(*inputs)
        return graph, out

    def _written(self, given: Many) -> Many:
        inputs = []
        for number, tensor in enumerate(given):
            key = number, tensor.shape, tensor.stride(), tensor.dtype
            if key not in self._inputs:
                self._inputs[key] = torch.empty_like(tensor)
            inputs.append(self._inputs[key].copy_(tensor))
        return tuple(inputs)
