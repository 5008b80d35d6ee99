"""The items that a fit reads and their order, which is the same in every run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from boxcov._torch.distributed import World
from boxcov._torch.modules import hash_tensor
from boxcov.data.loader import LoadedFrames, load_items
from boxcov.data.sequence import Batches
from boxcov.errors import BoxcovError

_SINGLE = World()


class Items:
    """The share of ``frames`` that a fit uses, numbered from 0; an item is one batch of frames.

    A random subset is drawn from an indexable sequence; from a stream, evenly spaced items.

    >>> items = Items("abcdefgh", fraction=0.5, seed=0)
    >>> items.expected, len(list(items.starting_at(1)))
    (4, 3)
    """

    def __init__(
        self, frames: Iterable[Any], fraction: float, seed: int, world: World = _SINGLE
    ) -> None:
        self.frames, self.fraction, self.world = frames, fraction, world
        self.size = len(frames) if isinstance(frames, Sized) else None
        self.expected: int | None = None  # number of items used; None for a stream
        if self.size is not None:
            self.expected = max(1, round(fraction * self.size)) if self.size else 0
        self._stream_length: int | None = None  # known once a stream was read to its end
        self._indexable = (
            bool(self.size) and hasattr(frames, "__getitem__") and not isinstance(frames, Mapping)
        )
        self._subset: list[int] | None = None
        if self.size and self._indexable and fraction < 1:
            generator = torch.Generator().manual_seed(seed)
            drawn = torch.randperm(self.size, generator=generator)[: self.expected]
            self._subset = sorted(drawn.tolist())

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


def hash_item(item: Any) -> str:
    """Return the SHA-256 of the tensors, numbers and strings of an item."""
    digest = sha256()
    for leaf in tree_leaves(item):
        if isinstance(leaf, Tensor):
            hash_tensor(digest, leaf)
        elif isinstance(leaf, (str, int, float, bool, type(None))):
            digest.update(repr(leaf).encode())
    return digest.hexdigest()
