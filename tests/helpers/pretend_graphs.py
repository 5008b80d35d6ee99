"""CUDA graphs of the pretend GPU: a capture lists the work, and each replay does it again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from helpers import pretend_streams as streams
from helpers.pretend_streams import Stream


@dataclass(frozen=True)
class _Outside:
    """A tensor whose memory a graph uses but does not own."""

    storage: StorageWeakRef
    like: tuple[Any, ...]

    def tensor(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            raise AssertionError("a CUDA graph reads memory that was freed after its capture")
        dtype, *view = self.like
        return torch.empty(0, dtype=dtype).set_(storage, *view)


class Tape:
    """The work of a CUDA graph. ``outputs`` are the tensors that each piece of it writes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.joined: set[Stream] = set()
        self.work: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.unjoined: set[Stream] = set()
        self.is_broken = False

    def record(self, func: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> None:
        args, kwargs = tree_map_only(Tensor, self._kept, (args, kwargs))
        self.work.append((func, args, kwargs, [tensor.detach() for tensor in outputs]))

    def _kept(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        block = getattr(storage, "block", None)
        if block is None or block.place == torch.device("cpu"):
            return tensor.detach().clone()  # a number: its value becomes part of the graph
        if block.tape == id(self):
            return tensor.detach()
        view = tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()
        return _Outside(StorageWeakRef(storage), view)

    def replay(self, now: Stream) -> None:
        self._order(now)
        with torch.no_grad(), _disable_current_modes():
            for func, args, kwargs, outputs in self.work:
                args, kwargs = tree_map_only(_Outside, _Outside.tensor, (args, kwargs))
                found = func(*args, **kwargs)
                if outputs:
                    made = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
                    for kept, new in zip(outputs, made, strict=True):
                        kept.copy_(new)

    def _order(self, now: Stream) -> None:
        """All work comes after what the stream did, in which it is one piece of work."""
        number = now.next()
        for _, args, kwargs, outputs in self.work:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, _Outside):
                    leaf.tensor().untyped_storage().block.use(now, number, "a CUDA graph", False)
            for tensor in outputs:
                tensor.untyped_storage().block.use(now, number, "a CUDA graph", True)

    def forget_values(self) -> None:
        """A capture runs nothing: what it allocated holds arbitrary numbers until a replay."""
        with torch.no_grad(), _disable_current_modes():
            for *_, outputs in self.work:
                for tensor in outputs:
                    tensor.fill_(float("nan") if tensor.is_floating_point() else 101)
                    block = tensor.untyped_storage().block
                    block.written, block.read = None, {}


class CUDAGraph:
    def __init__(self) -> None:
        self.tape: Tape | None = None

    def replay(self) -> None:
        assert self.tape is not None
        now = streams.current_stream(self.tape.device)
        streams.check_not_capturing("cudaGraphLaunch", now)
        self.tape.replay(now)


_entered: list[Any] = []


@contextmanager
def graph(
    made: CUDAGraph, stream: Stream | None = None, capture_error_mode: str = "global"
) -> Iterator[None]:
    """Record the block's work on one device in ``made``.

    As torch, it does not leave the stream of the capture if the capture fails.
    """
    streams.synchronize()
    own = Stream() if stream is None else stream
    own.tape = tape = Tape(own.device)
    streams.captures.add(tape)
    inside = streams.stream(own)
    _entered.append(inside)  # kept alive, or its end would run
    inside.__enter__()
    try:
        yield
    finally:
        streams.captures.discard(tape)
        for one in (own, *tape.joined):
            one.tape = None
    if tape.is_broken or tape.unjoined - {own}:
        raise RuntimeError("CUDA error: capture was invalidated, or has unjoined work")
    _entered.remove(inside)
    inside.__exit__(None, None, None)
    tape.forget_values()
    made.tape = tape
