"""The passes of a fit over its items: which items, on which rank, interrupted and resumed.

An item is one batch of frames. A pass that is interrupted leaves a checkpoint of the items before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import suppress
from math import ceil
from pathlib import Path
from time import monotonic
from typing import Any, Literal
from warnings import warn

import torch

from boxcov._torch.distributed import World
from boxcov._torch.modules import move, ready
from boxcov.data.loader import LoadedFrames, load_items
from boxcov.data.sequence import Batches
from boxcov.errors import BoxcovError, BoxcovWarning, NotFiniteFrameError, join_names
from boxcov.kfac.accumulate import Accumulator
from boxcov.kfac.checkpoint import (
    Checkpoint,
    SaveError,
    hash_item,
    read_checkpoint,
    write_checkpoint,
)
from boxcov.kfac.ekfac import GradientMoments

Progress = Callable[[int, int | None], None]
NonFinite = Literal["error", "skip"]
PassSums = Accumulator | GradientMoments  # of the first pass over the items, and of the second


class Items:
    """The share of ``frames`` that a fit uses, numbered from 0; an item is one batch of frames.

    A random subset is drawn from an indexable sequence; from a stream, evenly spaced items.
    """

    def __init__(self, frames: Iterable[Any], fraction: float, seed: int, world: World) -> None:
        self.frames, self.fraction, self.world = frames, fraction, world
        self.size = len(frames) if isinstance(frames, Sized) else None
        self._stream_length: int | None = None  # known once a stream was read to its end
        self._indexable = hasattr(frames, "__getitem__") and not isinstance(frames, Mapping)
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
        is_partial = start or not self.world.is_single
        if self._subset is not None or (self.size and self._indexable and is_partial):
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


def load_item(item: Any, number: int, device: torch.device) -> tuple[Any, Any]:
    """Return the inputs, checked, and the targets of item ``number``, both on ``device``."""
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise BoxcovError(
            f"frames must give pairs (inputs, targets); item {number} is a {type(item).__name__}"
        )
    inputs, targets = item
    return ready(inputs, device, f"inputs of item {number}"), move(targets, device)


def _tokens(targets: Any) -> str:
    """Return the data set's names of the frames of an item, if it has any."""
    entries = targets if isinstance(targets, list) else []
    tokens = [entry["token"] for entry in entries if isinstance(entry, dict) and "token" in entry]
    return f" ({join_names(tokens)})" if tokens else ""


class Pass:
    """One pass over the items of this rank, which can be interrupted and resumed.

    settings: everything that decides the sums, by name; a checkpoint of others is refused.
    """

    def __init__(
        self,
        items: Items,
        sums: PassSums,
        settings: Mapping[str, Any],
        checkpoint: Checkpoint | None,
        nonfinite: NonFinite,
    ) -> None:
        self.items, self.sums, self.settings = items, sums, settings
        self.checkpoint, self.nonfinite = checkpoint, nonfinite
        self.next_item = 0
        self.skipped: list[int] = []  # numbers of the items left out
        self._item_hash = ""  # of the last item of the run that is resumed
        self._last_item: Any = None
        self._is_partial = False  # an item is in the sums, or in part, and not counted
        self._saved_at = monotonic()
        if checkpoint is not None and checkpoint.resume and Path(checkpoint.path).exists():
            with read_checkpoint(checkpoint.path, settings) as (header, file):
                self.skipped, self._item_hash = header["skipped"], header["item_sha256"]
                sums.load_state(file, header)
                self.next_item = header["next"]
        self._saved_items = self.next_item

    def run(
        self, progress: Progress | None, total: int | None, earlier: Pass | None = None
    ) -> None:
        """Add all items; saves the sums at an interval, on an error and at the end.

        earlier: the pass before, whose skipped items are left out, and whose items count as done.
        """
        done, left_out = (0, []) if earlier is None else (earlier.next_item, earlier.skipped)
        with self.items.world.label_errors():
            try:
                for number, item in self._remaining():
                    self._add(number, item, number in left_out)
                    if progress is not None:
                        progress(done + number + 1, total)
            except BaseException as error:
                if not (isinstance(error, SaveError) or self._is_partial):
                    with suppress(BoxcovError):  # the original error is more useful
                        self.save()
                raise
            self.save()  # what follows may fail: other ranks, a full disk

    def count_items(self) -> tuple[int, int]:
        """Return how many items all ranks added, and left out."""
        world, n_skipped = self.items.world, len(self.skipped)
        n_added = world.count_items(self.next_item) - n_skipped
        added, skipped = world.all_reduce([], [n_added, n_skipped])
        return int(added), int(skipped)

    def _remaining(self) -> Iterator[tuple[int, Any]]:
        """Return the items still to be processed, of the data of the run that is resumed."""
        remaining = self.items.starting_at(max(self.next_item - 1, 0))
        if self.checkpoint is not None and self.next_item:
            item = next(remaining, (None, None))[1]
            if hash_item(item) != self._item_hash:
                raise BoxcovError(
                    f"{self.checkpoint.path}: made from other data: item {self.next_item - 1} has "
                    "changed. Give the same frames in the same order, or remove the file"
                )
            self._last_item = item
        return remaining

    def _add(self, number: int, item: Any, left_out: bool) -> None:
        """Add an item to the sums, unless it is left out, and count it; save if it is time."""
        terms = None if left_out else self._terms(number, item)
        self._is_partial = True  # until the item is counted: an interrupt may come at any moment
        if terms is not None:
            self.sums.add(terms)
        elif not left_out:
            self.skipped.append(number)
        self.next_item, self._last_item = number + 1, item
        self._is_partial = False
        every = torch.inf if self.checkpoint is None else self.checkpoint.every_seconds
        if monotonic() - self._saved_at >= every:
            self.save()

    def _terms(self, number: int, item: Any) -> Any:
        """What one item adds to the sums; None if it is not finite and left out."""
        try:
            return self.sums.terms(*load_item(item, number, self.sums.device), number)
        except NotFiniteFrameError as error:
            message = f"{error}{_tokens(item[1])}"
            if self.nonfinite == "error":
                raise NotFiniteFrameError(
                    f"{message}. Correct it, or leave such frames out with nonfinite='skip'"
                ) from None
            warn(f"{message}: left out", BoxcovWarning, stacklevel=6)
            return None

    def save(self) -> None:
        """Write the file, unless there is none or it is up to date."""
        if self.checkpoint is None or self.next_item == self._saved_items:
            return
        tensors, state = self.sums.state()
        header = {
            "settings": dict(self.settings),
            "next": self.next_item,
            "skipped": self.skipped,
            "item_sha256": hash_item(self._last_item),
            **state,
        }
        write_checkpoint(self.checkpoint.path, tensors, header, self._saved_items)
        self._saved_items, self._saved_at = self.next_item, monotonic()
