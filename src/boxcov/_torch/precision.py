"""Precision of products: full for factors and covariances, TF32 on a GPU where it is chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from threading import Condition, get_ident
from typing import Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")
Precision = Literal["float32", "tf32", "half"]


def full_precision(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate ``function`` to run without torch.autocast."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        with ExitStack() as stack:
            for kind in kinds:
                stack.enter_context(torch.autocast(kind, enabled=False))
            return function(*args, **kwargs)

    return run


def at_least_float32(x: Tensor) -> Tensor:
    """Return half-precision tensors as float32, others unchanged."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


@contextmanager
def matrix_precision(precision: Precision) -> Iterator[None]:
    """Take float32 products and convolutions on a GPU in float32 or in TF32 inside the block.

    The flags belong to the whole process: threads with the same precision run together, a thread
    with another one waits. A nested block gives up the outer block's precision until it ends, so
    that two threads with nested blocks cannot wait for each other forever.
    """
    outer = _holders.get(get_ident())
    _switch(precision != "float32")
    try:
        yield
    finally:
        _switch(outer)


Flags = tuple[bool, bool]
_turn = Condition()
_holders: dict[int, bool] = {}  # thread to whether it uses TF32
_outside: list[Flags] = []  # the flags before the first holder


def _flags() -> Flags:
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


def _set(flags: Flags) -> None:
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = flags


def _switch(tf32: bool | None) -> None:
    """Release what this thread holds, then wait for ``tf32``; None holds nothing."""
    me = get_ident()
    with _turn:
        _holders.pop(me, None)
        if not _holders and _outside:
            _set(_outside.pop())  # the last holder restores the flags
        _turn.notify_all()
        if tf32 is None:
            return
        while any(used != tf32 for used in _holders.values()):
            _turn.wait()
        if not _holders:
            _outside.append(_flags())
        _holders[me] = tf32
        _set((tf32, tf32))
