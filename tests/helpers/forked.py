"""Forked processes with torchrun's environment; they rendezvous through a file, not a port."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import distributed as dist


def forked(count: int, work: Callable[[int], object]) -> list[tuple[int, str]]:
    """Run ``work(rank)`` in ``count`` processes; return exit codes and results as text."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_rank, args=(rank, count, Path(folder), work))
            for rank in range(count)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(120)
            assert process.exitcode is not None, "a rank hangs"
        said = [Path(folder, f"said.{rank}") for rank in range(count)]
        return [
            (int(p.exitcode or 0), path.read_text() if path.exists() else "")
            for p, path in zip(processes, said)
        ]


def _rank(rank: int, count: int, folder: Path, work: Callable[[int], object]) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(count), LOCAL_RANK=str(rank))
    meet = partial(
        dist.init_process_group, init_method=f"file://{folder}/meet", rank=rank, world_size=count
    )
    said, code = Path(folder, f"said.{rank}"), 0
    with mock.patch.object(dist, "init_process_group", meet):
        try:
            said.write_text(str(work(rank)))
        except BaseException as error:
            said.write_text(f"{type(error).__name__}: {error}")
            code = 1
    sys.stdout.flush()
    os._exit(code)  # nothing of the tests' own is to be cleaned up here
