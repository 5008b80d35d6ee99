"""The frozen part of the network runs once a frame.

Modules that hold none of the posterior's weights and are called before any of those weights is used give the same output whatever the
weights: on the first pass over a frame their outputs are remembered, on later passes they are played back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

_PLAIN = (Tensor, int, float, bool, str, bytes, torch.Size, torch.dtype, torch.device, type(None))


class Trunk:
    """Remembers and plays back, on a shadow whose modules it may change."""

    def __init__(self, shadow: nn.Module, parameters: set[int]) -> None:
        self._state: Literal["off", "record", "replay"] = "off"
        self._over = (
            False  # a weight of the posterior has been used: what comes now may depend on it
        )
        self._depth = 0
        self._memory: dict[int, list[Any]] = defaultdict(list)
        self._next: dict[int, int] = defaultdict(int)
        self._versions: list[tuple[Tensor, int, int]] = []
        self._changed: set[int] = (
            set()
        )  # modules whose output is changed in place by whoever reads it
        for module in shadow.modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # shared with the detector: not ours to change
            if not any(id(p) in parameters for p in module.parameters()):
                module.__dict__["forward"] = self._remembering(id(module), module.forward)
            elif any(id(p) in parameters for p in module.parameters(recurse=False)):
                module.__dict__["forward"] = self._ending(module.forward)

    def over(self) -> None:
        """To be called at each use of a weight of the posterior."""
        self._over = True

    @contextmanager
    def recording(self) -> Iterator[None]:
        """One pass at the trained weights; forgets the frame before."""
        self.forget()
        with self._in("record"):
            yield

    def intact(self) -> bool:
        """Whether all that was recorded is still as it was; if not, the next recording keeps copies of what is changed in place."""
        changed = {key for tensor, version, key in self._versions if tensor._version != version}
        self._changed |= changed
        return not changed

    @contextmanager
    def replaying(self) -> Iterator[None]:
        with self._in("replay"):
            yield

    def forget(self) -> None:
        self._memory.clear()
        self._versions.clear()

    @contextmanager
    def _in(self, state: Literal["record", "replay"]) -> Iterator[None]:
        self._state, self._over, self._depth = state, False, 0
        self._next.clear()
        try:
            yield
        finally:
            self._state = "off"

    def _ending(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A module that owns a weight of the posterior: from here on nothing is remembered."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._over = True
            return forward(*args, **kwargs)

        return call

    def _remembering(self, key: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._state == "off" or self._over or self._depth:
                return forward(*args, **kwargs)
            number = self._next[key]
            self._next[key] += 1
            if self._state == "replay" and self._memory[key][number] is not _LIVE:
                return self._copied(key, self._memory[key][number])
            self._depth += 1  # what it calls is part of it
            try:
                out = forward(*args, **kwargs)
            finally:
                self._depth -= 1
            if self._state == "record":
                self._memory[key].append(self._memorable(key, out))
            return out

        return call

    def _memorable(self, key: int, out: Any) -> Any:
        """What to play back for ``out``, or that the module must run: it used a weight after all, or gave what cannot be copied."""
        leaves = tree_leaves(out)
        if self._over or not all(isinstance(leaf, _PLAIN) for leaf in leaves):
            return _LIVE
        if key not in self._changed:
            self._versions += [(t, t._version, key) for t in leaves if isinstance(t, Tensor)]
        return self._copied(key, out)

    def _copied(self, key: int, out: Any) -> Any:
        """Containers anew each time, as whoever reads them may change them; tensors anew only if somebody does."""
        return tree_map(
            lambda leaf: (
                leaf.clone() if key in self._changed and isinstance(leaf, Tensor) else leaf
            ),
            out,
        )


_LIVE = object()
