"""The graph of a detector with its covariances, or the lines that keep it from being one.

A graph with fixed shapes cannot follow code that reads values of tensors.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from boxcov.detector import Detector
from boxcov.errors import BoxcovError
from boxcov.export.onnx.model import trace
from boxcov.posterior.posterior import Posterior
from boxcov.predict.static_frame import FrameFunction
from boxcov.static_selection import StaticLimits

_TORCH = str(Path(torch.__file__).parent)
_CONVERSIONS = (Tensor.tolist, Tensor.numpy, Tensor.__array__)
_HINTS = {  # after a line that reads values below this function
    "_single_group": "instances() must return one group, of all rows, for boxes of one kind: give "
    "the selections in of_kind their kind as a Python int in `where`, as in "
    "docs/guide/your-detector-onnx.md"
}


@dataclass(frozen=True)
class FrameGraph:
    """A frame as a graph of basic operations with fixed shapes."""

    module: fx.GraphModule
    inputs: dict[str, Tensor]  # the example, without the inputs that the graph does not use
    expected: dict[str, Tensor]  # what PyTorch computes for the example


def build_graph(
    detector: Detector,
    posterior: Posterior,
    inputs: Any,
    names: Iterable[str],
    *,
    limits: StaticLimits,
    etas: dict[str, Tensor] | None,
) -> FrameGraph:
    """Return the graph of ``FrameFunction``; raise with the reason if there is none.

    inputs: a pytree; ``names`` are those of its tensors.
    """
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    function = FrameFunction(detector, posterior, inputs, limits, etas)
    run = _flat(function, inputs)
    with _exporting(), find_value_reads(tensors, _HINTS) as lines:
        expected = dict(zip(function.names, run(*tensors)))
    if lines:
        raise BoxcovError(
            f"{type(detector).__name__} cannot be written to ONNX: shapes and branches must not "
            f"depend on values (use torch.where, topk): {'; '.join(lines)}"
        )
    with _exporting():
        module = trace(run, *tensors)
    named = _drop_unused(module, dict(zip(names, tensors)))
    return FrameGraph(module, named, expected)


@contextmanager
def _exporting() -> Iterator[None]:
    """Say that a model is exported, as ``torch.export`` does: then libraries read no values."""
    before = torch.compiler.is_exporting()
    torch.compiler._is_exporting_flag = True
    try:
        yield
    finally:
        torch.compiler._is_exporting_flag = before


def _flat(function: FrameFunction, inputs: Any) -> Callable[..., tuple[Tensor, ...]]:
    """Return the function with the tensors of ``inputs`` as its arguments."""
    leaves, spec = tree_flatten(inputs)

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        rest = iter(given)
        every = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return function(tree_unflatten(every, spec))

    return run


def _drop_unused(module: fx.GraphModule, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Remove inputs without users from the graph, in place, and return the others."""
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    used = {name: inputs[name] for name, node in zip(inputs, nodes) if node.users}
    for node in nodes:
        if not node.users:
            module.graph.erase_node(node)
    module.recompile()
    return used


# lines that read values


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
        """Whether a value is a tensor that depends on the inputs."""
        return isinstance(value, Tensor) and value in self._behind

    def add_line(self) -> None:
        """Record the innermost line that is neither torch's nor of this file."""
        stack = traceback.extract_stack()
        for frame in reversed(stack):
            if not frame.filename.startswith((_TORCH, __file__)):
                file = Path(frame.filename).name
                line = f"{file}:{frame.lineno} in {frame.name}: {frame.line}"
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
    """Whether the result's shape, or a Python number, depends on the values of tensors."""
    if func is torch.ops.aten.index.Tensor:
        return any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
    tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
    return any(tag in func.tags for tag in tags)
