"""Inputs and targets, made ready for a pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path, tree_map_only

from boxcov.errors import BoxcovError, NotFiniteFrameError


def move(tree: Any, device: torch.device) -> Any:
    """Every tensor of a pytree on ``device``, free to be differentiated through.

    >>> move({"points": torch.zeros(2)}, torch.device("cpu"))
    {'points': tensor([0., 0.])}
    """
    return tree_map_only(Tensor, lambda t: (t.clone() if t.is_inference() else t).to(device), tree)


def fresh(tree: Any) -> Any:
    """A copy for one pass: a forward that works in place, or fills its input's dict, must not spoil the next pass, or the caller's data.

    >>> inputs = {"x": torch.zeros(1)}
    >>> _ = fresh(inputs)["x"].add_(1)
    >>> inputs["x"]
    tensor([0.])
    """
    return tree_map_only(Tensor, lambda t: t.clone(), tree)


def ready(inputs: Any, device: torch.device, where: str = "inputs") -> Any:
    """The inputs on the detector's device, checked for numbers that are none.

    >>> ready([torch.tensor([1.0, float("nan")])], torch.device("cpu"))
    Traceback (most recent call last):
    ...
    boxcov.errors.NotFiniteFrameError: inputs[0] holds 1 NaN or infinite values of 2
    """
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
    """One look at each device."""
    devices = {tensor.device for tensor in tensors}
    return all(
        bool(torch.stack([t.isfinite().all() for t in tensors if t.device == device]).all())
        for device in devices
    )


def pairs(frames: Iterable[Any], device: torch.device) -> Iterator[tuple[int, Any, Any]]:
    """The number, inputs and targets of every item, on ``device``.

    >>> [(batch, len(inputs)) for batch, inputs, _ in pairs([(torch.zeros(3), None)], torch.device("cpu"))]
    [(0, 3)]
    """
    for batch, item in enumerate(frames):
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise BoxcovError(
                f"frames must give pairs (inputs, targets); item {batch} is a {type(item).__name__}"
            )
        yield batch, ready(item[0], device, f"inputs of batch {batch}"), move(item[1], device)


def most_frames(inputs: Any, targets: Any) -> int | None:
    """How many frames a batch can have, from its tensors' first dimensions and its lists' lengths; None where that cannot be told.

    A list of inputs may hold one entry a frame, or the parts of one input: only lists of inputs and of targets together tell.

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
