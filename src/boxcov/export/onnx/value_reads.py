"""Find the lines that read values of tensors: a graph with fixed shapes cannot follow them."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

_TORCH = str(Path(torch.__file__).parent)
_CONVERSIONS = (Tensor.tolist, Tensor.numpy, Tensor.__array__)


@contextmanager
def find_value_reads(
    inputs: Iterable[Tensor], hints: Mapping[str, str] | None = None
) -> Iterator[list[str]]:
    """Collect where values that depend on ``inputs`` decide a shape or a branch.

    Each line of code appears once, as "file:number in function: code", and after it the hint for
    the function that it was called by, if there is one.
    """
    operations = _Operations(inputs, hints or {})
    with _Conversions(operations), operations:
        yield operations.lines


class _Operations(TorchDispatchMode):
    """Follow what depends on the inputs, and record operations that read its values."""

    def __init__(self, inputs: Iterable[Tensor], hints: Mapping[str, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lines: list[str] = []
        self.hints = hints
        self._behind = WeakTensorKeyDictionary(dict.fromkeys(inputs, True))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(self.depends(leaf) for leaf in tree_leaves((args, kwargs))):
            if _reads_values(func, args):
                self.add_line()
            for leaf in tree_leaves(out):
                if isinstance(leaf, Tensor):
                    self._behind[leaf] = True
                    if leaf._base is not None:  # a write to a view changes what it views
                        self._behind[leaf._base] = True
        return out

    def depends(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value in self._behind

    def add_line(self) -> None:
        """Record the innermost line that is neither torch's nor of this file."""
        stack = traceback.extract_stack()
        for frame in reversed(stack):
            if not frame.filename.startswith((_TORCH, __file__)):
                line = f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}: {frame.line}"
                line += "".join(f"; {self.hints[f.name]}" for f in stack if f.name in self.hints)
                self.lines += [line] if line not in self.lines else []
                return


class _Conversions(TorchFunctionMode):
    """Report conversions to lists and arrays, which a dispatch mode does not see."""

    def __init__(self, operations: _Operations) -> None:
        super().__init__()
        self.operations = operations

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CONVERSIONS and self.operations.depends(args[0]):
            self.operations.add_line()
        return func(*args, **(kwargs or {}))


def _reads_values(func: Any, args: Any) -> bool:
    """Return whether the result's shape, or a Python number, depends on the values of tensors."""
    if func is torch.ops.aten.index.Tensor:
        indices = [index for index in args[1] if index is not None]
        return any(index.dtype in (torch.bool, torch.uint8) for index in indices)
    tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
    return any(tag in func.tags for tag in tags)
