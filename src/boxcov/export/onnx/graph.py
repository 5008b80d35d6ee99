"""The graph of a detector with its covariances, or all that keeps it from being one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from boxcov.detector import Detector, Selection
from boxcov.errors import BoxcovError
from boxcov.export.onnx.torch_onnx import missing_operators
from boxcov.export.onnx.trace import trace
from boxcov.export.onnx.value_reads import find_value_reads
from boxcov.posterior.posterior import Posterior
from boxcov.predict.static_frame import FrameFunction, WithSignals
from boxcov.static_selection import StaticLimits, StaticSelection

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
    """Return the graph of ``FrameFunction``; raise, with all reasons at once, if there is none.

    inputs: a pytree; ``names`` are those of its tensors.
    """
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    stand_in, obstacles = _select_example(detector, inputs)
    function, refusals = _frame_function(detector, posterior, inputs, limits, etas)
    obstacles += refusals
    if function is not None:
        run = _flat(function, inputs)
        with _exporting(), find_value_reads([*tensors, *stand_in], _HINTS) as lines:
            expected = dict(zip(function.names, run(*tensors)))
        advice = "shapes and branches must not depend on values (use torch.where, topk)"
        obstacles += [f"{advice}: {line}" for line in lines]
        with _exporting():
            module = trace(run, *tensors, may_read=bool(obstacles))
        # torch.onnx itself says whether it can write the graph: this only completes the list
        if missing := missing_operators(module) if obstacles else []:
            obstacles.append(f"torch.onnx has no version of {', '.join(missing)}")
    if obstacles:
        raise BoxcovError(
            f"{type(detector).__name__} cannot be written to ONNX (docs/guide/deploy.md says what "
            "a graph needs): " + "; ".join(f"({n}) {o}" for n, o in enumerate(obstacles, 1))
        )
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


def _select_example(detector: Detector, inputs: Any) -> tuple[list[Tensor], list[str]]:
    """Let the boxes of the example stand in for a missing ``select_static()``.

    So the search for reasons goes on. Return their tensors and this reason.
    """
    if type(detector).select_static is not Detector.select_static:
        return [], []
    with torch.no_grad():
        given = inputs.inputs if isinstance(inputs, WithSignals) else inputs
        selection: Selection = detector.select(detector(given))
    name = type(detector).__name__
    reason = f"{name} has no select_static(raw, limits), which selects a fixed number of rows"
    if not len(selection):
        raise BoxcovError(f"{reason}; more cannot be said, as the example frame has no box")
    static = StaticSelection(selection, torch.tensor(len(selection)), torch.tensor(0))
    detector.__dict__["select_static"] = lambda raw, limits: static
    tensors = [selection.scores, selection.labels, *tree_leaves(selection.where)]
    return [leaf for leaf in tensors if isinstance(leaf, Tensor)], [reason]


def _frame_function(
    detector: Detector,
    posterior: Posterior,
    inputs: Any,
    limits: StaticLimits,
    etas: dict[str, Tensor] | None,
) -> tuple[FrameFunction | None, list[str]]:
    """Return the function and no reason; or one with samples, or None, and why it is not exact."""
    refusals: list[str] = []
    samples = [etas] if etas is not None else [None, posterior.sample(2)]
    for directions in samples:
        try:
            return FrameFunction(detector, posterior, inputs, limits, directions), refusals
        except BoxcovError as error:
            refusals += [str(error)] if str(error) not in refusals else []
    return None, refusals


def _drop_unused(module: fx.GraphModule, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Remove inputs without users from the graph, in place, and return the others."""
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    used = {name: inputs[name] for name, node in zip(inputs, nodes) if node.users}
    for node in nodes:
        if not node.users:
            module.graph.erase_node(node)
    module.recompile()
    return used
