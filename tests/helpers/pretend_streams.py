"""Streams of the pretend GPU: what must have happened before what."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from helpers.pretend_graphs import Tape


class Stream:
    """Work in order. ``seen`` is the last piece of each stream's work that has surely ended."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        index = current_device() if device is None else torch.device(device).index
        self.device = torch.device("cuda", index or 0)
        self.seen: dict[Stream, int] = {self: 0}
        self.freed: list[tuple[Stream, int, str]] = []  # last uses of its memory that is free now
        _streams.add(self)
        self.tape: Tape | None = None  # while work of this stream is captured

    def next(self) -> int:
        """Number of the next piece of work."""
        with _counting:
            learn(self.seen, HOST)
            for other, number, name in self.freed:  # the next memory may be that of a freed tensor
                if number > self.seen.get(other, 0):
                    raise AssertionError(
                        f"memory is used again while another stream may run {name}"
                    )
            self.freed.clear()
            self.seen[self] += 1
            return self.seen[self]

    def wait_stream(self, other: Stream) -> None:
        if self.tape is not None and other.tape is not self.tape:
            self.tape.is_broken = True
            raise RuntimeError(
                "CUDA error: dependency created on uncaptured work in another stream"
            )
        if other.tape is not None:
            self.tape = other.tape
            self.tape.joined.add(self)
            self.tape.unjoined.add(self)
            self.tape.unjoined.discard(other)
        learn(self.seen, other.seen)

    def synchronize(self) -> None:
        check_not_capturing("cudaStreamSynchronize", self)
        learn(HOST, self.seen)


HOST: dict[Stream, int] = {}  # what the process has waited for; later work comes after it
_defaults: dict[int, Stream] = {}
_streams: weakref.WeakSet[Stream] = weakref.WeakSet()
captures: set[Tape] = set()  # of all threads
_thread = threading.local()
_counting = threading.RLock()  # threads share streams, and a lost count looks like a race


def learn(seen: dict[Stream, int], other: dict[Stream, int]) -> None:
    with _counting:
        for stream, number in list(other.items()):
            seen[stream] = max(seen.get(stream, 0), number)


def current_device() -> int:
    return getattr(_thread, "device", 0)


def set_device(chosen: Any) -> None:
    _thread.device = chosen if isinstance(chosen, int) else torch.device(chosen).index or 0


@contextmanager
def device(chosen: Any) -> Iterator[None]:
    before = current_device()
    set_device(before if chosen is None else chosen)
    try:
        yield
    finally:
        set_device(before)


def current_stream(on: Any = None) -> Stream:
    default = default_stream(on)
    return getattr(_thread, "streams", {}).get(default.device.index, default)


def default_stream(on: Any = None) -> Stream:
    index = current_device() if on is None else torch.device(on).index or 0
    if index not in _defaults:
        _defaults[index] = Stream(torch.device("cuda", index))
    return _defaults[index]


def is_current_stream_capturing() -> bool:
    return current_stream().tape is not None


@contextmanager
def stream(chosen: Stream) -> Iterator[None]:
    before = getattr(_thread, "streams", {})
    _thread.streams = {**before, chosen.device.index: chosen}
    try:
        with device(chosen.device):
            yield
    finally:
        _thread.streams = before


def synchronize(on: Any = None) -> None:
    """Wait for all streams."""
    if captures:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
    for one in list(_streams):
        learn(HOST, one.seen)


def check_not_capturing(what: str, on: Stream) -> None:
    if on.tape is not None:
        on.tape.is_broken = True
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({what})")


@dataclass
class Block:
    """Memory of one storage: its place, and which work wrote and read it last."""

    place: torch.device | None  # None: torch made it, so it belongs where it is used first
    home: Stream | None = None  # its allocator hands the memory out again
    tape: int = id(None)  # of the capture that allocated it; an id makes no cycle of references
    written: tuple[Stream, int] | None = None
    read: dict[Stream, int] = field(default_factory=dict)
    last_use: str = ""

    def use(self, stream: Stream, number: int, name: str, writes: bool) -> None:
        """Raise if the work may run before what it depends on."""
        if self.home is None:
            self.home, self.tape = stream, id(stream.tape)
        before = [self.written] if self.written else []
        before += self.read.items() if writes else []
        if any(number > stream.seen.get(other, 0) for other, number in before):
            raise AssertionError(f"{name} does not wait for {self.last_use} of another stream")
        if stream.tape is not None and self.tape != id(stream.tape):
            return  # nothing runs before a replay
        if writes:
            self.written, self.read = (stream, number), {}
        else:
            self.read[stream] = number
        self.last_use = name

    def __del__(self) -> None:
        used = [*self.read.items(), *([self.written] if self.written else [])]
        if self.tape == id(None) and self.home is not None:
            self.home.freed += [(*use, self.last_use) for use in used]
