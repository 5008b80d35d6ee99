"""CUDA graphs, and the engine that runs the static part of the plain pass, with tangents, as one.

A detector's network is about a thousand small kernels, and a GPU waits for most of their launches.
A graph is one launch. ``predict/route/`` compares it with the plain pass before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from boxcov._torch.modules import fresh, shadow
from boxcov._torch.process_state import allows_tf32
from boxcov.detector import Detector
from boxcov.predict.forward_mode.directions import Directions
from boxcov.predict.forward_mode.storage import Tangent
from boxcov.predict.forward_mode.tangents import Tangents

_MAX_GRAPHS = 2  # each holds all intermediates of a pass
_CAPTURE = Lock()  # the beginning of a capture waits for the device, which ends another capture

Many = tuple[Tensor, ...]
_Captured = tuple[torch.cuda.CUDAGraph, Many]


class CaptureError(Exception):
    """The static part cannot be captured as a CUDA graph."""


@dataclass(frozen=True)
class GraphPass:
    """Result of a pass; the next pass may write over its tensors."""

    raw: Any
    tensors: list[Tensor]  # of ``raw``
    inputs: Tensor  # of the static part
    key: Hashable  # names the graph
    is_replay: bool


class Graphs:
    """Calls functions of tensors, and replays them as CUDA graphs from the second call on.

    Calls with the same key and shapes share a graph. The next replay writes over the outputs, after
    what the stream of the last one did until then.
    max_graphs: each graph holds its intermediates.
    """

    def __init__(self, max_graphs: int = 16) -> None:
        self._max_graphs = max_graphs
        self._called: set[Hashable] = set()
        self._graphs: dict[Hashable, _Captured] = {}
        self._inputs: dict[Hashable, Tensor] = {}  # static inputs, shared by graphs of one shape
        self._stream: torch.cuda.Stream | None = None  # of the last capture or replay
        self.replayed = False  # whether the last call was a replay
        self.capturing = False  # also after a capture that failed

    def __call__(self, key: Hashable, run: Callable[..., Many], *given: Tensor) -> Many:
        key = key, tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in given)
        self.capturing = False
        self.replayed = key in self._called
        if not self.replayed:  # libraries choose their algorithms, which a capture must not do
            self._called.add(key)
            return run(*given)
        if key not in self._graphs and not self._add(key, run, given):
            self.replayed = False
            return run(*given)
        graph, out = self._graphs[key]
        self._wait_for_last(given[0].device)
        self._copy_inputs(given)
        graph.replay()
        return out

    def _add(self, key: Hashable, run: Callable[..., Many], given: Many) -> bool:
        """Capture a graph; return False, and do nothing, while another thread captures one."""
        # no waiting: both threads may also need another precision, see matrix_precision
        if not _CAPTURE.acquire(blocking=False):
            return False
        try:
            self._wait_for_last(given[0].device)
            if len(self._graphs) >= self._max_graphs:
                self._graphs.pop(next(iter(self._graphs)))
            self.capturing = True
            self._graphs[key] = self._capture(run, given)
            self.capturing = False
        finally:
            _CAPTURE.release()
        return True

    def _wait_for_last(self, device: torch.device) -> None:
        """Threads may have streams of their own: that of the last call may still read outputs."""
        current = torch.cuda.current_stream(device)
        if self._stream is not None and self._stream != current:
            current.wait_stream(self._stream)
        self._stream = current

    def _capture(self, run: Callable[..., Many], given: Many) -> _Captured:
        inputs, device = self._copy_inputs(given), given[0].device  # may not be the current one
        aside, current = torch.cuda.Stream(device), torch.cuda.current_stream(device)
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            for _ in range(2):
                run(*inputs)
        current.wait_stream(aside)
        graph, own = torch.cuda.CUDAGraph(), _capture_stream(device)
        # other threads may use the GPU meanwhile
        capture = torch.cuda.graph(graph, stream=own, capture_error_mode="thread_local")
        with torch.cuda.stream(current), capture:  # a capture that fails does not leave its stream
            out = run(*inputs)
        return graph, out

    def _copy_inputs(self, given: Many) -> Many:
        inputs = []
        for number, tensor in enumerate(given):
            key = number, tensor.shape, tensor.stride(), tensor.dtype
            if key not in self._inputs:
                self._inputs[key] = torch.empty_like(tensor)
            inputs.append(self._inputs[key].copy_(tensor))
        return tuple(inputs)


@lru_cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all captures on a device: each stream keeps memory for matrix products."""
    return torch.cuda.Stream(device)


class StaticGraph:
    """The plain pass of a detector that declares its static part (``Detector.static_inputs``).

    weights: along which tangents may be propagated; tangents of weights before the static part
    cannot enter the graph.
    """

    def __init__(self, detector: Detector, weights: Iterable[Tensor]) -> None:
        self._shadow = shadow(detector)
        self._static_part = self._shadow.static_part()
        own = {id(p) for p in self._static_part.parameters()}
        self._takes_tangents = all(id(p) in own for p in weights)
        self.graphs = Graphs(_MAX_GRAPHS)
        self._directions: Directions | None = None
        self._directions_number = 0
        self._outputs: dict[Hashable, tuple[TreeSpec, list[Any], dict[int, float | None]]] = {}
        self._storages: set[int] = set()  # of the last replay's outputs

    def is_available(self) -> bool:
        """Whether the detector declares a static part and has no hooks to call."""
        has_hooks = any(m._forward_hooks or m._forward_pre_hooks for m in self._shadow.modules())
        return type(self._shadow).static_inputs is not Detector.static_inputs and not has_hooks

    def run(self, inputs: Any, tangents: Tangents | None = None) -> GraphPass | None:
        """Run a pass, and fill ``tangents``; None if this frame cannot be run as a graph."""
        if torch.is_autocast_enabled("cuda"):
            return None
        if tangents is not None and not self._takes_tangents:
            return None
        if tangents is not None and tangents.directions is not self._directions:
            self._directions, self.graphs = tangents.directions, Graphs(_MAX_GRAPHS)
            self._directions_number += 1
            self._outputs.clear()
        given = self._shadow.static_inputs(fresh(inputs))
        if given is None:
            return None
        ends = None if tangents is None else tangents.ends
        key = (ends, self._directions_number, *backend_flags())
        try:
            made = self.graphs(key, lambda x: self._compute(key, x, tangents), given)
        except RuntimeError as error:
            if not self.graphs.capturing:
                raise
            raise CaptureError(str(error).splitlines()[0]) from error
        return self._unpack(key, made, given, tangents)

    def matches_plain(self, done: GraphPass) -> bool:
        """Whether a replay gave the same bits as the plain pass."""
        plain = [
            t for t in tree_flatten(self._static_part(done.inputs))[0] if isinstance(t, Tensor)
        ]
        return len(plain) == len(done.tensors) and all(map(torch.equal, plain, done.tensors))

    def detach(self, tensor: Tensor) -> Tensor:
        """A tensor that the next replay does not write over."""
        return tensor.clone() if tensor.untyped_storage().data_ptr() in self._storages else tensor

    def release(self) -> None:
        """Free all graphs."""
        self.graphs = Graphs(_MAX_GRAPHS)

    def _compute(self, key: Hashable, given: Tensor, tangents: Tangents | None) -> Many:
        """The tensors of the raw outputs, and then the tangents of those that have some."""
        own = None if tangents is None else Tangents(tangents.directions, tangents.ends)
        with nullcontext() if own is None else own:
            raw = self._static_part(given)
        leaves, form = tree_flatten(raw)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        found = [None if own is None else own.stored(tensor) for tensor in tensors]
        moving = {i: tangent.scale for i, tangent in enumerate(found) if tangent is not None}
        others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._outputs[key] = form, others, moving
        return (*tensors, *(tangent.t for tangent in found if tangent is not None))

    def _unpack(
        self, key: Hashable, made: Many, given: Tensor, tangents: Tangents | None
    ) -> GraphPass:
        form, others, moving = self._outputs[key]
        count = len(made) - len(moving)
        # new tensor objects per frame: tangents are found by the object
        tensors = [tensor.view(tensor.shape) for tensor in made[:count]]
        is_replay = self.graphs.replayed
        storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self._storages = storages if is_replay else set()
        if tangents is not None:
            for (i, scale), t in zip(moving.items(), made[count:]):
                tangents.put(tensors[i], Tangent(t, scale=scale))
        remaining = iter(tensors)
        leaves = [next(remaining) if leaf is None else leaf for leaf in others]
        return GraphPass(tree_unflatten(leaves, form), tensors, given, key, is_replay)


def backend_flags() -> tuple[Hashable, ...]:
    """Settings that change the bits of a pass and may change between two frames."""
    cudnn = torch.backends.cudnn
    return (
        *(cudnn.enabled, cudnn.benchmark, cudnn.deterministic, *allows_tf32()),
        torch.are_deterministic_algorithms_enabled(),
    )
