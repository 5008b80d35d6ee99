"""On a GPU: the precision of products, and functions replayed as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from threading import Condition, get_ident
from typing import Literal

import torch
from torch import Tensor

Precision = Literal["float32", "tf32", "half"]
Many = tuple[Tensor, ...]
_Captured = tuple[torch.cuda.CUDAGraph, Many]


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
    """Calls functions of tensors, and replays them as CUDA graphs from the second call on.

    Calls with the same key and shapes share a graph. The next replay writes over the outputs.
    max_graphs: each graph holds its intermediates.
    """

    def __init__(self, max_graphs: int = 16) -> None:
        self._max_graphs = max_graphs
        self._called: set[Hashable] = set()
        self._graphs: dict[Hashable, _Captured] = {}
        self._inputs: dict[Hashable, Tensor] = {}  # static inputs, shared by graphs of one shape
        self.replayed = False  # whether the last call was a replay
        self.capturing = False  # also after a capture that failed

    def __call__(self, key: Hashable, run: Callable[..., Many], *given: Tensor) -> Many:
        key = key, tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in given)
        self.replayed = key in self._called
        if not self.replayed:  # libraries choose their algorithms, which a capture must not do
            self._called.add(key)
            return run(*given)
        if key not in self._graphs:
            if len(self._graphs) >= self._max_graphs:
                self._graphs.pop(next(iter(self._graphs)))
            self.capturing = True
            self._graphs[key] = self._capture(run, given)
            self.capturing = False
        graph, out = self._graphs[key]
        self._copy_inputs(given)
        graph.replay()
        return out

    def _capture(self, run: Callable[..., Many], given: Many) -> _Captured:
        inputs = self._copy_inputs(given)
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(2):
                run(*inputs)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # other threads may use the GPU meanwhile
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = run(*inputs)
        return graph, out

    def _copy_inputs(self, given: Many) -> Many:
        inputs = []
        for number, tensor in enumerate(given):
            key = number, tensor.shape, tensor.stride(), tensor.dtype
            if key not in self._inputs:
                self._inputs[key] = torch.empty_like(tensor)
            inputs.append(self._inputs[key].copy_(tensor))
        return tuple(inputs)
