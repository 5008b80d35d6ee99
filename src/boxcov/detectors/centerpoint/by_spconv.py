"""The sparse convolutions by spconv, where it is installed: for passes that nobody differentiates. The weights stay where they are.

spconv 2.3.8 is right on a CPU to 6e-7 with one thread, and faster than the gathered patches. With two threads its sums race: they come out
percents off, otherwise every time. So it is taken with one thread only. Its CUDA wheels were not tested: on a GPU it is taken only
when asked for by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from boxcov._torch.layer_calls import watched
from boxcov.errors import BoxcovError

Backend = Literal["auto", "torch", "spconv"]
Triple = tuple[int, int, int]
_ONE: Triple = (1, 1, 1)


@lru_cache(maxsize=1)
def installed() -> Any:
    """spconv's functions, or the reason (a string) why there are none.

    >>> ops = installed()
    >>> isinstance(ops, str) or hasattr(ops, "indice_conv")
    True
    """
    try:
        return import_module("spconv.pytorch.ops")
    except Exception as error:  # a wheel for another CUDA fails in many ways
        return f"{type(error).__name__}: {error}"


def chosen(backend: Backend, x: Tensor, weights: Iterable[Tensor], cells: int) -> bool:
    """Whether spconv runs this pass over features ``x`` (V, C) in a grid of ``cells`` cells, all frames together.

    >>> chosen("torch", torch.zeros(3, 5), [], 1000)
    False
    >>> chosen("fast", torch.zeros(3, 5), [], 1000)
    Traceback (most recent call last):
    ...
    boxcov.errors.BoxcovError: encoder.backend must be 'auto', 'torch' or 'spconv', got 'fast'
    """
    if backend not in ("auto", "torch", "spconv"):
        raise BoxcovError(f"encoder.backend must be 'auto', 'torch' or 'spconv', got {backend!r}")
    weights = list(weights)
    if (
        backend == "torch"
        or not len(x)
        or cells >= 2**31
        or x.dtype != torch.float32
        or any(w.dtype != x.dtype for w in weights)
    ):
        return False
    if torch.is_autocast_enabled(x.device.type) or _differentiated([x, *weights]):
        return False
    single = torch.get_num_threads() == 1
    if backend == "auto" and (x.device.type != "cpu" or not single or isinstance(installed(), str)):
        return False
    _check(x.device, single)
    if watched(weights):
        raise BoxcovError(
            "the sparse encoder runs by spconv, which cannot give the derivatives that a posterior of its weights asks for: "
            "set detector.encoder.backend = 'torch' first, or choose a depth above the encoder"
        )
    return True


def _check(device: torch.device, single: bool) -> None:
    if isinstance(installed(), str):
        raise BoxcovError(
            f"encoder.backend is 'spconv', which cannot be imported ({installed()}): install it, or set 'auto' or 'torch'"
        )
    if device.type == "cpu" and not single:
        raise BoxcovError(
            f"encoder.backend is 'spconv', whose sums on a CPU go wrong with more than one thread, and torch has {torch.get_num_threads()}: "
            "call torch.set_num_threads(1), or set 'auto' or 'torch'"
        )


def _differentiated(tensors: list[Tensor]) -> bool:
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return True
    return any(unpack_dual(t).tangent is not None for t in tensors)


@dataclass(frozen=True)
class Rules:
    """spconv's index table: which sites go into which, tap by tap."""

    pairs: Tensor
    counts: Tensor
    outputs: int
    submanifold: bool

    def product(self, features: Tensor, weight: Tensor) -> Tensor:
        """Features (out, n_out) of features (V, n_in) and a weight (n_out, kz, ky, kx, n_in)."""
        native = import_module("spconv.core").ConvAlgo.Native
        out: Tensor = installed().indice_conv(
            features.detach(),
            weight.detach(),
            self.pairs,
            self.counts,
            self.outputs,
            False,
            self.submanifold,
            native,
        )
        return out


def rules(
    where: Tensor, shape: Triple, frames: int, kernel: Triple, stride: Triple, padding: Triple
) -> tuple[Tensor, Rules]:
    """The sites (out, 4) of a convolution's output, in spconv's order, and the rules that lead to them."""
    native, submanifold = import_module("spconv.core").ConvAlgo.Native, stride == _ONE
    steps = [
        list(each) for each in (kernel, stride, padding, _ONE, (0, 0, 0))
    ]  # the last two: dilation, padding of the output
    out, pairs, counts = installed().get_indice_pairs(
        where.int().contiguous(), frames, list(shape), native, *steps, submanifold
    )
    return (where if submanifold else out.long()), Rules(
        pairs.to(where.device), counts, len(out), submanifold
    )
