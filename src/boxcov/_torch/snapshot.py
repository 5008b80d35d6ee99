"""Notice that a detector was changed after a model was built for it."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from boxcov._torch.modules import copy_setting, float_tensors, is_setting

_MODULE_STATE = frozenset(vars(nn.Module()))  # the mode, hooks and what else every module has


class ModuleSnapshot:
    """Tells cheaply whether a module's tensors, submodules, hooks or settings were changed.

    Compares version counters and addresses. A write through ``.data`` is not noticed here, but by
    ``WeightChecksum``. Settings are attributes such as a threshold: numbers, texts, containers
    and dataclasses of these.

    twin: a shadow of the module, which is run instead of it. What its passes write, such as a
    counter, is not a setting.
    """

    def __init__(self, module: nn.Module, twin: nn.Module | None = None) -> None:
        self._tensors: list[tuple[Any, str, Tensor, int, int]] = []
        self._members: list[tuple[Any, list[Any]]] = []  # submodules and hooks
        self._settings: list[_Settings] = []
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
                # what torch's own modules are set to belongs to the weights
                if not type(each).__module__.startswith("torch.nn."):
                    self._settings.append(_Settings.of(each, copy))

    def is_unchanged(self) -> bool:
        return not self.has_moved() and all(
            t._version == version for _, _, t, _, version in self._tensors
        )

    def has_moved(self) -> bool:
        """Return whether anything was replaced, or a tensor is in other memory."""
        return (
            not all(
                owner.get(name) is t and t.data_ptr() == address
                for owner, name, t, address, _ in self._tensors
            )
            or any(
                len(now) != len(before) or (before and list(now.values()) != before)
                for now, before in self._members
            )
            or self.has_new_settings()
        )

    def has_new_settings(self) -> bool:
        """Return whether a setting was replaced or added."""
        return any(settings.have_changed() for settings in self._settings)


class _Settings(NamedTuple):
    """The settings of a module when the snapshot was taken."""

    now: dict[str, Any]  # the attributes of the module
    twin: dict[str, Any]  # and of its shadow
    names: frozenset[str]  # of all attributes then
    before: dict[str, Any]  # the settings among them

    @staticmethod
    def of(module: nn.Module, twin: nn.Module | None) -> _Settings:
        own = vars(module)
        settings = {
            name: copy_setting(value)
            for name, value in own.items()
            if name not in _MODULE_STATE and is_setting(value)
        }
        return _Settings(own, {} if twin is None else vars(twin), frozenset(own), settings)

    def have_changed(self) -> bool:
        for name, before in self.before.items():
            now = self.now.get(name)
            if not _equals(now, before) and not self._is_written_by_passes(name, now, before):
                return True
        # another attribute may hide a setting of the class
        return len(self.now) != len(self.names) and any(
            name not in self.names and name not in self.twin and is_setting(value)
            for name, value in self.now.items()
        )

    def _is_written_by_passes(self, name: str, now: Any, before: Any) -> bool:
        """Whether a pass of the shadow wrote to all that differs."""
        if not self.twin:
            return False
        own, old, other = (_leaves(value) for value in (now, before, self.twin.get(name)))
        return all(
            _equals(own.get(path, ...), old.get(path, ...))
            or not _equals(other.get(path, ...), old.get(path, ...))
            for path in own.keys() | old.keys()
        )


def _pairs(module: nn.Module, twin: nn.Module | None) -> list[tuple[nn.Module, nn.Module | None]]:
    """The submodules, each with that of the twin, if the twin has the same form."""
    own, copies = list(module.modules()), [] if twin is None else list(twin.modules())
    if [type(each) for each in own] != [type(each) for each in copies]:
        return [(each, None) for each in own]  # a shadow leaves the wrapper of torch.compile out
    return list(zip(own, copies))


def _equals(now: Any, before: Any) -> bool:
    return now is before or (is_setting(now) and bool(now == before))


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    """The numbers and texts in containers and dataclasses, by their place."""
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, (list, tuple)):
        items = list(enumerate(value))
    elif is_dataclass(value) and not isinstance(value, type):
        items = [(each.name, getattr(value, each.name, ...)) for each in fields(value)]
    else:
        return {path: value}
    return {p: leaf for name, v in items for p, leaf in _leaves(v, (*path, name)).items()}


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
