"""Layer calls: see, and replace, the calls of linear layers and convolutions.

``LayerCallMode`` intercepts every linear layer and convolution that torch runs and recognises the
weights by identity. It needs no hooks and no wrapped modules, and it sees a weight wherever it is
used: twice, under two names, by another module, with other padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from boxcov._torch.unfold import Geometry

_CONVOLUTIONS: dict[Any, int] = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}
_TRANSPOSED: dict[Any, int] = {
    torch.conv_transpose1d: 1,
    torch.conv_transpose2d: 2,
    torch.conv_transpose3d: 3,
}
_CONVOLUTION_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED_ARGUMENTS = (
    "input",
    "weight",
    "bias",
    "stride",
    "padding",
    "output_padding",
    "groups",
    "dilation",
)


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer: ``func(x, weight, bias, **rest)``."""

    func: Callable[..., Tensor]
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    rest: Mapping[str, Any]
    geometry: Geometry

    def __call__(
        self, x: Tensor | None = None, weight: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        """Run the call, with the given tensors in place of its own."""
        return self.func(
            self.x if x is None else x,
            self.weight if weight is None else weight,
            self.bias if bias is None else bias,
            **self.rest,
        )

    @property
    def batched_x(self) -> Tensor:
        """The input as (B, channels, *spatial), or (B, T, n_in) for a linear layer."""
        return self._batched(self.x.detach(), 0)

    def batched_out(self, d: Tensor, lead: int = 0) -> Tensor:
        """Return a gradient of the output in the same layout, with ``lead`` dimensions in front."""
        return self._batched(d, lead)

    def _batched(self, t: Tensor, lead: int) -> Tensor:
        if self.geometry.kernel:
            missing = t.dim() - lead < 2 + len(self.geometry.kernel)
            return t.unsqueeze(lead) if missing else t
        front, rest = t.shape[:lead], t.shape[lead:]
        if len(rest) <= 2:  # (n,) is B = 1, (B, n) has one location
            return t.reshape(*front, -1, 1, rest[-1])
        return t.reshape(*front, rest[0], -1, rest[-1])


def parse(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> LayerCall | None:
    """Return the call as a matrix product, or None if it is another function."""
    if func is F.linear:
        given = _bound(("input", "weight", "bias"), args, kwargs)
        return LayerCall(func, given["input"], given["weight"], given.get("bias"), {}, Geometry())
    if func in _CONVOLUTIONS:
        given = _bound(_CONVOLUTION_ARGUMENTS, args, kwargs)
        return _call(func, given, _convolution(given, _CONVOLUTIONS[func]))
    if func in _TRANSPOSED:
        given = _bound(_TRANSPOSED_ARGUMENTS, args, kwargs)
        return _call(func, given, _transposed(given, _TRANSPOSED[func]))
    return None


def _bound(
    names: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    return {**dict(zip(names, args)), **kwargs}


def _call(func: Any, given: dict[str, Any], geometry: Geometry) -> LayerCall:
    rest = {name: value for name, value in given.items() if name not in ("input", "weight", "bias")}
    return LayerCall(func, given["input"], given["weight"], given.get("bias"), rest, geometry)


def _convolution(given: Mapping[str, Any], n: int) -> Geometry:
    kernel = tuple(given["weight"].shape[-n:])
    dilation = _each(given.get("dilation", 1), n)
    padding = given.get("padding", 0)
    if padding == "valid":
        sides = ((0, 0),) * n
    elif padding == "same":  # torch adds the odd pixel at the end
        total = [d * (k - 1) for d, k in zip(dilation, kernel)]
        sides = tuple((t // 2, t - t // 2) for t in total)
    else:
        sides = tuple((p, p) for p in _each(padding, n))
    return Geometry(
        kernel, _each(given.get("stride", 1), n), sides, dilation, given.get("groups", 1)
    )


def _transposed(given: Mapping[str, Any], n: int) -> Geometry:
    kernel = tuple(given["weight"].shape[-n:])
    dilation = _each(given.get("dilation", 1), n)
    extra = _each(given.get("output_padding", 0), n)
    padding = _each(given.get("padding", 0), n)
    sides = tuple(
        (d * (k - 1) - p, d * (k - 1) - p + e)
        for d, k, p, e in zip(dilation, kernel, padding, extra)
    )
    stride = _each(given.get("stride", 1), n)
    return Geometry(kernel, stride, sides, dilation, given.get("groups", 1), transposed=True)


def _each(value: Any, n: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * n if len(values) == 1 else values


class LayerCallMode(TorchFunctionMode):
    """While active, ``run(name, call)`` replaces every call of a weight in ``names`` (by id).

    >>> linear = torch.nn.Linear(2, 3)
    >>> with LayerCallMode({id(linear.weight): "linear"}, lambda name, call: call().relu() - 1):
    ...     bool((linear(torch.ones(1, 2)) >= -1).all())
    True
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
