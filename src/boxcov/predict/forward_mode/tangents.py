"""Propagate the tangents of k directions through a plain pass: forward mode, batched by hand.

Every tensor that depends on a weight of the posterior has k tangents. Those of a convolution's
output are one convolution of the k tangents of its input with the trained weight (the tangents as a
batch) plus one of its input with the k directions of its weight (as output channels). Norms in eval
mode and pointwise functions only scale: their factors, equal for all k, are collected and applied
once. Any other operation goes through ``vmap(jvp)`` on its own. The plain tensors are computed by
the calls that the network makes, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from boxcov._torch.layers import LayerCall, parse
from boxcov._torch.modules import float_leaves
from boxcov._torch.process_state import matrix_precision
from boxcov.predict.forward_mode.directions import Directions, channels_last
from boxcov.predict.forward_mode.jvp import NoRule, push_forward


def _functions(module: Any, names: str) -> set[Any]:
    return {getattr(module, name) for name in names.split()}


_RELUS = _functions(F, "relu") | _functions(torch, "relu relu_") | _functions(Tensor, "relu relu_")
_POINTWISE = (
    _RELUS
    | _functions(F, "relu6 leaky_relu elu gelu hardtanh silu mish hardswish hardsigmoid softplus")
    | _functions(F, "sigmoid tanh")
    | _functions(torch, "sigmoid tanh exp")
    | _functions(Tensor, "sigmoid tanh exp")
)
_SUMS = _functions(torch, "add") | _functions(Tensor, "add add_ __add__ __radd__ __iadd__")
_IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "pow", "and", "or")}
_NORM = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")


@dataclass(frozen=True)
class Tangent:
    """Tangents ``t`` (k, *shape) of a tensor, still to be multiplied by ``factor`` (*shape)."""

    t: Tensor
    factor: Tensor | None = None

    def whole(self) -> Tensor:
        return self.t if self.factor is None else self.write(_empty(self.t.shape, self.t))

    def write(self, out: Tensor) -> Tensor:
        """Write the product with the factor to ``out``, and return ``out``."""
        if self.factor is None:
            return out.copy_(self.t)
        # in the memory format of ``t``: other strides are slow
        return torch.mul(self.t, channels_last(self.factor.to(self.t.dtype)), out=out)

    def scaled(self, factor: Tensor) -> Tangent:
        return Tangent(self.t, factor if self.factor is None else self.factor * factor)


class Tangents(TorchFunctionMode):
    """While active, propagates tangents; ``of(tensor)`` returns those of a tensor of the pass.

    Tangents live as long as their tensor. ends: ids of weights at whose products propagation stops,
    because what follows is differentiated by another engine.
    """

    def __init__(self, directions: Directions, ends: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self.directions, self.ends = directions, ends
        self._tangents: Any = WeakTensorKeyDictionary()
        self._ids: set[int] = set()  # of all tensors that had tangents: a fast first test
        self._is_over = False  # an end has been reached

    def of(self, tensor: Tensor) -> Tensor | None:
        """Tangents (k, *shape); None for a tensor that does not depend on the weights."""
        found = self._tangents.get(tensor)
        return None if found is None else found.whole()

    def put(self, tensor: Tensor, t: Tensor) -> None:
        """Set the tangents (k, *shape) of a tensor that was computed elsewhere."""
        self._set(tensor, Tangent(t))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_over:
            return func(*args, **kwargs)
        call = parse(func, args, kwargs)
        if call is not None:
            return self._product(call)
        if not self._ids or not self._have_tangents(args, kwargs):
            return func(*args, **kwargs)
        if func is F.batch_norm:
            return self._norm(args, kwargs)
        if func in _POINTWISE:
            return self._pointwise(func, args, kwargs)
        if func in _SUMS and len(args) == 2 and not kwargs:
            return self._sum(func, args)
        if func is torch.cat:
            return self._cat(args, kwargs)
        if _is_in_place(func) or kwargs.get("out") is not None:
            raise NoRule(f"{getattr(func, '__name__', func)} writes into a tensor")
        return self._by_jvp(func, args, kwargs)

    def _has_tangents(self, value: Any) -> bool:
        return isinstance(value, Tensor) and id(value) in self._ids and value in self._tangents

    def _have_tangents(self, args: Any, kwargs: Any) -> bool:
        values: Sequence[Any] = (*args, *kwargs.values())
        if any(isinstance(value, (list, tuple, dict)) for value in values):
            values = tree_leaves(values)
        return any(self._has_tangents(value) for value in values)

    def _set(self, tensor: Tensor, tangent: Tangent) -> None:
        self._tangents[tensor] = tangent
        self._ids.add(id(tensor))

    def _product(self, call: LayerCall) -> Tensor:
        out = call()
        if id(call.weight) in self.ends:
            self._is_over = True
            return out
        if self._has_tangents(call.weight) or self._has_tangents(call.bias):
            raise NoRule("a weight that is computed")
        directions, kernel = self.directions, call.geometry.kernel
        x = self._tangents[call.x] if self._has_tangents(call.x) else None
        eta, shift = directions.of(call.weight), directions.of(call.bias)
        if x is None and eta is None and shift is None:
            return out
        if call.geometry.transposed and call.geometry.groups > 1:
            raise NoRule("a transposed convolution in groups")
        if kernel and call.x.dim() < 2 + len(kernel):
            raise NoRule("a convolution without a batch")
        product = self._convolution if kernel else self._linear
        with matrix_precision(directions.precision) if out.is_cuda else nullcontext():
            t = product(call, x, eta)
        if shift is not None:
            shape = (*[1] * (out.dim() - 1 - len(kernel)), -1, *[1] * len(kernel))
            shift = shift.to(out.dtype).reshape(len(shift), *shape)
            t = shift.expand(len(shift), *out.shape) if t is None else t.add_(shift)
        assert t is not None
        self._set(out, Tangent(t))
        return out

    def _linear(self, call: LayerCall, x: Tangent | None, eta: Tensor | None) -> Tensor | None:
        directions, t = self.directions, None
        if x is not None:
            t = F.linear(x.whole(), call.weight.detach())
        if eta is not None:
            own = F.linear(call.x, directions.stacked(call, eta))
            own = own.unflatten(-1, (directions.count, -1)).movedim(-2, 0)
            t = own if t is None else t.add_(own)
        return t

    def _convolution(self, call: LayerCall, x: Tangent | None, eta: Tensor | None) -> Tensor | None:
        directions, t, groups = self.directions, None, call.geometry.groups
        if x is not None:
            batch = channels_last(x.whole().flatten(0, 1))
            t = call.func(batch, call.weight.detach(), None, **call.rest)
            t = t.unflatten(0, (directions.count, -1))
        if eta is not None:
            plain = channels_last(call.x)
            own = call.func(plain, directions.stacked(call, eta), None, **call.rest)
            own = own.unflatten(1, (groups, directions.count, -1)).movedim(2, 0)
            own = own.flatten(2, 3)  # (k, B, n_out, ...)
            t = own if t is None else t.add_(own)
        return t

    def _norm(self, args: Any, kwargs: Any) -> Tensor:
        given = {**dict(zip(_NORM, args)), **kwargs}
        if given.get("training") or given.get("running_var") is None:
            raise NoRule("a norm over the batch")
        out = F.batch_norm(*args, **kwargs)
        if any(self._has_tangents(given.get(name)) for name in _NORM[1:5]):
            raise NoRule("a norm whose parameters are computed")
        scale = self.directions.norm_factor(
            given["running_var"], given.get("weight"), given.get("eps", 1e-5), out.dim()
        )
        self._set(out, self._tangents[given["input"]].scaled(scale))
        return out

    def _pointwise(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        x, *rest = args if args else (kwargs.get("input"),)
        others = (*rest, *(value for name, value in kwargs.items() if name != "input"))
        if not isinstance(x, Tensor) or any(isinstance(value, Tensor) for value in others):
            raise NoRule("a pointwise function of several tensors")
        tangent = self._tangents[x]
        writes = func in (torch.relu_, Tensor.relu_) or kwargs.get("inplace") or True in rest
        needs_copy = writes and func not in _RELUS  # whose slope follows from the output
        before = x.detach().clone() if needs_copy else x.detach()
        out: Tensor = func(*args, **kwargs)
        self._set(out, tangent.scaled(_slope(func, before, rest, kwargs, out)))
        return out

    def _sum(self, func: Any, args: Any) -> Tensor:
        tangents = [self._tangents.get(x) if isinstance(x, Tensor) else None for x in args]
        shapes = [x.shape if isinstance(x, Tensor) else () for x in args]
        out: Tensor = func(*args)
        parts = [
            _broadcast(t.whole(), len(shape), out)
            for t, shape in zip(tangents, shapes)
            if t is not None
        ]
        self._set(out, Tangent(parts[0] if len(parts) == 1 else parts[0] + parts[1]))
        return out

    def _cat(self, args: Any, kwargs: Any) -> Tensor:
        out = torch.cat(*args, **kwargs)
        tensors = args[0] if args else kwargs["tensors"]
        dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
        if "out" in kwargs or not isinstance(dim, int):
            raise NoRule("cat with out= or a named dimension")
        dim = dim % out.dim() + 1
        first = next(self._tangents[x].t for x in tensors if x in self._tangents)
        whole, start = _empty((len(first), *out.shape), first), 0
        for x in tensors:
            if x.dim() < out.dim():
                continue  # cat() skips torch.empty(0)
            part = whole.narrow(dim, start, x.shape[dim - 1])
            start += x.shape[dim - 1]
            tangent = self._tangents.get(x)
            if tangent is None:
                part.zero_()
            else:
                tangent.write(part)
        self._set(out, Tangent(whole))
        return out

    def _by_jvp(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Any other operation: vmap(jvp) of it alone."""
        out = func(*args, **kwargs)
        into = float_leaves(out)
        if not into:
            return out
        leaves, form = tree_flatten((args, kwargs))
        moving = [i for i, leaf in enumerate(leaves) if self._has_tangents(leaf)]

        def again(*primals: Tensor) -> list[Tensor]:
            filled = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            for i, primal in zip(moving, primals):
                filled[i] = primal
            own_args, own_kwargs = tree_unflatten(filled, form)
            return float_leaves(func(*own_args, **own_kwargs))

        primals = tuple(leaves[i].detach() for i in moving)
        tangents = tuple(self._tangents[leaves[i]].whole().to(leaves[i].dtype) for i in moving)
        for leaf, t in zip(into, push_forward(again, primals, tangents)):
            self._set(leaf, Tangent(t))
        return out


def _slope(func: Any, x: Tensor, rest: list[Any], kwargs: Mapping[str, Any], out: Tensor) -> Tensor:
    """The derivative of a pointwise function at x."""
    if func in _RELUS:
        return out > 0
    own = {name: value for name, value in kwargs.items() if name not in ("input", "inplace")}
    with torch.enable_grad():
        x = x.requires_grad_()
        y = func(x, *[False if value is True else value for value in rest], **own)
        (slope,) = torch.autograd.grad(y, x, torch.ones_like(y))
    return slope


def _empty(shape: Sequence[int], like: Tensor) -> Tensor:
    """Memory for tangents (k, *shape); those of maps have their channels last if ``like`` has."""
    if like.dim() != 5 or like.stride(2) != 1:
        return like.new_empty(shape)
    k, batch, channels, height, width = shape
    return like.new_empty((k, batch, height, width, channels)).permute(0, 1, 4, 2, 3)


def _broadcast(t: Tensor, dims: int, out: Tensor) -> Tensor:
    """Tangents of a summand with ``dims`` dimensions, broadcast to those of the sum ``out``."""
    t = t.reshape(len(t), *[1] * (out.dim() - dims), *t.shape[1:])
    return t.expand(len(t), *out.shape)


def _is_in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    in_place = name in _IN_PLACE or name == "__setitem__"
    return in_place or (name.endswith("_") and not name.endswith("__"))
