"""A device without values: what runs there can be captured as a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

DEVICE = torch.device("meta")


@contextmanager
def without_values(may_copy: bool = False) -> Iterator[WithoutValues]:
    """All tensors that exist already are on a device that holds no values.

    Code that reads a value there, or whose shapes depend on one, raises: on a GPU it would wait for
    the device. So does code that copies a tensor it made on the CPU to the device, unless
    ``may_copy``: a first frame makes the constants of the later ones.
    """
    mode = WithoutValues(may_copy)
    with torch.no_grad(), mode, _Devices(mode):
        yield mode


class WithoutValues(TorchDispatchMode):
    """Replaces tensors by ones without values, and counts the operations."""

    def __init__(self, may_copy: bool) -> None:
        super().__init__()
        self.operations, self.may_copy = 0, may_copy
        self._moved: dict[int, tuple[Tensor, Tensor]] = {}  # by id; the tensor is kept alive
        self._made: dict[int, Tensor] = {}  # on the CPU, since the mode is active

    def move(self, tensor: Tensor) -> Tensor:
        """The tensor without its values, always the same one; tensors made on the CPU stay."""
        if tensor.is_meta or id(tensor) in self._made:
            return tensor
        if id(tensor) not in self._moved:
            shape, strides = tensor.shape, tensor.stride()
            moved = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=DEVICE)
            self._moved[id(tensor)] = tensor, moved
        return self._moved[id(tensor)][1]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.operations += 1
        given = tree_map_only(Tensor, self.move, (args, kwargs or {}))
        out = func(*given[0], **given[1])
        read = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        on_cpu = [tensor for tensor in read if not tensor.is_meta and tensor.dim()]
        meets_device = any(tensor.is_meta for tensor in (*read, *made))
        if on_cpu and meets_device and not self.may_copy:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in on_cpu)
            raise RuntimeError(f"{func}: a tensor on the CPU, {shapes}, meets one on the device")
        self._made |= {id(tensor): tensor for tensor in made if not tensor.is_meta}
        return out


class _Devices(TorchFunctionMode):
    """Tensors that existed before, such as weights, name the device without values as theirs."""

    def __init__(self, mode: WithoutValues) -> None:
        super().__init__()
        self.mode = mode

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == Tensor.device.__get__:
            args = (self.mode.move(args[0]),)
        is_index = func in (Tensor.__getitem__, Tensor.__setitem__)
        if is_index and not self.mode.may_copy and _has_list(args[1]):
            raise RuntimeError(f"{func.__name__}: a list as index is copied to the device")
        return func(*args, **(kwargs or {}))


def _has_list(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, (list, np.ndarray)) for part in parts)
