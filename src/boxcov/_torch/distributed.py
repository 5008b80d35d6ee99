"""Work spread over processes: each counts its share of the items, and the sums are added up once, at the end.

What travels between the ranks are numbers and JSON, through ``torch.distributed``: by gloo from memory, by nccl between GPUs.
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
from boxcov.kfac.accumulate import Accumulator, Sums
from boxcov.posterior.file import layer_from_json, layer_to_json

PATIENCE = timedelta(
    hours=12
)  # for the slowest rank at the end of the work; one that dies is noticed at once


@dataclass(frozen=True)
class Ranks:
    """Which of how many processes this is: item i belongs to rank ``i % count``.

    >>> Ranks(1, 3).owns(4), Ranks(1, 3).items(8), Ranks().alone
    (True, 3, True)
    """

    rank: int = 0
    count: int = 1

    @staticmethod
    def of_group() -> Ranks:
        """Those of torch.distributed's default group."""
        if not (dist.is_available() and dist.is_initialized()):
            raise BoxcovError(
                "distributed=True, but there is no process group: call torch.distributed.init_process_group first"
            )
        return Ranks(dist.get_rank(), dist.get_world_size())

    @property
    def alone(self) -> bool:
        return self.count == 1

    def owns(self, number: int) -> bool:
        return number % self.count == self.rank

    def items(self, end: int) -> int:
        """How many of the items before ``end`` are this rank's."""
        return len(range(self.rank, end, self.count))

    def checkpoint(self, path: str | Path | None) -> Path | None:
        """A file for each rank."""
        if path is None or self.alone:
            return None if path is None else Path(path)
        return Path(f"{path}.{self.rank}")

    @contextmanager
    def named(self) -> Iterator[None]:
        """Errors say whose they are."""
        try:
            yield
        except BoxcovError as error:
            if self.alone:
                raise
            raise type(error)(f"rank {self.rank} of {self.count}: {error}") from error

    def wait(self) -> None:
        """Until every rank has come here."""
        self.add([], [])

    def add(self, tensors: Sequence[Tensor], counts: Sequence[float]) -> list[float]:
        """The sums over all ranks: into the ``tensors`` of every one, and of the ``counts``, whole numbers up to 2^53."""
        if self.alone:
            return list(counts)
        total = torch.tensor([*counts, 0.0], dtype=torch.float64)
        with self._together():
            for tensor in (*tensors, total):
                moved = tensor.to(carrier(tensor.device, dist.get_backend_config()))
                dist.all_reduce(moved)
                if moved is not tensor:
                    tensor.copy_(moved)
        found: list[float] = total.tolist()
        return found[:-1]

    def told(self, mine: Any) -> list[Any]:
        """What each rank has to say, in their order, as JSON."""
        if self.alone:
            return [mine]
        with self._together():
            return [json.loads(text) for text in _gathered(json.dumps(mine))]

    def reduce(self, accumulator: Accumulator, items: int, skipped: int) -> tuple[int, int]:
        """The sums of all ranks, into every rank's accumulator; gives the items counted and skipped by all."""
        if self.alone:
            return items, skipped
        told = self.told([layer_to_json(sums.layer) for sums in accumulator.sums.values()])
        layers: list[dict[str, Any]] = next(filter(None, told), [])  # a rank may have had no item
        for layer in map(layer_from_json, layers):
            accumulator.sums.setdefault(layer.weight, Sums.of(layer, accumulator.device))
        every = [accumulator.sums[entry["weight"]] for entry in layers]  # in one order for all
        counts = [
            accumulator.frames,
            accumulator.loss,
            items,
            skipped,
            *(n for s in every for n in (s.locations, s.reached)),
        ]
        frames, accumulator.loss, items_all, skipped_all, *rest = self.add(
            [factor for s in every for factor in (s.Q, s.H)], counts
        )
        accumulator.frames = int(frames)
        for sums, locations, reached in zip(every, rest[::2], rest[1::2]):
            sums.locations, sums.reached = int(locations), reached > 0
        accumulator.sums = {sums.layer.weight: sums for sums in every}
        return int(items_all), int(skipped_all)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """What the ranks do at the same time fails for all when one is gone."""
        try:
            yield
        except RuntimeError as error:
            raise BoxcovError(
                f"rank {self.rank} of {self.count}: another rank is gone, or cannot be reached ({str(error).splitlines()[0]}). Each that was "
                "stopped has kept what it did: start all of them again with --resume"
            ) from error


@contextmanager
def spread(device: str) -> Iterator[tuple[Ranks, str]]:
    """The ranks of a job that torchrun started, joined in a group while this lasts, and the device of this one; without torchrun, one alone.

    >>> with spread("cpu") as (ranks, device):
    ...     ranks, device
    (Ranks(rank=0, count=1), 'cpu')
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "RANK" not in os.environ:
        yield Ranks(), device
        return
    if device.startswith("cuda"):
        device = _own_gpu(device, int(os.environ["LOCAL_RANK"]), torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(backend_for(device), timeout=PATIENCE)
    yield Ranks.of_group(), device
    dist.destroy_process_group()  # not after an error: others may be waiting, and torchrun ends them


def speaks() -> bool:
    """Whether this process is to say what all have done.

    >>> speaks()
    True
    """
    return os.environ.get("RANK", "0") == "0"


def backend_for(device: str) -> str:
    """What joins the ranks: nccl between GPUs, and gloo for what lies in memory.

    >>> backend_for("cpu"), backend_for("cuda:1")
    ('gloo', 'cpu:gloo,cuda:nccl')
    """
    return "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"


def carrier(device: torch.device, config: str) -> torch.device:
    """Where a tensor of ``device`` must lie to travel in a group whose backends are ``config``, as torch gives them.

    >>> carrier(torch.device("cuda:1"), "cpu:gloo,cuda:nccl"), carrier(torch.device("cuda:1"), "cpu:gloo,cuda:gloo")
    (device(type='cuda', index=1), device(type='cpu'))
    """
    backends = dict(pair.split(":", 1) for pair in config.split(",") if ":" in pair)
    known = backends.get(device.type)
    if known is not None and (
        device.type == "cpu" or known != "gloo"
    ):  # gloo has only some of its operations on GPUs
        return device
    if "cpu" in backends:
        return torch.device("cpu")
    if "cuda" in backends:
        return torch.device("cuda", torch.cuda.current_device())
    raise BoxcovError(
        f"the process group ({config}) carries no tensors of a CPU or a GPU: make it with gloo, nccl or both"
    )


def _own_gpu(device: str, local: int, count: int) -> str:
    if device != "cuda":
        raise BoxcovError(
            f"device {device!r} under torchrun: give cuda, and each process takes a GPU of its own"
        )
    if local >= count:
        raise BoxcovError(
            f"process {local} of this machine has no GPU of its own, there are {count}: lower --nproc-per-node"
        )
    return f"cuda:{local}"


def _gathered(text: str) -> list[str]:
    """The texts of all ranks, as bytes: nothing is pickled."""
    device = carrier(torch.device("cpu"), dist.get_backend_config())
    content = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    sizes = [torch.zeros(1, dtype=torch.long, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(content)], device=device))
    longest = max(int(size) for size in sizes)
    padded = torch.cat([content, content.new_zeros(longest - len(content))])
    found: list[Tensor] = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(found, padded)
    return [bytes(each[: int(size)].tolist()).decode() for each, size in zip(found, sizes)]
