"""The frozen part of the network runs once a frame.

Modules that hold none of the posterior's weights and are called before any of those weights is used give the same output whatever the
weights: on the first pass over a frame their outputs are remembered, on later passes they are played back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only


class Trunk:
    """Remembers and plays back, on a shadow whose modules it may change."""

    def __init__(self, shadow: nn.Module, parameters: set[int]) -> None:
        self._state: Literal["off", "record", "replay"] = "off"
        self._over = False  # a weight of the posterior has been used: what comes now may depend on it
        self._depth = 0
        self._memory: dict[int, list[Any]] = defaultdict(list)
        self._next: dict[int, int] = defaultdict(int)
        self._versions: list[tuple[Tensor, int, int]] = []
        self._changed: set[int] = set()  # modules whose output is changed in place by whoever reads it
        for module in shadow.modules():
            if not any(id(p) in parameters for p in module.parameters()):
                module.__dict__["forward"] = self._remembering(id(module), module.forward)

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

    def _remembering(self, key: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._state == "off" or self._over or self._depth:
                return forward(*args, **kwargs)
            if self._state == "replay":
                number = self._next[key]
                self._next[key] += 1
                return self._copied(key, self._memory[key][number])
            self._depth += 1
            try:
                out = forward(*args, **kwargs)
            finally:
                self._depth -= 1
            kept = self._copied(key, out)
            self._memory[key].append(kept)
            if key not in self._changed:
                self._versions += [(t, t._version, key) for t in tree_leaves(kept) if isinstance(t, Tensor)]
            return out

        return call

    def _copied(self, key: int, out: Any) -> Any:
        return tree_map_only(Tensor, lambda t: t.clone(), out) if key in self._changed else out
