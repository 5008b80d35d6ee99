"""Modules: shadow copies to run, their layer calls and inputs, and the state of their weights.

A shadow is a second tree of module objects that shares the parameters and buffers. It is in eval
mode. Whatever is done to it, the detector's modules keep their mode, hooks and attributes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from copy import copy
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
    module: nn.Module, replace: Mapping[int, nn.Parameter], memo: dict[int, Any]
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
    twin = object.__new__(type(module))
    memo[id(module)] = twin
    for name, value in module.__dict__.items():
        is_shared = name in ("_parameters", "_buffers")
        twin.__dict__[name] = value if is_shared else _rebind(value, replace, memo)
    twin.__dict__.pop("_compiled_call_impl", None)  # of module.compile(), which runs the original
    if replace:
        own = {
            name: p if p is None else replace.get(id(p), p)
            for name, p in module._parameters.items()
        }
        twin.__dict__["_parameters"] = own
    twin.__dict__["training"] = False
    return twin


def _rebind(value: Any, replace: Mapping[int, nn.Parameter], memo: dict[int, Any]) -> Any:
    """Copy containers, and point the modules and bound methods inside to those of the shadow.

    Dataclasses are copied, too: a pass may write to them.
    """
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
        return type(value)(
            (_rebind(key, replace, memo), _rebind(item, replace, memo))
            for key, item in value.items()
        )
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        return cast(Any, value)._make(_rebind(item, replace, memo) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        if id(value) not in memo:  # several modules may hold it
            twin = memo[id(value)] = copy(value)
            for name in (field.name for field in fields(value) if hasattr(value, field.name)):
                own = getattr(value, name)
                rebound = _rebind(own, replace, memo)
                if rebound is not own:  # a field may be a property that nothing can set
                    object.__setattr__(twin, name, rebound)
        return memo[id(value)]
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
    return tree_map_only(
        (Tensor, np.ndarray), lambda a: a.clone() if isinstance(a, Tensor) else a.copy(), tree
    )


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
    for name, tensor in sorted(float_tensors(module).items()):
        digest.update(f"{name} ".encode())
        hash_tensor(digest, tensor)
    return digest.hexdigest()


def float_tensors(module: nn.Module) -> dict[str, Tensor]:
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
            f"{context}: this posterior was made for weights with the fingerprint {expected[:12]}, "
            f"the detector's is {actual[:12]}: load the matching weights, or fit a new posterior"
        )


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
