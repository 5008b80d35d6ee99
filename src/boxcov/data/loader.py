"""Frames loaded ahead by worker processes, while the main process computes."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import tempfile
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset

from boxcov._torch.process_state import item_seed
from boxcov.data.sequence import FrameSequence
from boxcov.errors import BoxcovError, check_seed, check_whole


def loaded(frames: Sequence[Any], workers: int, seed: int = 0) -> LoadedFrames:
    """Return ``frames`` as a sequence whose items are loaded ahead by worker processes.

    Each item is loaded with its own seed of torch's, numpy's and Python's random numbers. Items
    are therefore the same for any number of workers, also when loading them draws random numbers.
    With ``workers=0`` the main process loads them.

    >>> from boxcov.data import shapes
    >>> frames = loaded(shapes.frames(count=3), workers=2)
    >>> len(frames), [inputs.shape[0] for inputs, targets in frames]
    (3, [1, 1, 1])
    """
    check_whole("workers", workers, 0)
    return LoadedFrames(frames, workers, check_seed(seed))


def load_items(frames: Sequence[Any], indices: Sequence[int]) -> Iterator[Any]:
    """Yield the items of these indices in order, loaded ahead if ``frames`` is ``loaded``."""
    if isinstance(frames, LoadedFrames) and frames.workers and indices:
        return _load_ahead(frames, indices)
    return (frames[index] for index in indices)


class LoadedFrames(FrameSequence):
    """A sequence of frames that worker processes load; made by ``loaded``."""

    def __init__(self, frames: Sequence[Any], workers: int, seed: int) -> None:
        super().__init__(len(frames))
        self.frames, self.workers, self.seed = frames, workers, seed

    def __iter__(self) -> Iterator[Any]:
        return load_items(self, range(len(self)))

    def load(self, index: int) -> Any:
        with _seeded(item_seed(self.seed, index)):
            return self.frames[index]


class _Files(Dataset[str]):
    """Items written to files in ``folder``, each with an exception and its traceback as text.

    DataLoader would send tensors through shared memory, which is small in containers, and takes
    an open file per tensor. Sent through its pipe, they would block the main process for ever if
    the worker is killed halfway. DataLoader would also change the type of exceptions.
    """

    def __init__(self, frames: LoadedFrames, folder: str) -> None:
        self.frames, self.folder = frames, folder

    def __getitem__(self, index: int) -> str:
        handle, path = tempfile.mkstemp(dir=self.folder)
        os.close(handle)
        try:
            torch.save((tree_map_only(Tensor, _compact, self.frames[index]), None, ""), path)
        except Exception as error:
            for each in (error, RuntimeError(f"{type(error).__name__}: {error}")):
                with suppress(Exception):  # some exceptions cannot go to another process
                    torch.save((None, each, traceback.format_exc()), path)
                    _read(path)
                    break
        return path


def _read(path: str) -> Any:
    # Items are of any type. The file is our worker's, in a folder that only this user can access.
    return torch.load(path, weights_only=False)


def _compact(tensor: Tensor) -> Tensor:
    """Return the tensor without the rest of its storage, which would be written as well."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def _load_ahead(frames: LoadedFrames, indices: Sequence[int]) -> Iterator[Any]:
    can_fork = "fork" in multiprocessing.get_all_start_methods()
    with tempfile.TemporaryDirectory(prefix="boxcov-") as folder:
        loader = DataLoader(
            _Files(frames, folder),
            batch_size=None,
            sampler=indices,
            num_workers=min(frames.workers, len(indices)),
            worker_init_fn=_start_worker,
            multiprocessing_context="fork" if can_fork else None,
            generator=torch.Generator(),  # the global one must not advance
        )
        with _sigchld_unchanged():
            paths: Any = iter(loader)
        try:
            for index in indices:
                yield _read_item(_next_path(paths, index))
        finally:
            # while it lives, as in a traceback, the workers write into the folder to be removed
            paths._shutdown_workers()


def _next_path(paths: Iterator[str], index: int) -> str:
    try:
        return next(paths)
    except RuntimeError as error:  # DataLoader lost a worker; errors of the data are in the files
        raise BoxcovError(
            f"a worker process ended before it loaded item {index}: it was killed, or memory ran "
            f"out ({str(error).splitlines()[0]}). Use fewer --workers if memory is short. An "
            "interrupted run continues with --resume"
        ) from None


def _read_item(path: str) -> Any:
    item, error, trace = _read(path)
    os.unlink(path)
    if error is not None:
        raise error from RuntimeError(f"in a worker process:\n{trace}")
    return item


def _start_worker(_: int) -> None:
    # Ctrl-C reaches every process: the main one decides whether the workers end
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def _sigchld_unchanged() -> Iterator[None]:
    """Restore the SIGCHLD handler that DataLoader replaces.

    Its handler raises wherever the main process is when a worker dies, not where items are read.
    """
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGCHLD) if is_main and os.name != "nt" else None
    yield
    if handler is not None:
        signal.signal(signal.SIGCHLD, handler)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed all random numbers, and restore the generators' states afterwards."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002
