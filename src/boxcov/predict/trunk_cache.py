"""The trunk runs once per frame: the network before the first use of a posterior weight."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

_PLAIN = (Tensor, int, float, bool, str, bytes, torch.Size, torch.dtype, torch.device, type(None))
_LIVE = object()  # stands for an output that cannot be replayed


class TrunkCache:
    """Records and replays outputs of the modules of a shadow.

    Modules without posterior weights that are called before any posterior weight is used have
    outputs that do not depend on those weights. The first pass over a frame records them, later
    passes replay them. In these passes alone the ``forward`` of the modules is replaced.
    """

    def __init__(self, shadow: nn.Module, parameters: set[int]) -> None:
        self.memory: dict[int, list[Any]] = defaultdict(list)  # by module, the output of each call
        self._records = False  # the pass that runs; otherwise it replays
        self.is_over = False  # a posterior weight has been used: later outputs may depend on it
        self._depth = 0
        self._calls: Counter[int] = Counter()  # of each module in this pass
        self._versions: list[tuple[Tensor, int, int]] = []
        self._changed: set[int] = set()  # modules whose output is changed in place by its readers
        self._forwards: list[tuple[dict[str, Any], Any, Callable[..., Any]]] = []
        for module in shadow.modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # shared with the detector, so it must not be changed
            if not any(id(p) in parameters for p in module.parameters()):
                forward = self._recorded(id(module), module.forward)
            elif any(id(p) in parameters for p in module.parameters(recurse=False)):
                forward = self._ending(module.forward)
            else:
                continue
            own = vars(module)
            self._forwards.append((own, own.get("forward"), forward))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record one pass at the trained weights; drops the previous frame."""
        self.memory.clear()
        self._versions.clear()
        self._records = True
        try:
            with self.replaying():
                yield
        finally:
            self._records = False

    def intact(self) -> bool:
        """Whether no recorded tensor was changed in place; changed ones are copied from now on."""
        changed = {key for tensor, version, key in self._versions if tensor._version != version}
        self._changed |= changed
        self._versions.clear()
        return not changed

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Replay in the passes of the block what was recorded."""
        self.is_over, self._depth = False, 0
        self._calls.clear()
        for attributes, _, forward in self._forwards:
            attributes["forward"] = forward
        try:
            yield
        finally:
            for attributes, before, _ in self._forwards:
                del attributes["forward"]
                if before is not None:  # another than that of its class
                    attributes["forward"] = before

    def _ending(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of a module that owns a posterior weight: it ends the trunk."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.is_over = True
            return forward(*args, **kwargs)

        return call

    def _recorded(self, key: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.is_over or self._depth:
                return forward(*args, **kwargs)
            number = self._calls[key]
            self._calls[key] += 1
            if not self._records and self.memory[key][number] is not _LIVE:
                return self._copied(key, self.memory[key][number])
            self._depth += 1  # modules that it calls are not recorded on their own
            try:
                out = forward(*args, **kwargs)
            finally:
                self._depth -= 1
            if self._records:
                self.memory[key].append(self._recordable(key, out))
            return out

        return call

    def _recordable(self, key: int, out: Any) -> Any:
        """What to replay for ``out``; ``_LIVE`` if the module must run again.

        It must if it used a posterior weight, or returned an object that cannot be copied.
        """
        leaves = tree_leaves(out)
        if self.is_over or not all(isinstance(leaf, _PLAIN) for leaf in leaves):
            return _LIVE
        if key not in self._changed:
            self._versions += [(t, t._version, key) for t in leaves if isinstance(t, Tensor)]
        return self._copied(key, out)

    def _copied(self, key: int, out: Any) -> Any:
        """``out`` in new containers; tensors are cloned only if their readers change them."""
        own = (lambda leaf: leaf.clone()) if key in self._changed else (lambda leaf: leaf)
        return tree_map_only(Tensor, own, out)
