"""Which items of the data a fit reads, and in which order: the same every time, so that a fit can go on where it was cut off."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from boxcov._torch.distributed import World
from boxcov.data.loader import LoadedFrames, load_items
from boxcov.data.sequence import Batches
from boxcov.errors import BoxcovError

_SINGLE = World()


class Items:
    """The items of ``frames`` that a share of the data means, numbered from 0.

    >>> items = Items("abcdefgh", fraction=0.5, seed=0)
    >>> items.expected, [item for _, item in items.after(2)] == [item for _, item in items.after(0)][2:]
    (4, True)
    """

    def __init__(
        self, frames: Iterable[Any], fraction: float, seed: int, world: World = _SINGLE
    ) -> None:
        self.frames, self.fraction, self.world = frames, fraction, world
        self.seen = 0  # items of a stream
        self.done = False  # whether a stream was read to its end
        self.order: list[int] | None = None
        self.size = len(frames) if isinstance(frames, Sized) else None
        self.expected: int | None = (
            None if self.size is None else max(1, round(fraction * self.size)) if self.size else 0
        )
        self.indexed = (
            bool(self.size) and hasattr(frames, "__getitem__") and not isinstance(frames, Mapping)
        )
        if self.size and self.indexed and fraction < 1:
            generator = torch.Generator().manual_seed(seed)
            self.order = sorted(
                torch.randperm(self.size, generator=generator)[: self.expected].tolist()
            )

    def after(self, start: int) -> Iterator[tuple[int, Any]]:
        """This rank's items from number ``start`` on, with their numbers; a stream is read and passed over where they are not."""
        if self.order is not None or (
            self.indexed and (start or not self.world.is_single)
        ):  # only what is used is ever read
            numbers = list(filter(self.world.owns, range(start, self.expected or 0)))
            places = numbers if self.order is None else [self.order[number] for number in numbers]
            yield from zip(numbers, load_items(self.frames, places))  # type: ignore[arg-type]
            return
        yield from (
            (number, item)
            for number, item in self._streamed()
            if number >= start and self.world.owns(number)
        )

    def _streamed(self) -> Iterator[tuple[int, Any]]:
        """Evenly spread over the stream, the first one always."""
        used = self.seen = 0
        for item in self.frames:
            self.seen += 1
            if used < round(self.seen * self.fraction, 9):
                yield used, item
                used += 1
        self.done = True

    def all_frames(self, frames: int, items: int) -> int:
        """The frames of the whole data set, of which ``items`` items held ``frames``: exact for equal items and for ``boxcov.data.batched``."""
        frames_or_batches = (
            self.frames.frames if isinstance(self.frames, LoadedFrames) else self.frames
        )
        if isinstance(frames_or_batches, Batches):
            return len(frames_or_batches.frames)
        if self.size is None and not self.done:
            raise BoxcovError(
                "fisher='identity' reads one item, and this data set has no length: give n_data, the number of its frames"
            )
        return round(frames * (self.seen if self.size is None else self.size) / items)


def digest(item: Any) -> str:
    """SHA-256 of the tensors, numbers and texts of an item: whether two are the same.

    >>> digest((torch.zeros(2), None)) == digest((torch.zeros(2), None)), digest(torch.zeros(2)) == digest(torch.ones(2))
    (True, False)
    """
    found = sha256()
    for leaf in tree_leaves(item):
        if isinstance(leaf, Tensor):
            found.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            found.update(
                leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            )
        elif isinstance(leaf, (str, int, float, bool, type(None))):
            found.update(repr(leaf).encode())
    return found.hexdigest()
