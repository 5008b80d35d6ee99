"""What all data sets share: merging frames into batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from boxcov.errors import BoxcovError


def batched(frames: Sequence[Any], size: int) -> Batches:
    """``frames`` in batches of ``size``: tensors are joined along their first dimension, lists end to end, dicts and tuples item by item.

    >>> from boxcov.data import shapes
    >>> batches = batched(shapes.frames(count=10), 4)
    >>> len(batches), batches[2][0].shape
    (3, torch.Size([2, 1, 64, 64]))
    """
    if size < 1:
        raise BoxcovError(f"a batch holds at least 1 frame, got {size}")
    return Batches(frames, size)


class Batches(Sequence[Any]):
    """Frames merged when they are asked for."""

    def __init__(self, frames: Sequence[Any], size: int) -> None:
        self.frames, self.size = frames, size

    def __len__(self) -> int:
        return -(-len(self.frames) // self.size)

    def __getitem__(self, index: Any) -> Any:
        start = range(len(self))[index] * self.size
        items = [self.frames[i] for i in range(start, min(start + self.size, len(self.frames)))]
        return _joined(items)


def _joined(items: list[Any]) -> Any:
    first = items[0]
    if isinstance(first, Tensor):
        return torch.cat(items)
    if isinstance(first, list):
        return [entry for item in items for entry in item]
    if isinstance(first, tuple):
        return tuple(_joined(list(entries)) for entries in zip(*items))
    if isinstance(first, dict):
        return {key: _joined([item[key] for item in items]) for key in first}
    if all(item is None for item in items):
        return None
    raise BoxcovError(
        f"cannot merge {type(first).__name__} items into a batch: give tensors, lists, tuples or dicts of them"
    )
