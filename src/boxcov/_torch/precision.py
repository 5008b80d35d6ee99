"""Full precision for factors and covariances."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def full_precision(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate ``function`` to run without torch.autocast.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     full_precision(torch.mm)(torch.eye(2), torch.eye(2)).dtype
    torch.float32
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        with ExitStack() as stack:
            for kind in kinds:
                stack.enter_context(torch.autocast(kind, enabled=False))
            return function(*args, **kwargs)

    return run


def at_least_float32(x: Tensor) -> Tensor:
    """Return half-precision tensors as float32, others unchanged.

    >>> at_least_float32(torch.zeros(1, dtype=torch.bfloat16)).dtype
    torch.float32
    """
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
