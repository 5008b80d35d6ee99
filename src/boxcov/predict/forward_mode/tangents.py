"""Propagate the tangents of k directions through a plain pass: forward mode, batched by hand.

Every tensor that depends on a weight of the posterior has k tangents. Those of a convolution's
output are one convolution of the k tangents of its input with the trained weight (the tangents as a
batch) plus one of its input with the k directions of its weight (as output channels). Norms in eval
mode and pointwise functions only scale: their factors, equal for all k, are collected and applied
once. Any other operation goes through ``vmap(jvp)`` on its own. The plain tensors are computed by
the calls that the network makes, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from boxcov._torch.layers import LayerCall, parse
from boxcov._torch.modules import float_leaves
from boxcov._torch.process_state import matrix_precision
from boxcov.predict.forward_mode.directions import Directions
from boxcov.predict.forward_mode.jvp import NoRule, push_forward
from boxcov.predict.forward_mode.storage import Tangent, channels_last, empty_tangents


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
_IN_PLACE.add("__setitem__")
_NORM = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")


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
        self._sums = 0  # of float16 tangents so far, which names their scales

    def of(self, tensor: Tensor) -> Tensor | None:
        """Tangents (k, *shape); None for a tensor that does not depend on the weights."""
        found = self._tangents.get(tensor)
        return None if found is None else found.whole()

    def stored(self, tensor: Tensor) -> Tangent | None:
        """As ``of``, but not converted if they are in float16."""
        found = self._tangents.get(tensor)
        return None if found is None else found.simple()

    def put(self, tensor: Tensor, tangent: Tangent) -> None:
        """Set the tangents of a tensor."""
        self._tangents[tensor] = tangent
        self._ids.add(id(tensor))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_over:
            return func(*args, **kwargs)
        call = parse(func, args, kwargs)
        if call is not None:
            return self._product(call)
        if not self._ids or not self._have_tangents((*args, *kwargs.values())):
            return func(*args, **kwargs)
        if func is F.batch_norm:
            return self._norm(args, kwargs)
        if func in _POINTWISE:
            return self._pointwise(func, args, kwargs)
        if func in _SUMS and len(args) == 2 and not kwargs:
            return self._sum(func, args)
        if func is torch.cat:
            return self._cat(args, kwargs)
        name = getattr(func, "__name__", "")
        if _is_in_place(name) or kwargs.get("out") is not None:
            raise NoRule(f"{name or func} writes into a tensor")
        return self._by_jvp(func, args, kwargs)

    def _has_tangents(self, value: Any) -> bool:
        return isinstance(value, Tensor) and id(value) in self._ids and value in self._tangents

    def _have_tangents(self, values: Any) -> bool:
        if any(isinstance(value, (list, tuple, dict)) for value in values):
            values = tree_leaves(values)
        return any(self._has_tangents(value) for value in values)

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
        if shift is not None:
            shape = (*[1] * (out.dim() - 1 - len(kernel)), -1, *[1] * len(kernel))
            shift = shift.to(out.dtype).reshape(len(shift), *shape)
        if x is None and eta is None:
            assert shift is not None
            self.put(out, Tangent(shift.expand(len(shift), *out.shape)))
            return out
        with matrix_precision(directions.precision) if out.is_cuda else nullcontext():
            # a weight that is computed differs from frame to frame, so that nothing can be cached
            tangent = None
            if self._takes_half(out) and isinstance(call.weight, nn.Parameter):
                tangent = self._half_product(call, x, eta, shift)
            if tangent is None:
                tangent = Tangent(self._exact_product(call, x, eta, shift))
        self.put(out, tangent)
        return out

    def _exact_product(
        self, call: LayerCall, x: Tangent | None, eta: Tensor | None, shift: Tensor | None
    ) -> Tensor:
        """The tangents of a layer's output, in the dtype of the layer."""
        stacked = None if eta is None else self.directions.stacked(call, eta)
        moved = None if x is None else x.whole()
        t, *rest = self._terms(call, moved, call.weight.detach(), call.x, stacked)
        for term in (*rest, *(() if shift is None else (shift,))):
            t.add_(term)
        return t

    def _half_product(
        self, call: LayerCall, x: Tangent | None, eta: Tensor | None, shift: Tensor | None
    ) -> Tangent | None:
        """The tangents of a layer's output in float16; the scales are part of the weights.

        None if what it takes has no scale.
        """
        half, key = self.directions.half, id(call.weight)
        assert half is not None
        scale = half.scale(("out", key), lambda: self._exact_product(call, x, eta, shift))
        of_moved = 1.0 if x is None else half.scale(("in", key), x.whole)
        of_plain = 1.0 if eta is None else half.scale(("x", key), lambda: call.x)
        if scale is None or of_moved is None or of_plain is None:
            return None
        moved, weight, plain, stacked = None, call.weight.detach(), call.x, None
        if x is not None:
            weight = half.operand(("weight", key), call.weight.detach, of_moved / scale)
            moved = x.half(of_moved)
            self.put(call.x, Tangent(moved, scale=of_moved))  # for its next reader
        if eta is not None:
            plain = Tangent(call.x.unsqueeze(0)).half(of_plain)[0]
            stacked = self.directions.stacked(call, eta, of_plain / scale)
        t, *rest = self._terms(call, moved, weight, plain, stacked)
        t = t if shift is None else t.add_(shift / scale)
        return Tangent(t, None, scale, rest[0] if rest else None)

    def _terms(
        self,
        call: LayerCall,
        moved: Tensor | None,
        weight: Tensor,
        x: Tensor,
        stacked: Tensor | None,
    ) -> list[Tensor]:
        """The terms (k, *shape) of the tangents: by those of the input, and by the directions.

        moved: tangents (k, *shape) of the input x. stacked: see ``Directions.stacked``.
        """
        k, has_kernel = self.directions.count, bool(call.geometry.kernel)
        terms = []
        if moved is not None and has_kernel:
            t = call.func(channels_last(moved.flatten(0, 1)), weight, None, **call.rest)
            terms.append(t.unflatten(0, (k, -1)))
        elif moved is not None:
            terms.append(F.linear(moved, weight))
        if stacked is not None and has_kernel:
            own = call.func(channels_last(x), stacked, None, **call.rest)
            own = own.unflatten(1, (call.geometry.groups, k, -1)).movedim(2, 0)
            terms.append(own.flatten(2, 3))  # (k, B, n_out, ...)
        elif stacked is not None:
            own = F.linear(x, stacked)
            terms.append(own.unflatten(-1, (k, -1)).movedim(-2, 0))
        return terms

    def _takes_half(self, out: Tensor, *tangents: Tangent | None) -> bool:
        """Whether tangents of ``out`` are stored in float16, as one of ``tangents`` at least."""
        if self.directions.half is None or out.dtype != torch.float32:
            return False
        return not tangents or any(t is not None and t.scale is not None for t in tangents)

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
        self.put(out, self._tangents[given["input"]].scaled(scale))
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
        self.put(out, tangent.scaled(_slope(func, before, rest, kwargs, out)))
        return out

    def _sum(self, func: Any, args: Any) -> Tensor:
        tangents = [self._tangents.get(x) if isinstance(x, Tensor) else None for x in args]
        shapes = [x.shape if isinstance(x, Tensor) else () for x in args]
        out: Tensor = func(*args)
        moving = [(t, len(shape)) for t, shape in zip(tangents, shapes) if t is not None]

        def exact() -> Tensor:
            parts = [_broadcast(t.whole(), dims, out) for t, dims in moving]
            return parts[0] if len(parts) == 1 else parts[0] + parts[1]

        scale = self._scale_of_sum(exact) if self._takes_half(out, *tangents) else None
        if scale is None:
            self.put(out, Tangent(exact()))
        else:
            first, *rest = [_broadcast(t.half(scale), dims, out) for t, dims in moving]
            self.put(out, Tangent(first, None, scale, rest[0] if rest else None))
        return out

    def _scale_of_sum(self, exact: Callable[[], Tensor]) -> float | None:
        """The scale of a sum or concatenation of float16 tangents."""
        assert self.directions.half is not None
        self._sums += 1
        return self.directions.half.scale(("sum", self._sums), exact)

    def _cat(self, args: Any, kwargs: Any) -> Tensor:
        out = torch.cat(*args, **kwargs)
        tensors = args[0] if args else kwargs["tensors"]
        dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
        if "out" in kwargs or not isinstance(dim, int):
            raise NoRule("cat with out= or a named dimension")
        dim = dim % out.dim() + 1
        parts = [
            (self._tangents.get(x), x.shape[dim - 1])
            for x in tensors
            if x.dim() == out.dim()  # cat() skips torch.empty(0)
        ]
        scale = None
        if self._takes_half(out, *(tangent for tangent, _ in parts)):
            scale = self._scale_of_sum(lambda: _concatenate(parts, dim, out.shape, None))
        self.put(out, Tangent(_concatenate(parts, dim, out.shape, scale), scale=scale))
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
            self.put(leaf, Tangent(t))
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


def _concatenate(
    parts: list[tuple[Tangent | None, int]], dim: int, shape: torch.Size, scale: float | None
) -> Tensor:
    """Tangents of a concatenation along their dimension ``dim``, of parts with their sizes in it.

    scale: of the result in float16; None keeps the dtype of the tensors.
    """
    first = next(tangent for tangent, _ in parts if tangent is not None)
    dtype = torch.float16 if scale is not None else first.whole_dtype
    whole = empty_tangents(torch.Size((len(first.t), *shape)), first.t, dtype)
    start = 0
    for tangent, size in parts:
        part = whole.narrow(dim, start, size)
        start += size
        if tangent is None:
            part.zero_()
        elif scale is not None:
            tangent.half_into(part, scale)
        elif tangent.factor is None or tangent.scale is not None:
            part.copy_(tangent.whole())
        else:
            torch.mul(tangent.t, tangent.multiplier(), out=part)
    return whole


def _broadcast(t: Tensor, dims: int, out: Tensor) -> Tensor:
    """Tangents of a summand with ``dims`` dimensions, broadcast to those of the sum ``out``."""
    t = t.reshape(len(t), *[1] * (out.dim() - dims), *t.shape[1:])
    return t.expand(len(t), *out.shape)


def _is_in_place(name: str) -> bool:
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
