"""On a GPU: the dense part of the plain pass, and the derivatives carried beside it, kept as one CUDA graph.

A detector's network is a thousand small launches, and a GPU waits for most of them. A graph is one launch. What it computes is compared with
the plain pass when it is made, and is used only if it is the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from contextlib import nullcontext
from typing import Any
from warnings import warn

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from boxcov._torch.inputs import fresh
from boxcov._torch.shadow import shadow
from boxcov.detector import Detector
from boxcov.errors import BoxcovWarning
from boxcov.predict.cuda.graphs import Graphs, Many
from boxcov.predict.forward_mode.tangents import Etas, Tangents

_KEPT = 2  # graphs: each holds all intermediates of a pass


class Dense:
    """The plain pass of a detector that says what its dense part reads (``Detector.static_inputs``), faster.

    weights: along which derivatives may be carried; where one lies before the dense part, they are not carried here.

    >>> from boxcov.data import simulated
    >>> from boxcov.detectors import centerpoint
    >>> dense = Dense(centerpoint.load("small"))
    >>> inputs, _ = simulated.frames(count=1, sweeps=1)[0]
    >>> dense(inputs) is None  # on a CPU nothing is gained
    True
    """

    def __init__(self, detector: Detector, weights: Iterable[Tensor] = ()) -> None:
        self._before = shadow(detector)
        self._behind = self._before.static_part()
        weight = next(detector.parameters())
        hooked = any(
            module._forward_hooks or module._forward_pre_hooks for module in self._before.modules()
        )
        declared = type(detector).static_inputs is not Detector.static_inputs
        self.usable = (
            weight.is_cuda and declared and not hooked
        )  # a hook would not be called from within a graph
        own = {id(p) for p in self._behind.parameters()}
        self._carries = all(id(p) in own for p in weights)
        self.graphs = Graphs(_KEPT)
        self._directions: Etas | None = None
        self._forms: dict[Hashable, tuple[TreeSpec, list[Any], list[int]]] = {}
        self._compared: set[Hashable] = set()
        self._storages: set[int] = set()  # of what was last given

    def __call__(self, inputs: Any, along: Tangents | None = None) -> Any | None:
        """Raw outputs, and ``along`` filled with what was carried beside them; None if the detector must be run in the plain way.

        The next frame may write over them: what is to last goes through ``own``.
        """
        if (
            not self.usable
            or torch.is_autocast_enabled("cuda")
            or (along is not None and not self._carries)
        ):
            return None
        if (
            along is not None and along.directions is not self._directions
        ):  # others than before: what is kept belongs to those
            self._directions, self.graphs = along.directions, Graphs(_KEPT)
            self._forms.clear()
            self._compared.clear()
        given = self._before.static_inputs(fresh(inputs))
        if given is None:
            return None
        key = (None if along is None else along.ends, *_settings())
        try:
            made = self.graphs(key, lambda x: self._run(key, x, along), given)
        except RuntimeError as error:
            if not self.graphs.capturing:
                raise
            self._give_up(f"cannot be kept as a CUDA graph ({str(error).splitlines()[0]})")
            return None
        return self._unpacked(key, made, given, along)

    def _run(self, key: Hashable, given: Tensor, along: Tangents | None) -> Many:
        """The tensors among the raw outputs, and behind them the derivatives of those that have some."""
        own = None if along is None else Tangents(along.directions, along.ends)
        with nullcontext() if own is None else own:
            raw = self._behind(given)
        leaves, form = tree_flatten(raw)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        tangents = [None if own is None else own.of(tensor) for tensor in tensors]
        held = [i for i, t in enumerate(tangents) if t is not None]
        self._forms[key] = (
            form,
            [None if isinstance(leaf, Tensor) else leaf for leaf in leaves],
            held,
        )
        return (*tensors, *(t for t in tangents if t is not None))

    def _unpacked(
        self, key: Hashable, made: Many, given: Tensor, along: Tangents | None
    ) -> Any | None:
        form, leaves, held = self._forms[key]
        count = len(made) - len(held)
        tensors = [
            tensor.view(tensor.shape) for tensor in made[:count]
        ]  # tangents go by object: those of a frame are its own
        self._storages = (
            {tensor.untyped_storage().data_ptr() for tensor in tensors}
            if self.graphs.replayed
            else set()
        )
        if self.graphs.replayed and key not in self._compared:
            self._compared.add(key)
            if not self._same(tensors, given):
                self._give_up("gives other bits as a CUDA graph")
                return None
        if along is not None:
            for i, t in zip(held, made[count:]):
                along.put(tensors[i], t)
        remaining = iter(tensors)
        return tree_unflatten([next(remaining) if leaf is None else leaf for leaf in leaves], form)

    def own(self, tensor: Tensor) -> Tensor:
        """A tensor that the next frame does not write over, though it may be a part of what a graph gave."""
        return tensor.clone() if tensor.untyped_storage().data_ptr() in self._storages else tensor

    def _same(self, tensors: list[Tensor], given: Tensor) -> bool:
        plain = [leaf for leaf in tree_flatten(self._behind(given))[0] if isinstance(leaf, Tensor)]
        return len(plain) == len(tensors) and all(torch.equal(a, b) for a, b in zip(plain, tensors))

    def _give_up(self, why: str) -> None:
        self.usable, self.graphs = False, Graphs(_KEPT)
        warn(
            f"{type(self._before).__name__}.static_part() {why}, so it runs as it is, which is slower",
            BoxcovWarning,
            stacklevel=6,
        )


def _settings() -> tuple[Hashable, ...]:
    """What changes the bits of a pass, and may be changed between two frames."""
    backends = torch.backends
    return (
        *(
            backends.cudnn.enabled,
            backends.cudnn.allow_tf32,
            backends.cudnn.benchmark,
            backends.cudnn.deterministic,
        ),
        *(backends.cuda.matmul.allow_tf32, torch.are_deterministic_algorithms_enabled()),
    )
