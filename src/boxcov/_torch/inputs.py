"""Inputs and targets: checked, moved to a device, copied for one forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path, tree_map_only

from boxcov.errors import BoxcovError, NotFiniteFrameError


def move(tree: Any, device: torch.device) -> Any:
    """Return a pytree with every tensor on ``device``; inference tensors become normal ones."""
    return tree_map_only(Tensor, lambda t: (t.clone() if t.is_inference() else t).to(device), tree)


def fresh(tree: Any) -> Any:
    """Return a copy of a pytree for one forward pass, which may change its inputs in place."""
    return tree_map_only(Tensor, lambda t: t.clone(), tree)


def ready(inputs: Any, device: torch.device, where: str = "inputs") -> Any:
    """Return ``inputs`` on ``device``; raise if they hold NaN or infinite values."""
    leaves = [
        (path, leaf)
        for path, leaf in tree_flatten_with_path(inputs)[0]
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]
    if not _all_finite([leaf for _, leaf in leaves]):
        for path, leaf in leaves:
            bad = int((~leaf.isfinite()).sum())
            if bad:
                step = "".join(str(part) for part in path)
                raise NotFiniteFrameError(
                    f"{where}{step} holds {bad} NaN or infinite values of {leaf.numel()}"
                )
    return move(inputs, device)


def _all_finite(tensors: list[Tensor]) -> bool:
    """Synchronizes once per device."""
    devices = {tensor.device for tensor in tensors}
    return all(
        bool(torch.stack([t.isfinite().all() for t in tensors if t.device == device]).all())
        for device in devices
    )


def load_item(item: Any, number: int, device: torch.device) -> tuple[Any, Any]:
    """Return the inputs, checked, and the targets of item ``number``, both on ``device``."""
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise BoxcovError(
            f"frames must give pairs (inputs, targets); item {number} is a {type(item).__name__}"
        )
    inputs, targets = item
    return ready(inputs, device, f"inputs of batch {number}"), move(targets, device)


def most_frames(inputs: Any, targets: Any) -> int | None:
    """Return an upper bound of the number of frames of a batch, or None if it is unknown.

    It is read from the first dimension of tensors and the length of lists. A list of inputs may
    hold one entry per frame or the parts of one input: it counts only with a list of targets.

    >>> most_frames(torch.zeros(4, 3, 8, 8), None), most_frames([torch.zeros(900, 5)], [{}])
    (4, 1)
    >>> most_frames([torch.zeros(4, 3, 8, 8), torch.zeros(4, 2)], None) is None
    True
    """
    if isinstance(inputs, Mapping):
        known = [value for value in inputs.values() if isinstance(value, (Tensor, list))]
    elif isinstance(inputs, Tensor) or (
        isinstance(inputs, list) and isinstance(targets, (Tensor, list))
    ):
        known = [inputs]
    else:
        return None
    counts = [
        len(each)
        for each in (*known, targets)
        if isinstance(each, list) or (isinstance(each, Tensor) and each.dim())
    ]
    return max(counts, default=None) if known else None
