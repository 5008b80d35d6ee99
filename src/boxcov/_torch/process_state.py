"""The state of a process and its devices: locks, random numbers, precision, streams, the clock."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import Condition, RLock, get_ident
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor

Precision = Literal["float32", "tf32"]


class ProcessLock:
    """A lock between the threads of one process: a forked child does not wait for its parent's.

    A thread that has it may take it again.
    """

    def __init__(self) -> None:
        self._lock, self._process = RLock(), os.getpid()

    def __enter__(self) -> None:
        if self._process != os.getpid():  # the thread that held it did not survive the fork
            self.__init__()  # type: ignore[misc]
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


def item_seed(seed: int, number: int) -> int:
    """Return the seed of item ``number`` of a run, within the 64 bits that torch takes."""
    return (1_000_003 * seed + number) % 2**64


_SEED_LOCK = ProcessLock()


@contextmanager
def seeded(seed: int, devices: Sequence[torch.device] = ()) -> Iterator[None]:
    """Seed torch's random numbers for a block, and restore their state afterwards.

    One thread at a time: the generator is shared by all threads.
    """
    with _SEED_LOCK, torch.random.fork_rng(devices=list(devices)):
        torch.default_generator.manual_seed(seed)
        for device in devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


@contextmanager
def matrix_precision(precision: Precision) -> Iterator[None]:
    """Take float32 products and convolutions on a GPU in float32 or in TF32 inside the block.

    The flags belong to the whole process: threads with the same precision run together, a thread
    with another one waits. A nested block gives up the outer block's precision until it ends, so
    that two threads with nested blocks cannot wait for each other forever.
    """
    outer = _holders.get(get_ident())
    _switch(precision != "float32")
    try:
        yield
    finally:
        _switch(outer)


Flags = tuple[bool, bool] | tuple[str, str]  # of products and of convolutions
_turn = Condition()
_holders: dict[int, bool] = {}  # thread to whether it uses TF32
_outside: list[Flags] = []  # the flags before the first holder


def allows_tf32() -> tuple[bool, bool]:
    """Return whether products and convolutions of float32 on a GPU are in TF32."""
    products, convolutions = _flags()
    return products in (True, "tf32"), convolutions in (True, "tf32")


def _flags() -> Flags:
    backends: Any = torch.backends
    try:
        return backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32
    except RuntimeError:  # unreadable once the user has set torch's newer flags
        return backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision


def _set(flags: Flags) -> None:
    backends: Any = torch.backends
    if isinstance(flags[0], bool):
        backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32 = flags
    else:
        backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision = flags


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
        flag: Any = tf32
        if isinstance(_outside[0][0], str):
            flag = "tf32" if tf32 else "ieee"
        _set((flag, flag))


@contextmanager
def full_precision() -> Iterator[None]:
    """Run a block, or the function that it decorates, without torch.autocast."""
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def at_least_float32(x: Tensor) -> Tensor:
    """Return half-precision tensors as float32, others unchanged."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


class SideStream:
    """A second stream: work in ``beside()`` runs beside that of the current one, until ``join()``.

    Kernels of a few boxes leave most of a GPU idle, so two chains of them take the time of one, in
    a graph or not. On a CPU the work runs where it stands. Tensors that it reads must live, and
    keep their values, until ``join()``.
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


def seconds(device: torch.device | str) -> float:
    """Return the time of a clock in seconds, once a GPU has finished what it was given."""
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()
