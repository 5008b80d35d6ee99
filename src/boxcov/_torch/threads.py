"""A lock and a seed that hold with several threads and after a fork."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import RLock

import torch

_SEED_LOCK = RLock()


class ProcessLock:
    """A lock between the threads of one process: a forked child does not wait for its parent's.

    A thread that has it may take it again.

    >>> with ProcessLock():
    ...     pass
    """

    def __init__(self) -> None:
        self._lock, self._process = RLock(), os.getpid()

    def __enter__(self) -> None:
        if self._process != os.getpid():  # the thread that held it did not survive the fork
            self.__init__()  # type: ignore[misc]
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


@contextmanager
def seeded(seed: int, devices: Sequence[torch.device] = ()) -> Iterator[None]:
    """Seed torch's random numbers for a block, and restore their state afterwards.

    One thread at a time: the generator is shared by all threads.

    >>> with seeded(3):
    ...     first = torch.rand(2)
    >>> with seeded(3):
    ...     torch.equal(first, torch.rand(2))
    True
    """
    with _SEED_LOCK, torch.random.fork_rng(devices=list(devices)):
        torch.default_generator.manual_seed(seed)
        for device in devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
