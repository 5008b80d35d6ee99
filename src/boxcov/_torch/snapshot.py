"""Notice that a detector was changed after a model was built for it."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from boxcov._torch.modules import float_tensors

_MODULE_STATE = frozenset(vars(nn.Module()))  # the mode, hooks and what else every module has
_Leaves = dict[tuple[Any, ...], Any]
_NONE: frozenset[int] = frozenset()


class ModuleSnapshot:
    """Tells cheaply whether a module's tensors, submodules, hooks or attributes were changed.

    Compares version counters and addresses. A write through ``.data`` is not noticed here, but by
    ``WeightChecksum``. Numbers and texts, also in containers and dataclasses, are compared by
    value, all other attributes by identity: a shadow shares them.

    twin: a shadow of the module, which is run instead of it. An attribute that its passes write,
    such as a counter, may change.
    """

    def __init__(self, module: nn.Module, twin: nn.Module | None = None) -> None:
        self._tensors: list[tuple[Any, str, Tensor, int, int]] = []
        self._members: list[tuple[Any, list[Any]]] = []  # submodules and hooks
        self._attributes: list[_Attributes] = []
        for each, copy in _pairs(module, twin):
            scripted = isinstance(each, torch.jit.ScriptModule)  # its dicts are new on each access
            for tensors in (each._parameters, each._buffers):
                owner = dict(tensors.items()) if scripted else tensors
                self._tensors += [
                    (owner, name, t, t.data_ptr(), t._version)
                    for name, t in owner.items()
                    if t is not None
                ]
            if not scripted:
                members = (each._modules, each._forward_hooks, each._forward_pre_hooks)
                self._members += [(owner, list(owner.values())) for owner in members]
                # torch's own modules have many, which nobody changes: a tenth of a millisecond
                if not type(each).__module__.startswith("torch.nn."):
                    self._attributes.append(_Attributes(each, copy))

    def is_unchanged(self) -> bool:
        return (
            all(
                owner.get(name) is t and t.data_ptr() == address and t._version == version
                for owner, name, t, address, version in self._tensors
            )
            and all(list(now.values()) == before for now, before in self._members)
            and not any(attributes.have_changed() for attributes in self._attributes)
        )


class _Attributes:
    """The attributes of a module, and those of its shadow, when the snapshot was taken."""

    def __init__(self, module: nn.Module, twin: nn.Module | None) -> None:
        self._own, self._twin = vars(module), {} if twin is None else vars(twin)
        self._before, self._twin_before = _leaves(self._own), _leaves(self._twin)
        own = {name: value for name, value in self._own.items() if name not in _MODULE_STATE}
        self._size, self._names, self._values = len(self._own), list(own), list(own.values())
        mutable = list(filter(_is_mutable, self._values))
        self._plain = list(filter(_is_plain, mutable))
        self._plain_before = _copy(self._plain)
        self._has_other_containers = len(self._plain) < len(mutable)

    def have_changed(self) -> bool:
        """Whether something changed where no pass of the shadow writes."""
        own = self._own
        is_same = len(own) == self._size and all(map(is_, map(own.get, self._names), self._values))
        is_same = is_same and self._plain == self._plain_before
        if is_same and not self._has_other_containers:  # the fast way, for hundreds of modules
            return False
        changed = _differences(own, self._before)
        return bool(changed) and not changed <= _differences(self._twin, self._twin_before)


def _pairs(module: nn.Module, twin: nn.Module | None) -> list[tuple[nn.Module, nn.Module | None]]:
    """The submodules, each with that of the twin, if the twin has the same form."""
    own, copies = list(module.modules()), [] if twin is None else list(twin.modules())
    if [type(each) for each in own] != [type(each) for each in copies]:
        return [(each, None) for each in own]  # a shadow leaves the wrapper of torch.compile out
    return list(zip(own, copies))


def _differences(attributes: dict[str, Any], before: _Leaves) -> set[tuple[Any, ...]]:
    """The places of the attributes whose leaves are not those of ``before``."""
    now = _leaves(attributes)
    return {
        path
        for path in now.keys() | before.keys()
        if not _equals(now.get(path, _leaves), before.get(path, _leaves))
    }


def _leaves(value: Any, path: tuple[Any, ...] = (), holders: frozenset[int] = _NONE) -> _Leaves:
    """What containers and dataclasses hold, by its place; of a module's attributes, its own.

    holders: ids of what holds the value: a node of a tree may know its parent.
    """
    if id(value) in holders:
        return {}
    if isinstance(value, dict):
        items = [item for item in list(value.items()) if path or item[0] not in _MODULE_STATE]
    elif isinstance(value, (list, tuple)):
        items = list(enumerate(value))
    elif isinstance(value, set):
        return {path: frozenset(value)}
    elif is_dataclass(value) and not isinstance(value, type):
        if value.__dataclass_params__.frozen:  # type: ignore[attr-defined]
            return {path: value}
        items = [(each.name, getattr(value, each.name, ...)) for each in fields(value)]
    else:
        return {path: value}
    holders |= {id(value)}
    return {p: leaf for name, v in items for p, leaf in _leaves(v, (*path, name), holders).items()}


def _is_mutable(value: Any) -> bool:
    """Whether the leaves of a value may change while it stays the same object."""
    if isinstance(value, tuple):
        return any(map(_is_mutable, value))
    return isinstance(value, (dict, list, set)) or _leaves(value).keys() != {()}


def _is_plain(value: Any) -> bool:
    """Whether a value consists of lists, dicts, numbers and texts alone."""
    if isinstance(value, (list, tuple, set)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, (*value, *value.values())))
    return value is None or isinstance(value, (bool, int, float, str))


def _copy(value: Any) -> Any:
    """A copy of a plain value; ``deepcopy`` fails for dicts whose keys are read as attributes."""
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    for kind in (list, tuple, set):
        if isinstance(value, kind):
            return kind(map(_copy, value))
    return value


def _equals(now: Any, before: Any) -> bool:
    return now is before or (
        isinstance(now, (bool, int, float, str, frozenset))
        and isinstance(before, (bool, int, float, str, frozenset))
        and now == before
    )


class WeightChecksum:
    """Tells whether the values of the weights changed, a share of them per call.

    Floating-point parameters and buffers are cut into ``calls`` shares of equal size. They are read
    as integers: the sum does not depend on the order of the additions. Every place has a
    factor of its own, so that exchanged values are noticed.
    """

    _CHUNK = 2**20  # numbers at once, to bound memory

    def __init__(self, module: nn.Module, calls: int) -> None:
        hidden = [b.detach() for b in module.buffers() if b.is_floating_point()]
        tensors = {t.data_ptr(): t for t in (*float_tensors(module).values(), *hidden)}
        pieces = [piece for tensor in tensors.values() for piece in _bits(tensor)]
        size = max(1, -(-sum(map(len, pieces)) // calls))
        self._shares = [_cut(share, self._CHUNK) for share in _cut(pieces, size)]
        longest = min(size, self._CHUNK)
        device = pieces[0].device if pieces else None
        # odd: a changed bit never vanishes from a product modulo 2^64
        self._factors = torch.arange(longest, device=device) * 0x1E3779B97F4A7C15 * 2 + 1
        self._expected = [self._sum(share) for share in self._shares]
        self._next = 0

    def next_share(self) -> Tensor:
        """Whether the next share is unchanged: a flag on the device, without synchronisation."""
        number, self._next = self._next, (self._next + 1) % max(1, len(self._shares))
        if not self._shares:
            return torch.tensor(True)
        return self._sum(self._shares[number]) == self._expected[number]

    def _sum(self, share: list[list[Tensor]]) -> Tensor:
        total = self._factors.new_zeros(())
        for chunk in share:
            bits = torch.cat([piece.to(self._factors.device) for piece in chunk])
            total = 3 * total + (bits * self._factors[: len(bits)]).sum()
        return total


def _cut(pieces: list[Tensor], size: int) -> list[list[Tensor]]:
    """The pieces (n,) in groups of ``size`` values, cut where a group ends."""
    groups: list[list[Tensor]] = []
    room = 0
    for piece in pieces:
        while len(piece):
            if not room:
                groups.append([])
                room = size
            groups[-1].append(piece[:room])
            piece, room = piece[room:], max(0, room - len(piece))
    return groups


def _bits(tensor: Tensor) -> list[Tensor]:
    """Views of all values as integers (n,), in the order of the memory."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    flat = tensor.permute(order).flatten().view(kinds[tensor.element_size()])
    if flat.data_ptr() == tensor.data_ptr():
        return [flat]
    return [view for row in tensor for view in _bits(row)]  # gaps in memory: flat is a copy
