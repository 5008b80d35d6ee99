"""Modules: shadow copies to run, their layer calls and inputs, and the state of their weights.

A shadow is a second tree of module objects that shares the parameters and buffers. It is in eval
mode. Whatever is done to it, the detector's modules keep their mode, hooks and attributes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import fields, is_dataclass
from functools import partial
from hashlib import sha256
from types import MethodType
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map_only

from boxcov._torch.layers import LayerCall, parse
from boxcov.errors import BoxcovError, NotFiniteFrameError, join_names

M = TypeVar("M", bound=nn.Module)


def shadow(module: M, replace: Mapping[int, nn.Parameter] | None = None) -> M:
    """Return a copy of ``module`` in eval mode that shares its parameters and buffers.

    Parameters whose id is in ``replace`` are exchanged for the given ones.
    """
    return cast(M, _copy(module, replace or {}, {}))


def differentiable_shadow(module: M) -> M:
    """Return a shadow whose floating-point parameters are aliases that require gradients.

    >>> frozen = nn.Linear(2, 3).requires_grad_(False)
    >>> differentiable_shadow(frozen)(torch.ones(2)).requires_grad, frozen.weight.requires_grad
    (True, False)
    """
    own = [p for p in module.parameters() if p.is_floating_point()]
    return shadow(module, {id(p): nn.Parameter(p.detach()) for p in own})


def _copy(
    module: nn.Module, replace: Mapping[int, nn.Parameter], memo: dict[int, nn.Module]
) -> nn.Module:
    if id(module) in memo:
        return memo[id(module)]
    if isinstance(module, torch.jit.ScriptModule):  # opaque: it is shared
        if any(child.training for child in module.modules()):
            raise BoxcovError(
                f"the detector holds a {type(module).__name__} in train mode, which cannot be "
                "switched to eval mode in a copy: call detector.eval()"
            )
        return module
    if "_orig_mod" in module._modules:  # torch.compile: copy the original module
        return _copy(cast(nn.Module, module._modules["_orig_mod"]), replace, memo)
    copy = object.__new__(type(module))
    memo[id(module)] = copy
    for name, value in module.__dict__.items():
        is_shared = name in ("_parameters", "_buffers")
        copy.__dict__[name] = value if is_shared else _rebind(value, replace, memo)
    if replace:
        own = {
            name: p if p is None else replace.get(id(p), p)
            for name, p in module._parameters.items()
        }
        copy.__dict__["_parameters"] = own
    copy.__dict__["training"] = False
    return copy


def _rebind(value: Any, replace: Mapping[int, nn.Parameter], memo: dict[int, nn.Module]) -> Any:
    """Copy containers, and point the modules and bound methods inside to those of the shadow."""
    if isinstance(value, nn.Module):
        return _copy(value, replace, memo)
    if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
        return MethodType(value.__func__, _copy(value.__self__, replace, memo))
    if isinstance(value, partial):
        inner = _rebind(value.func, replace, memo)
        return partial(
            inner, *_rebind(value.args, replace, memo), **_rebind(value.keywords, replace, memo)
        )
    if type(value) in (list, tuple, set):
        return type(value)(_rebind(item, replace, memo) for item in value)
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _rebind(item, replace, memo)) for key, item in value.items())
    return value


class LayerCallMode(TorchFunctionMode):
    """While active, ``run(name, call)`` replaces every call of a weight in ``names`` (by id).

    It needs no hooks and sees a weight wherever it is used: twice, under two names, by another
    module, with other padding.
    """

    def __init__(self, names: Mapping[int, str], run: Callable[[str, LayerCall], Tensor]) -> None:
        super().__init__()
        self.names = names
        self.run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = parse(func, args, kwargs or {})
        if call is not None and id(call.weight) in self.names:
            return self.run(self.names[id(call.weight)], call)
        return func(*args, **(kwargs or {}))


def move(tree: Any, device: torch.device) -> Any:
    """Return a pytree with every tensor on ``device``; inference tensors become normal ones."""
    return tree_map_only(Tensor, lambda t: (t.clone() if t.is_inference() else t).to(device), tree)


def float_leaves(tree: Any) -> list[Tensor]:
    """Return the floating-point tensors of a pytree."""
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor) and t.is_floating_point()]


def fresh(tree: Any) -> Any:
    """Return a copy of a pytree for one forward pass, which may change its inputs in place."""
    return tree_map_only((Tensor, np.ndarray), _clone, tree)


def _clone(array: Any) -> Any:
    return array.clone() if isinstance(array, Tensor) else array.copy()


def ready(inputs: Any, device: torch.device, where: str = "inputs") -> Any:
    """Return ``inputs`` on ``device``; raise if they hold NaN or infinite values."""
    leaves = [
        (path, leaf)
        for path, leaf in tree_flatten_with_path(inputs)[0]
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]
    if not _have_finite_sums([leaf for _, leaf in leaves]):
        for path, leaf in leaves:
            bad = int((~leaf.isfinite()).sum())
            if bad:
                step = "".join(str(part) for part in path)
                raise NotFiniteFrameError(
                    f"{where}{step} holds {bad} NaN or infinite values of {leaf.numel()}"
                )
    return move(inputs, device)


def _have_finite_sums(tensors: list[Tensor]) -> bool:
    """Return whether all sums are finite: then all values are, and one pass over them is enough.

    Synchronizes once per device.
    """
    sums: dict[torch.device, list[Tensor]] = {}
    for t in tensors:
        wide = torch.promote_types(t.dtype, torch.float32)  # the sum of an image exceeds float16
        sums.setdefault(t.device, []).append(t.sum(dtype=wide).double())
    return all(bool(torch.stack(each).isfinite().all()) for each in sums.values())


# the state of weights and buffers


def hash_tensor(digest: Any, tensor: Tensor) -> None:
    """Add the dtype, shape and bytes of ``tensor`` to a hashlib ``digest``."""
    digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())


def fingerprint(module: nn.Module) -> str:
    """Return the SHA-256 of all floating-point parameters and buffers; equal on every device."""
    digest = sha256()
    for name, tensor in sorted(_float_tensors(module).items()):
        digest.update(f"{name} ".encode())
        hash_tensor(digest, tensor)
    return digest.hexdigest()


def _float_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The floating-point parameters and buffers by name, which share memory with the module."""
    return {
        name: tensor
        for name, tensor in module.state_dict().items()
        if isinstance(tensor, Tensor) and tensor.is_floating_point()
    }


def check_fingerprint(expected: str, detector: nn.Module, context: str) -> None:
    """Raise if the weights of ``detector`` are not those that a posterior was fitted to."""
    actual = fingerprint(detector)
    if actual != expected:
        raise BoxcovError(
            f"{context}: this posterior was made for weights with the fingerprint {expected}, "
            f"the detector's is {actual}: load the matching weights, or fit a new posterior"
        )


class WeightSnapshot:
    """Tells cheaply whether tensors, submodules or settings of a module were changed or replaced.

    Compares version counters and addresses. A write through ``.data`` is not noticed here, but by
    ``WeightChecksum``. Settings are attributes such as a threshold: numbers, texts, containers
    and dataclasses of these.
    """

    def __init__(self, module: nn.Module) -> None:
        self._tensors = []
        self._children = []
        self._settings = []
        for each in module.modules():
            scripted = isinstance(each, torch.jit.ScriptModule)  # its dicts are new on each access
            for tensors in (each._parameters, each._buffers):
                owner = dict(tensors.items()) if scripted else tensors
                self._tensors += [
                    (owner, name, t, t.data_ptr(), t._version)
                    for name, t in owner.items()
                    if t is not None
                ]
            if scripted:
                continue
            if each._modules:
                self._children.append((each._modules, list(each._modules.values())))
            if type(each).__module__.startswith("torch.nn."):
                continue  # most modules are; their settings belong to the weights
            own = vars(each)
            self._settings += [
                (own, name, deepcopy(value) if isinstance(value, (list, dict)) else value)
                for name, value in own.items()
                if name not in _MODULE_STATE and _is_setting(value)
            ]

    def is_unchanged(self) -> bool:
        return not self.has_moved() and all(
            t._version == version for _, _, t, _, version in self._tensors
        )

    def has_moved(self) -> bool:
        """Return whether a tensor, submodule or setting was replaced, or is in other memory."""
        return (
            not all(
                owner.get(name) is t and t.data_ptr() == address
                for owner, name, t, address, _ in self._tensors
            )
            or any(list(now.values()) != before for now, before in self._children)
            or self.has_new_settings()
        )

    def has_new_settings(self) -> bool:
        """Return whether a setting was replaced."""
        return any(
            (now := own.get(name)) is not before and not (_is_setting(now) and now == before)
            for own, name, before in self._settings
        )


_MODULE_STATE = frozenset(vars(nn.Module()))  # the mode, hooks and what else every module has


def _is_setting(value: Any) -> bool:
    """Return whether a value consists of numbers, texts and None alone."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_setting, value))
    if isinstance(value, dict):
        return all(map(_is_setting, value.values()))
    if is_dataclass(value) and not isinstance(value, type):
        return all(_is_setting(getattr(value, each.name)) for each in fields(value))
    return value is None or isinstance(value, (bool, int, float, str))


class WeightChecksum:
    """Tells whether the values of the weights changed, a share of them per call.

    Floating-point parameters and buffers are cut into ``calls`` shares of equal size. They are read
    as integers: the sum does not depend on the order of the additions. Every place has a
    factor of its own, so that exchanged values are noticed.
    """

    _CHUNK = 2**20  # numbers at once, to bound memory

    def __init__(self, module: nn.Module, calls: int) -> None:
        hidden = [b.detach() for b in module.buffers() if b.is_floating_point()]
        tensors = {t.data_ptr(): t for t in (*_float_tensors(module).values(), *hidden)}
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


def check_finite_weights(module: nn.Module) -> None:
    """Raise one error that names every parameter and buffer with NaN or infinite values.

    Those made in inference mode cannot be part of a derivative: they are refused, too.
    """
    own = dict([*module.named_parameters(), *module.named_buffers()])
    made = [name for name, tensor in own.items() if tensor.is_inference()]
    if made:
        raise BoxcovError(
            f"{join_names(made)} of the detector were made in torch.inference_mode(), so that "
            "torch computes no gradients with them: build or load the detector outside of it"
        )
    bad = [
        f"{name} ({int((~tensor.isfinite()).sum())} of {tensor.numel()} values)"
        for name, tensor in own.items()
        if tensor.is_floating_point() and not bool(tensor.isfinite().all())
    ]
    if bad:
        raise BoxcovError(
            f"the detector has NaN or infinite weights in {join_names(bad)}: "
            "load a sound checkpoint"
        )


def versions(tree: Any) -> list[tuple[Tensor, int]]:
    """Return the tensors of a pytree with their version counters, which grow with each write."""
    return [(t, t._version) for t in tree_leaves(tree) if isinstance(t, Tensor)]


def has_writes(before: list[tuple[Tensor, int]]) -> bool:
    """Return whether a tensor was written to since ``before``, a result of ``versions``."""
    return any(t._version != version for t, version in before)


def check_device(module: nn.Module, device: torch.device, source: str) -> None:
    """Raise if a detector was moved from ``device``, on which a model was built for it."""
    now = next(module.parameters()).device
    if now != device:
        raise BoxcovError(
            f"{source}: the detector was moved to {now} after the model was built on {device}: "
            "build the model again"
        )


def check_buffers(before: list[tuple[Tensor, int]]) -> None:
    """Raise if a buffer was written to since ``before``, a result of ``versions``.

    A forward pass in eval mode must not write to buffers, but a module that is hidden in a
    closure may still be in train mode.
    """
    if has_writes(before):
        raise BoxcovError(
            "the detector changes its own buffers in a forward pass although boxcov runs it in "
            "eval mode: call detector.eval() first, and load its weights again"
        )
