"""A fit spread over processes: each counts its share of the items, and the sums are added up once, at the end.

What travels between the ranks are numbers and JSON, through ``torch.distributed``: gloo on a CPU, nccl on GPUs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from boxcov.curvature.fisher import Accumulator, Sums
from boxcov.curvature.storage import layer_from_json, layer_to_json
from boxcov.errors import BoxcovError


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
            raise BoxcovError("distributed=True, but there is no process group: call torch.distributed.init_process_group first")
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

    def reduce(self, accumulator: Accumulator, items: int, skipped: int) -> tuple[int, int]:
        """The sums of all ranks, into every rank's accumulator; gives the items counted and skipped by all."""
        if self.alone:
            return items, skipped
        device = accumulator.device
        mine = json.dumps([layer_to_json(sums.layer) for sums in accumulator.sums.values()])
        told: list[list[dict[str, Any]]] = [json.loads(text) for text in _gathered(mine, device)]
        layers = next(filter(None, told), [])  # a rank may have had no item
        for layer in map(layer_from_json, layers):
            accumulator.sums.setdefault(layer.weight, Sums.of(layer, device))
        every = [accumulator.sums[entry["weight"]] for entry in layers]  # in one order for all
        for sums in every:
            dist.all_reduce(sums.Q)
            dist.all_reduce(sums.H)
        counts = [accumulator.frames, accumulator.loss, items, skipped, *(n for s in every for n in (s.locations, s.reached))]
        total = torch.tensor(counts, dtype=torch.float64, device=device)  # whole numbers up to 2^53
        dist.all_reduce(total)
        frames, accumulator.loss, items, skipped, *rest = total.tolist()
        accumulator.frames = int(frames)
        for sums, locations, reached in zip(every, rest[::2], rest[1::2]):
            sums.locations, sums.reached = int(locations), reached > 0
        accumulator.sums = {sums.layer.weight: sums for sums in every}
        return int(items), int(skipped)


def _gathered(text: str, device: torch.device) -> list[str]:
    """The texts of all ranks, as bytes: nothing is pickled."""
    content = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    sizes = [torch.zeros(1, dtype=torch.long, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(content)], device=device))
    longest = max(int(size) for size in sizes)
    padded = torch.cat([content, content.new_zeros(longest - len(content))])
    found: list[Tensor] = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(found, padded)
    return [bytes(each[: int(size)].tolist()).decode() for each, size in zip(found, sizes)]
