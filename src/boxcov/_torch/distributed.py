"""Work spread over processes: each rank processes its items, sums are added at the end.

Ranks exchange numbers and JSON through ``torch.distributed``: gloo for CPU memory, nccl for GPUs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from boxcov.errors import BoxcovError

# the fastest rank waits this long for the slowest; a rank that dies is noticed at once
TIMEOUT = timedelta(hours=12)


@dataclass(frozen=True)
class World:
    """This process's rank and the number of processes: item i belongs to rank ``i % size``.

    >>> World(1, 3).owns(4), World(1, 3).count_items(8), World().is_single
    (True, 3, True)
    """

    rank: int = 0
    size: int = 1

    @staticmethod
    def current() -> World:
        """Return the world of torch.distributed's default process group."""
        if not (dist.is_available() and dist.is_initialized()):
            raise BoxcovError(
                "distributed=True, but there is no process group: "
                "call torch.distributed.init_process_group first"
            )
        return World(dist.get_rank(), dist.get_world_size())

    @property
    def is_single(self) -> bool:
        return self.size == 1

    def owns(self, number: int) -> bool:
        return number % self.size == self.rank

    def count_items(self, end: int) -> int:
        """Return how many of the items 0 to ``end - 1`` belong to this rank."""
        return len(range(self.rank, end, self.size))

    def rank_path(self, path: str | Path) -> Path:
        """Return this rank's own file for ``path``: the rank is appended if there are several."""
        return Path(path) if self.is_single else Path(f"{path}.{self.rank}")

    @contextmanager
    def label_errors(self) -> Iterator[None]:
        """Add the rank to the message of every error raised inside."""
        try:
            yield
        except BoxcovError as error:
            if self.is_single:
                raise
            raise type(error)(f"rank {self.rank} of {self.size}: {error}") from error

    def barrier(self) -> None:
        """Wait until every rank has reached this point."""
        self.all_reduce([], [])

    def all_reduce(self, tensors: Sequence[Tensor], counts: Sequence[float]) -> list[float]:
        """Sum ``tensors`` over all ranks in place; return the sums of ``counts``, up to 2^53."""
        if self.is_single:
            return list(counts)
        total = torch.tensor([*counts, 0.0], dtype=torch.float64)
        with self._collective():
            for tensor in (*tensors, total):
                moved = tensor.to(transfer_device(tensor.device, dist.get_backend_config()))
                dist.all_reduce(moved)
                if moved is not tensor:
                    tensor.copy_(moved)
        sums: list[float] = total.tolist()
        return sums[:-1]

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's ``value``, by rank; values travel as JSON, nothing is pickled."""
        if self.is_single:
            return [value]
        with self._collective():
            return [json.loads(text) for text in _gather_text(json.dumps(value))]

    @contextmanager
    def _collective(self) -> Iterator[None]:
        """Explain the failure of a collective operation: another rank has died."""
        try:
            yield
        except RuntimeError as error:
            raise BoxcovError(
                f"rank {self.rank} of {self.size}: another rank has died or cannot be reached "
                f"({str(error).splitlines()[0]}). Finished work is kept: start all ranks again "
                "with --resume"
            ) from error


@contextmanager
def join_process_group(device: str) -> Iterator[tuple[World, str]]:
    """Join the process group of a torchrun job; yield the world and the device of this rank.

    Without torchrun the world is one process.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "RANK" not in os.environ:
        yield World(), device
        return
    if device.startswith("cuda"):
        device = _local_gpu(device, int(os.environ["LOCAL_RANK"]), torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(choose_backend(device), timeout=TIMEOUT)
    yield World.current(), device
    dist.destroy_process_group()  # not after an error: other ranks may wait, torchrun ends them


def is_main_process() -> bool:
    """Return whether this process prints the results: rank 0, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def choose_backend(device: str) -> str:
    """Return the backends for ``device``: nccl between GPUs, gloo for CPU memory."""
    return "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"


def transfer_device(device: torch.device, config: str) -> torch.device:
    """Return where a tensor of ``device`` must lie to be sent through the backends ``config``."""
    backends = dict(pair.split(":", 1) for pair in config.split(",") if ":" in pair)
    backend = backends.get(device.type)
    # gloo supports only some operations on GPUs
    if backend is not None and (device.type == "cpu" or backend != "gloo"):
        return device
    if "cpu" in backends:
        return torch.device("cpu")
    if "cuda" in backends:
        return torch.device("cuda", torch.cuda.current_device())
    raise BoxcovError(
        f"the process group ({config}) sends neither CPU nor GPU tensors: use gloo, nccl or both"
    )


def _local_gpu(device: str, local_rank: int, count: int) -> str:
    if device != "cuda":
        raise BoxcovError(
            f"device {device!r} under torchrun: give cuda, and each process takes its own GPU"
        )
    if local_rank >= count:
        raise BoxcovError(
            f"process {local_rank} of this machine has no GPU, there are {count}: "
            "lower --nproc-per-node"
        )
    return f"cuda:{local_rank}"


def _gather_text(text: str) -> list[str]:
    device = transfer_device(torch.device("cpu"), dist.get_backend_config())
    content = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    sizes = [torch.zeros(1, dtype=torch.long, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(content)], device=device))
    longest = max(int(size) for size in sizes)
    padded = torch.cat([content, content.new_zeros(longest - len(content))])
    texts: list[Tensor] = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(texts, padded)
    return [bytes(each[: int(size)].tolist()).decode() for each, size in zip(texts, sizes)]
