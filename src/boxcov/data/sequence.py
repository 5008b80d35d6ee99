"""Sequences of frames: the base of every data set, batches, and names of files in a data set."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from boxcov.errors import BoxcovError, check_whole, counted, join_names


class FrameSequence(Sequence[Any], ABC):
    """Frames that are loaded when they are indexed; ``frames[:28]`` has the same type."""

    def __init__(self, count: int) -> None:
        self.indices = range(count)  # into all frames of the data set

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, item: Any) -> Any:
        if not isinstance(item, slice):
            return self.load(self.indices[item])
        part = copy(self)
        part.indices = self.indices[item]
        return part

    def __repr__(self) -> str:
        return f"{type(self).__name__}({counted(len(self), 'item')})"

    @abstractmethod
    def load(self, index: int) -> Any:
        """Load frame ``index`` of the data set."""


def batched(frames: Sequence[Any], size: int) -> Batches:
    """Return ``frames`` in batches of ``size``, merged when they are indexed.

    Tensors are concatenated along their first dimension, and so are lists. Dicts and tuples are
    merged entry by entry.

    >>> from boxcov.data import shapes
    >>> batches = batched(shapes.frames(count=10), 4)
    >>> len(batches), batches[2][0].shape
    (3, torch.Size([2, 1, 64, 64]))
    """
    check_whole("the batch size", size)
    return Batches(frames, size)


class Batches(FrameSequence):
    """Frames merged into batches; made by ``batched``."""

    def __init__(self, frames: Sequence[Any], size: int) -> None:
        super().__init__(-(-len(frames) // size))
        self.frames, self.size = frames, size

    def load(self, index: int) -> Any:
        start = index * self.size
        stop = min(start + self.size, len(self.frames))
        return merge([self.frames[i] for i in range(start, stop)])


def merge(items: list[Any]) -> Any:
    """Return items as one batch; see ``batched``."""
    first = items[0]
    if isinstance(first, Tensor):
        shapes = {tuple(item.shape) for item in items}
        if len({shape[1:] for shape in shapes}) > 1 or () in shapes:
            raise BoxcovError(
                f"cannot merge tensors of the shapes {join_names(map(str, sorted(shapes)))} into a "
                "batch: use a batch of 1, or inputs of one size"
            )
        return torch.cat(items)
    if isinstance(first, list):
        return [entry for item in items for entry in item]
    if isinstance(first, tuple):
        return tuple(merge(list(entries)) for entries in zip(*items))
    if isinstance(first, dict):
        return {key: merge([item[key] for item in items]) for key in first}
    if all(item is None for item in items):
        return None
    raise BoxcovError(
        f"cannot merge {type(first).__name__} items into a batch: use tensors, or lists, tuples "
        "or dicts of tensors"
    )


def leads_out(name: str) -> bool:
    r"""Return whether a file name in a data set leads out of its folder, or to nothing.

    >>> [leads_out(name) for name in ("a/b.png", "a/../../b.png", "/etc/passwd", "C:\\b.png", "")]
    [False, True, True, True, True]
    """
    parts = name.replace("\\", "/").split("/")
    return not parts[0] or ".." in parts or ":" in name
