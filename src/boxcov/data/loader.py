"""Frames read ahead by other processes, so that loading the next ones overlaps with the work on this one."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from boxcov.errors import BoxcovError

AHEAD = 2  # items that each process may be ahead
_NUMPY = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
}


def loaded(frames: Sequence[Any], workers: int, seed: int = 0) -> LoadedFrames:
    """``frames``, read ahead by so many processes when they are gone through; 0 reads them here.

    Each item is read with random numbers (torch, numpy, random) from a seed of its own: the same items come whatever the number of workers,
    also from data that draw.

    >>> from boxcov.data import shapes
    >>> frames = loaded(shapes.frames(count=3), workers=2)
    >>> len(frames), [inputs.shape[0] for inputs, targets in frames]
    (3, [1, 1, 1])
    """
    if workers < 0:
        raise BoxcovError(f"workers must be at least 0, got {workers}")
    return LoadedFrames(frames, workers, seed)


class LoadedFrames(Sequence[Any]):
    """See ``loaded``."""

    def __init__(self, frames: Sequence[Any], workers: int, seed: int) -> None:
        self.frames, self.workers, self.seed = frames, workers, seed

    def __len__(self) -> int:
        return len(self.frames)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        number = range(len(self))[index]
        with _drawing(self.seed, number):
            return self.frames[number]

    def __iter__(self) -> Iterator[Any]:
        return self.each(range(len(self)))

    def each(self, numbers: Sequence[int]) -> Iterator[Any]:
        """The items of these numbers, in this order."""
        if not self.workers:
            yield from (self[number] for number in numbers)
            return
        pool = ProcessPoolExecutor(
            min(self.workers, max(len(numbers), 1)), _context(), _begin, (self, os.getpid())
        )
        waiting: deque[tuple[int, Future[Any]]] = deque()
        try:
            for number in (*numbers, None):  # None: only what is under way is left
                if number is not None:
                    waiting.append((number, pool.submit(_read, number)))
                while waiting and (number is None or len(waiting) >= AHEAD * self.workers):
                    item = waiting[0][1].result()
                    waiting.popleft()
                    yield _unpacked(item)
        except BrokenProcessPool:
            missing = waiting[0][0] if waiting else number
            raise BoxcovError(
                f"a process that reads frames was lost before item {missing} came: it was killed, or out of memory. What was kept of the run is "
                "whole: go on with --resume, and with fewer --workers if memory is short"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def load_items(frames: Sequence[Any], numbers: Sequence[int]) -> Iterator[Any]:
    """The items of these numbers, read ahead where ``frames`` are ``loaded``.

    >>> list(load_items("abc", [2, 0])), list(load_items(loaded("abc", 1), [2, 0]))
    (['c', 'a'], ['c', 'a'])
    """
    return (
        frames.each(numbers)
        if isinstance(frames, LoadedFrames)
        else (frames[number] for number in numbers)
    )


@dataclass(frozen=True)
class _Sent:
    """A tensor on its way through a pipe: shared memory may be small, and its files are counted."""

    array: Any


def _packed(item: Any) -> Any:
    def sent(t: Tensor) -> Any:
        return (
            _Sent(t.numpy())
            if t.device.type == "cpu"
            and t.is_contiguous()
            and t.dtype in _NUMPY
            and not t.requires_grad
            else t
        )

    return tree_map_only(Tensor, sent, item)


def _unpacked(item: Any) -> Any:
    return tree_map_only(
        _Sent, lambda sent: torch.from_numpy(sent.array).clone(), item
    )  # a clone lies in memory as torch likes it


def _context() -> Any:
    """Forked where that is possible: frames need not be sent, and torch not imported again."""
    return multiprocessing.get_context(
        "fork" if "fork" in multiprocessing.get_all_start_methods() else None
    )


# in the other processes

_mine: LoadedFrames | None = None


def _begin(frames: LoadedFrames, parent: int) -> None:
    global _mine
    _mine = frames
    torch.set_num_threads(1)  # threads do not survive a fork
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all: the one that asked decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()


def _leave_with(parent: int) -> None:
    """A killed parent tells nobody."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _read(number: int) -> Any:
    assert _mine is not None
    return _packed(_mine[number])


@contextmanager
def _drawing(seed: int, number: int) -> Iterator[None]:
    """Random numbers of one item's own; those of the process go on after it as if nothing had been drawn."""
    start = 1_000_003 * seed + number
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(start)
        random.seed(start)
        np.random.seed(start % 2**32)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002
