"""The detector is never touched: boxcov works on a shadow of it.

A shadow is a second tree of module objects over the same parameters and buffers. It is in eval mode, it may be told to remember what
its frozen modules returned, and whatever happens to it, the detector's own modules keep their mode, hooks, flags and attributes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from functools import partial
from hashlib import sha256
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from boxcov.errors import BoxcovError, join_names

M = TypeVar("M", bound=nn.Module)


def shadow(module: M, replace: Mapping[int, nn.Parameter] | None = None) -> M:
    """A twin of ``module`` in eval mode that shares its parameters and buffers, the ones in ``replace`` (by id) exchanged.

    >>> linear = nn.Linear(2, 3).train()
    >>> twin = shadow(linear)
    >>> twin.weight is linear.weight, twin.training, linear.training
    (True, False, True)
    """
    return cast(M, _twin(module, replace or {}, {}))


def _twin(
    module: nn.Module, replace: Mapping[int, nn.Parameter], memo: dict[int, nn.Module]
) -> nn.Module:
    if id(module) in memo:
        return memo[id(module)]
    if isinstance(module, torch.jit.ScriptModule):  # compiled and opaque: shared as it is
        if any(child.training for child in module.modules()):
            raise BoxcovError(
                f"the detector holds a {type(module).__name__} in train mode, which boxcov cannot run apart: call detector.eval()"
            )
        return module
    if "_orig_mod" in module._modules:  # torch.compile: what it compiled, as written
        return _twin(cast(nn.Module, module._modules["_orig_mod"]), replace, memo)
    twin = object.__new__(type(module))
    memo[id(module)] = twin
    for name, value in module.__dict__.items():
        twin.__dict__[name] = (
            value if name in ("_parameters", "_buffers") else _rebound(value, replace, memo)
        )
    if replace:
        own = {
            name: p if p is None else replace.get(id(p), p)
            for name, p in module._parameters.items()
        }
        twin.__dict__["_parameters"] = own
    twin.__dict__["training"] = False
    return twin


def _rebound(value: Any, replace: Mapping[int, nn.Parameter], memo: dict[int, nn.Module]) -> Any:
    """Modules and bound methods, wherever a module keeps them (children, lists, hooks), must be the shadow's; containers its own."""
    if isinstance(value, nn.Module):
        return _twin(value, replace, memo)
    if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
        return MethodType(value.__func__, _twin(value.__self__, replace, memo))
    if isinstance(value, partial):
        inner = _rebound(value.func, replace, memo)
        return partial(
            inner, *_rebound(value.args, replace, memo), **_rebound(value.keywords, replace, memo)
        )
    if type(value) in (list, tuple, set):
        return type(value)(_rebound(item, replace, memo) for item in value)
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _rebound(item, replace, memo)) for key, item in value.items())
    return value


class Held:
    """The tensors and modules that a module is made of, to see whether one was written to or exchanged: cheap, unlike a fingerprint.

    >>> linear = nn.Linear(2, 3)
    >>> held = Held(linear)
    >>> before = held.same()
    >>> with torch.no_grad():
    ...     _ = linear.bias.add_(1)
    >>> before, held.same()
    (True, False)
    """

    def __init__(self, module: nn.Module) -> None:
        modules = list(module.modules())
        scripted = [
            isinstance(each, torch.jit.ScriptModule) for each in modules
        ]  # they give their dicts anew each time
        owners = [own for each in modules for own in (each._parameters, each._buffers)]
        owners = [
            dict(own.items()) if script else own
            for script, own in zip([s for s in scripted for _ in range(2)], owners)
        ]
        self._tensors = [
            (own, name, t, t.data_ptr(), t._version)
            for own in owners
            for name, t in own.items()
            if t is not None
        ]
        children = [each._modules for each, script in zip(modules, scripted) if not script]
        self._children = [(own, list(own.values())) for own in children if own]

    def same(self) -> bool:
        return all(
            own.get(name) is t and t.data_ptr() == at and t._version == version
            for own, name, t, at, version in self._tensors
        ) and all(list(now.values()) == before for now, before in self._children)


def fingerprint(module: nn.Module) -> str:
    """SHA-256 of names, types, shapes and bytes of all floating-point weights and buffers; the same on every device.

    >>> linear = nn.Linear(2, 3)
    >>> before = fingerprint(linear)
    >>> with torch.no_grad():
    ...     _ = linear.bias.add_(1)
    >>> fingerprint(linear) == before
    False
    """
    digest = sha256()
    for name, tensor in sorted(module.state_dict().items()):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            continue
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(
            tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()


def check_finite_weights(module: nn.Module) -> None:
    """Name the parameters and buffers that hold a NaN or an infinity, in one error.

    >>> linear = nn.Linear(2, 3)
    >>> _ = nn.init.constant_(linear.bias, float("nan"))
    >>> check_finite_weights(linear)
    Traceback (most recent call last):
    ...
    boxcov.errors.BoxcovError: the detector has NaN or infinite weights in bias (3 of 3 values): load a sound checkpoint
    """
    bad = [
        _describe(name, tensor)
        for name, tensor in _named_floats(module)
        if not bool(tensor.isfinite().all())
    ]
    if bad:
        raise BoxcovError(
            f"the detector has NaN or infinite weights in {join_names(bad)}: load a sound checkpoint"
        )


def _named_floats(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_floating_point():
            yield name, tensor.detach()


def _describe(name: str, tensor: Tensor) -> str:
    return f"{name} ({int((~tensor.isfinite()).sum())} of {tensor.numel()} values)"


def versions(tree: Any) -> list[tuple[Tensor, int]]:
    """The tensors of a pytree, each with a number that grows when it is written to.

    >>> x = torch.zeros(1)
    >>> before = versions([x])
    >>> _ = x.add_(1)
    >>> before[0][1] == x._version
    False
    """
    return [(t, t._version) for t in tree_leaves(tree) if isinstance(t, Tensor)]


def check_buffers(before: list[tuple[Tensor, int]]) -> None:
    """A pass in eval mode must leave buffers alone; one hidden in a closure may be in train mode all the same."""
    if any(t._version != version for t, version in before):
        raise BoxcovError(
            "the detector changes its own buffers in a forward pass, though boxcov runs it in eval mode: call detector.eval() first, "
            "and load its weights again"
        )
