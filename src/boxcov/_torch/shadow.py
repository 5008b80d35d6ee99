"""Shadow copies: boxcov never runs or changes the detector's own modules.

A shadow is a second tree of module objects that shares the parameters and buffers. It is in eval
mode. Whatever is done to it, the detector's modules keep their mode, hooks and attributes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from torch import nn

from boxcov.errors import BoxcovError

M = TypeVar("M", bound=nn.Module)


def shadow(module: M, replace: Mapping[int, nn.Parameter] | None = None) -> M:
    """Return a copy of ``module`` in eval mode that shares its parameters and buffers.

    Parameters whose id is in ``replace`` are exchanged for the given ones.

    >>> linear = nn.Linear(2, 3).train()
    >>> copy = shadow(linear)
    >>> copy.weight is linear.weight, copy.training, linear.training
    (True, False, True)
    """
    return cast(M, _copy(module, replace or {}, {}))


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
        copy.__dict__[name] = (
            value if name in ("_parameters", "_buffers") else _rebind(value, replace, memo)
        )
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
