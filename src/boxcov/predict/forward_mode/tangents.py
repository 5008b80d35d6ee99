"""Derivatives along k directions at once, beside a plain pass of the network: forward mode, batched by hand.

Every tensor that depends on a weight of the posterior has its k tangents beside it. A convolution's are one convolution of the k tangents of its
input with the trained weight (the tangents as a batch), and one of its input with the k directions of its weight (as output channels). Norms in
eval mode and pointwise functions only scale; their factors, which are the same for all k, are gathered and applied once. What has no rule here
goes through ``vmap(jvp)`` by itself. The plain tensors are computed as ever, by the calls that the network makes: bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from boxcov._torch.layer_calls import LayerCall, parse
from boxcov.predict.cuda.graphs import Precision, matrix_precision

_POINTWISE: set[Any] = {
    *(
        F.relu,
        torch.relu,
        torch.relu_,
        Tensor.relu,
        Tensor.relu_,
        F.relu6,
        F.leaky_relu,
        F.elu,
        F.gelu,
        F.hardtanh,
    ),
    *(
        F.silu,
        F.mish,
        F.hardswish,
        F.hardsigmoid,
        F.softplus,
        F.sigmoid,
        torch.sigmoid,
        Tensor.sigmoid,
    ),
    *(F.tanh, torch.tanh, Tensor.tanh, torch.exp, Tensor.exp),
}
_SUMS: set[Any] = {
    torch.add,
    Tensor.add,
    Tensor.add_,
    Tensor.__add__,
    Tensor.__radd__,
    Tensor.__iadd__,
}
_IN_PLACE_WORDS = {
    "__iadd__",
    "__isub__",
    "__imul__",
    "__itruediv__",
    "__ipow__",
    "__setitem__",
    "__iand__",
    "__ior__",
}


class NoRule(Exception):
    """A step that tangents cannot be carried over here; the whole network still can be differentiated by ``vmap(jvp)``."""


@dataclass(frozen=True)
class Tangent:
    """The derivatives (k, *shape) of a tensor: ``t``, still to be multiplied by ``factor`` (which broadcasts against a single one)."""

    t: Tensor
    factor: Tensor | None = None

    def whole(self) -> Tensor:
        return self.t if self.factor is None else self.t * self.multiplier()

    def multiplier(self) -> Tensor:
        """The factor in the type and layout of what it multiplies: strides that differ cost more than the product."""
        assert self.factor is not None
        return channels_last(self.factor.to(self.t.dtype))

    def scaled(self, factor: Tensor) -> Tangent:
        return Tangent(self.t, factor if self.factor is None else self.factor * factor)


class Etas:
    """k directions (k, *shape) of ``weights``, both by name, in the form and type that the products take; kept from frame to frame.

    They are carried in a size that every type can hold: ``scale`` (k,) is what derivatives along them are multiplied by in the end.
    precision: of the products; "half" carries bfloat16, on a CPU too.
    """

    def __init__(
        self,
        etas: Mapping[str, Tensor],
        weights: Mapping[str, Tensor],
        precision: Precision = "float32",
    ) -> None:
        self.names, self.precision = {id(weights[name]): name for name in etas}, precision
        self.dtype = torch.bfloat16 if precision == "half" else None
        self.etas, self.scale = normalise(etas, weights)
        self.count = len(self.scale)
        self._stacked: dict[tuple[str, int], Tensor] = {}
        self._cast: dict[int, tuple[Tensor, Tensor]] = {}
        self._factors: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, parameter: Tensor | None) -> Tensor | None:
        """(k, *shape), if the parameter is among them."""
        return None if parameter is None else self.etas.get(self.names.get(id(parameter), ""))

    def stacked(self, call: LayerCall, eta: Tensor) -> Tensor:
        """The k directions of a call's weight as one weight of k times as many outputs, those of a group together."""
        key = self.names[id(call.weight)], call.geometry.groups
        if key not in self._stacked:
            eta = eta.to(self.dtype or call.weight.dtype)
            if call.geometry.transposed:  # (k, n_in, n_out, ...)
                joined = eta.movedim(0, 1).flatten(1, 2)
            elif call.geometry.kernel:  # (k, n_out, n_in / groups, ...)
                joined = eta.unflatten(1, (call.geometry.groups, -1)).transpose(0, 1).flatten(0, 2)
            else:
                joined = eta.flatten(0, 1)
            self._stacked[key] = channels_last(joined)
        return self._stacked[key]

    def cast(self, weight: Tensor) -> Tensor:
        """A trained weight, in the type of the tangents."""
        if self.dtype is None or weight.dtype == self.dtype:
            return weight.detach()
        if id(weight) not in self._cast:
            self._cast[id(weight)] = weight, channels_last(weight.detach().to(self.dtype))
        return self._cast[id(weight)][1]

    def norm(self, variance: Tensor, weight: Tensor | None, eps: float, dims: int) -> Tensor:
        """What a norm in eval mode multiplies by, channels first (C, 1, ...)."""
        if id(variance) not in self._factors:
            scale = (variance + eps).rsqrt()
            scale = scale if weight is None else scale * weight.detach()
            self._factors[id(variance)] = variance, scale.reshape(-1, *[1] * (dims - 2))
        return self._factors[id(variance)][1]


class Tangents(TorchFunctionMode):
    """While active, tangents are carried along; ``of(tensor)`` has those of any tensor of the pass that is still alive.

    ends: weights, by id, behind whose products nothing is carried: the first of what is differentiated in another way.

    >>> linear = torch.nn.Linear(2, 3)
    >>> directions = Etas({"weight": torch.ones(4, 3, 2)}, {"weight": linear.weight})
    >>> with torch.no_grad(), Tangents(directions) as tangents:
    ...     out = linear(torch.ones(1, 2)).relu()
    >>> tangents.of(out).shape
    torch.Size([4, 1, 3])
    """

    def __init__(self, directions: Etas, ends: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self.directions, self.ends = directions, ends
        self._held: Any = WeakTensorKeyDictionary()
        self._met: set[int] = set()  # ids of all that have been held: a first, quick answer
        self._over = False  # what is carried has reached its end

    def of(self, tensor: Tensor) -> Tensor | None:
        """(k, *shape), or None for a tensor that does not depend on the weights."""
        found = self._held.get(tensor)
        return None if found is None else found.whole()

    def put(self, tensor: Tensor, t: Tensor) -> None:
        """The tangents (k, *shape) of a tensor that was computed elsewhere."""
        self._hold(tensor, Tangent(t))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._over:
            return func(*args, **kwargs)
        call = parse(func, args, kwargs)
        if call is not None:
            return self._product(call)
        if not self._met or not self._any_held(args, kwargs):
            return func(*args, **kwargs)
        if func is F.batch_norm:
            return self._norm(args, kwargs)
        if func in _POINTWISE:
            return self._pointwise(func, args, kwargs)
        if func in _SUMS and len(args) == 2 and not kwargs:
            return self._sum(func, args)
        if func is torch.cat:
            return self._joined(args, kwargs)
        if _in_place(func) or kwargs.get("out") is not None:
            raise NoRule(f"{getattr(func, '__name__', func)} writes into a tensor")
        return self._by_jvp(func, args, kwargs)

    def _any_held(self, args: Any, kwargs: Any) -> bool:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                if id(value) in self._met and value in self._held:
                    return True
            elif isinstance(value, (list, tuple, dict)):
                return any(
                    isinstance(leaf, Tensor) and leaf in self._held
                    for leaf in tree_leaves((args, kwargs))
                )
        return False

    def _hold(self, tensor: Tensor, tangent: Tangent) -> None:
        self._held[tensor] = tangent
        self._met.add(id(tensor))

    def _product(self, call: LayerCall) -> Tensor:
        out = call()
        if id(call.weight) in self.ends:
            self._over = True
            return out
        directions, x = self.directions, self._held.get(call.x) if id(call.x) in self._met else None
        eta, shift = directions.of(call.weight), directions.of(call.bias)
        if self._any_held((call.weight, call.bias), {}):
            raise NoRule("a weight that is computed")
        if x is None and eta is None and shift is None:
            return out
        if call.geometry.transposed and call.geometry.groups > 1:
            raise NoRule("a transposed convolution in groups")
        if call.x.dim() < 2 + len(call.geometry.kernel) and call.geometry.kernel:
            raise NoRule("a convolution without a batch")
        with matrix_precision(directions.precision) if out.is_cuda else nullcontext():
            t = (
                self._convolution(call, x, eta)
                if call.geometry.kernel
                else self._linear(call, x, eta)
            )
        if shift is not None:
            behind = len(call.geometry.kernel)
            shift = shift.to(directions.dtype or out.dtype).reshape(
                len(shift), *[1] * (out.dim() - 1 - behind), -1, *[1] * behind
            )
            t = shift.expand(len(shift), *out.shape) if t is None else t.add_(shift)
        assert t is not None
        self._hold(out, Tangent(t))
        return out

    def _linear(self, call: LayerCall, x: Tangent | None, eta: Tensor | None) -> Tensor | None:
        directions, t = self.directions, None
        if x is not None:
            t = F.linear(x.whole(), directions.cast(call.weight))
        if eta is not None:
            own = F.linear(
                call.x.to(directions.dtype or call.x.dtype), directions.stacked(call, eta)
            )
            own = own.unflatten(-1, (directions.count, -1)).movedim(-2, 0)
            t = own if t is None else t.add_(own)
        return t

    def _convolution(self, call: LayerCall, x: Tangent | None, eta: Tensor | None) -> Tensor | None:
        directions, t, groups = self.directions, None, call.geometry.groups
        if x is not None:
            t = call.func(
                channels_last(x.whole().flatten(0, 1)),
                directions.cast(call.weight),
                None,
                **call.rest,
            )
            t = t.unflatten(0, (directions.count, -1))
        if eta is not None:
            plain = channels_last(call.x.to(directions.dtype or call.x.dtype))
            own = call.func(plain, directions.stacked(call, eta), None, **call.rest)
            own = (
                own.unflatten(1, (groups, directions.count, -1)).movedim(2, 0).flatten(2, 3)
            )  # (k, B, n_out, ...)
            t = own if t is None else t.add_(own)
        return t

    def _norm(self, args: Any, kwargs: Any) -> Tensor:
        names = (
            "input",
            "running_mean",
            "running_var",
            "weight",
            "bias",
            "training",
            "momentum",
            "eps",
        )
        given = {**dict(zip(names, args)), **kwargs}
        if given.get("training") or given.get("running_var") is None:
            raise NoRule("a norm over the batch")
        out = F.batch_norm(*args, **kwargs)
        x = self._held.get(given["input"])
        if x is None or any(
            isinstance(given.get(n), Tensor) and given[n] in self._held for n in names[1:5]
        ):
            raise NoRule("a norm whose parameters are computed")
        scale = self.directions.norm(
            given["running_var"], given.get("weight"), given.get("eps", 1e-5), out.dim()
        )
        self._hold(out, x.scaled(scale))
        return out

    def _pointwise(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        x, *rest = args if args else (kwargs.get("input"),)
        if not isinstance(x, Tensor) or any(
            isinstance(leaf, Tensor)
            for leaf in tree_leaves((rest, {k: v for k, v in kwargs.items() if k != "input"}))
        ):
            raise NoRule("a pointwise function with tensors beside its input")
        held = self._held[x]
        inside = (
            x.detach().clone()
            if func in (torch.relu_, Tensor.relu_) or kwargs.get("inplace") or True in rest
            else x.detach()
        )
        out: Tensor = func(*args, **kwargs)
        self._hold(out, held.scaled(_slope(func, inside, rest, kwargs, out)))
        return out

    def _sum(self, func: Any, args: Any) -> Tensor:
        tangents = [self._held.get(x) if isinstance(x, Tensor) else None for x in args]
        shapes = [x.shape if isinstance(x, Tensor) else () for x in args]
        out: Tensor = func(*args)
        parts = [
            _aligned(t.whole(), len(shape), out)
            for t, shape in zip(tangents, shapes)
            if t is not None
        ]
        self._hold(out, Tangent(parts[0] if len(parts) == 1 else parts[0] + parts[1]))
        return out

    def _joined(self, args: Any, kwargs: Any) -> Tensor:
        out = torch.cat(*args, **kwargs)
        tensors = args[0] if args else kwargs["tensors"]
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        if "out" in kwargs or not isinstance(dim, int):
            raise NoRule("cat with out= or a named dimension")
        dim = dim % out.dim() + 1
        first = next(self._held[x].t for x in tensors if x in self._held)
        whole = first.new_empty((len(first), *out.shape))
        if whole.dim() == 5:
            whole = channels_last(whole.flatten(0, 1)).unflatten(0, (len(first), -1))
        start = 0
        for x in tensors:
            part = whole.narrow(dim, start, x.shape[dim - 1])
            start += x.shape[dim - 1]
            held = self._held.get(x)
            if held is None:
                part.zero_()
            elif held.factor is None:
                part.copy_(held.t)
            else:
                torch.mul(held.t, held.multiplier(), out=part)
        self._hold(out, Tangent(whole))
        return out

    def _by_jvp(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Anything else, one operation by itself."""
        out = func(*args, **kwargs)
        into = [
            leaf
            for leaf in tree_leaves(out)
            if isinstance(leaf, Tensor) and leaf.is_floating_point()
        ]
        if not into:
            return out
        leaves, form = tree_flatten((args, kwargs))
        moving = [
            i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf in self._held
        ]

        def again(*primals: Tensor) -> list[Tensor]:
            filled = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            for i, primal in zip(moving, primals):
                filled[i] = primal
            own_args, own_kwargs = tree_unflatten(filled, form)
            found = func(*own_args, **own_kwargs)
            return [
                leaf
                for leaf in tree_leaves(found)
                if isinstance(leaf, Tensor) and leaf.is_floating_point()
            ]

        primals = tuple(leaves[i].detach() for i in moving)
        tangents = tuple(self._held[leaves[i]].whole().to(leaves[i].dtype) for i in moving)
        for leaf, t in zip(into, push_forward(again, primals, tangents)):
            self._hold(
                leaf, Tangent(t if self.directions.dtype is None else t.to(self.directions.dtype))
            )
        return out


def push_forward(
    function: Callable[..., list[Tensor]], primals: tuple[Tensor, ...], tangents: tuple[Tensor, ...]
) -> list[Tensor]:
    """Derivatives (k, ...) of each output along k tangents (k, *shape) of each input.

    >>> (out,) = push_forward(lambda x: [x * x], (torch.tensor([3.0]),), (torch.tensor([[1.0], [2.0]]),))
    >>> out
    tensor([[ 6.],
            [12.]])
    """

    def one(*moved: Tensor) -> list[Tensor]:
        found: list[Tensor] = torch.func.jvp(function, primals, moved)[1]
        # a zero that depends on the direction: vmap cannot stack what does not
        zero = 0 * (moved[0].flatten()[0] if moved[0].numel() else moved[0].sum())
        return [t + zero.to(t.dtype) for t in found]

    try:
        return list(torch.vmap(one)(*tangents))
    except (
        RuntimeError,
        ValueError,
        TypeError,
    ) as error:  # torch has no forward mode for it, or cannot batch it
        raise NoRule(str(error)) from error


def normalise(
    etas: Mapping[str, Tensor], like: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], Tensor]:
    """Etas of a size that every float type can hold, and the factors (k,) that the derivatives are multiplied by in turn.

    >>> etas, scale = normalise({"weight": torch.tensor([[3.0, -4.0]])}, {"weight": torch.zeros(2)})
    >>> etas["weight"], scale
    (tensor([[ 0.7500, -1.0000]]), tensor([4.]))
    """
    largest = (
        torch.stack([eta.flatten(1).abs().amax(1) for eta in etas.values()])
        .amax(0)
        .clamp(min=1e-30)
    )  # (k,)
    scaled = {
        name: (eta / largest.reshape(-1, *[1] * (eta.dim() - 1))).to(like[name].dtype)
        for name, eta in etas.items()
    }
    return scaled, largest


def channels_last(x: Tensor) -> Tensor:
    """Channels last, where convolutions of two dimensions are fastest."""
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


def _slope(func: Any, x: Tensor, rest: list[Any], kwargs: Mapping[str, Any], out: Tensor) -> Tensor:
    """The derivative of a pointwise function at x."""
    if func in (F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_):
        return out > 0
    own = {name: value for name, value in kwargs.items() if name not in ("input", "inplace")}
    with torch.enable_grad():
        x = x.requires_grad_()
        y = func(x, *[False if value is True else value for value in rest], **own)
        (slope,) = torch.autograd.grad(y, x, torch.ones_like(y))
    return slope


def _aligned(t: Tensor, dims: int, out: Tensor) -> Tensor:
    """Tangents (k, *shape) of one of two that were added, as tangents (k, *shape) of their sum."""
    t = t.reshape(len(t), *[1] * (out.dim() - dims), *t.shape[1:])
    return t.expand(len(t), *out.shape)


def _in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name in _IN_PLACE_WORDS or (name.endswith("_") and not name.endswith("__"))
