"""The items of a fit: which share of the frames it uses, in which order, on which rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from math import ceil
from typing import Any

import torch

from boxcov._torch.distributed import World
from boxcov.data.loader import LoadedFrames, load_items
from boxcov.data.sequence import Batches
from boxcov.errors import BoxcovError


class Items:
    """The share of ``frames`` that a fit uses, numbered from 0; an item is one batch of frames.

    A random subset is drawn from an indexable sequence; from a stream, evenly spaced items.
    """

    def __init__(self, frames: Iterable[Any], fraction: float, seed: int, world: World) -> None:
        self.frames, self.fraction, self.world = frames, fraction, world
        self.size = len(frames) if isinstance(frames, Sized) else None
        self._stream_length: int | None = None  # known once a stream was read to its end
        has_items = hasattr(frames, "__getitem__") and not isinstance(frames, Mapping)
        self._indexable = bool(self.size) and has_items
        self.expected: int | None = None  # number of items used; None for a stream
        self._subset: list[int] | None = None
        if self.size is not None:
            self.expected = ceil(round(fraction * self.size, 9))  # as _stream() takes them
        if self.size and self._indexable and fraction < 1:
            self.expected = max(1, round(fraction * self.size))
            generator = torch.Generator().manual_seed(seed)
            drawn = torch.randperm(self.size, generator=generator, device="cpu")
            self._subset = sorted(drawn[: self.expected].tolist())

    def settings(self) -> dict[str, Any]:
        """Return what decides which items this rank reads, for a checkpoint."""
        size, world = {"items": self.size}, self.world
        return size if world.is_single else {**size, "shard": f"{world.rank} of {world.size}"}

    def starting_at(self, start: int) -> Iterator[tuple[int, Any]]:
        """Yield the number and content of this rank's items from number ``start`` on.

        Of an indexable sequence only these items are read; a stream is read from its beginning.
        """
        if self._subset is not None or (self._indexable and (start or not self.world.is_single)):
            numbers = list(filter(self.world.owns, range(start, self.expected or 0)))
            places = numbers if self._subset is None else [self._subset[n] for n in numbers]
            yield from zip(numbers, load_items(self.frames, places))  # type: ignore[arg-type]
            return
        for number, item in self._stream():
            if number >= start and self.world.owns(number):
                yield number, item

    def _stream(self) -> Iterator[tuple[int, Any]]:
        used = seen = 0
        for item in self.frames:
            seen += 1
            if used < round(seen * self.fraction, 9):
                yield used, item
                used += 1
        self._stream_length = seen

    def total_frames(self, frames: int, items: int) -> int:
        """Return the frames of the whole data set, given that ``items`` items held ``frames``.

        Exact if all items have equally many frames, and for ``boxcov.data.batched``.
        """
        data = self.frames.frames if isinstance(self.frames, LoadedFrames) else self.frames
        if isinstance(data, Batches):
            return len(data.frames)
        size = self._stream_length if self.size is None else self.size
        if size is None:
            raise BoxcovError(
                "fisher='identity' reads one item, and this data set has no length: "
                "give n_data, the number of its frames"
            )
        return round(frames * size / items)
