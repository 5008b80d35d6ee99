"""On a GPU: Gram matrices and contractions of the exact covariance by kernels of their own, where Triton is at hand.

A GPU's libraries are slow at thousands of products of 25 x 25 matrices, and weighing, gathering and turning them round costs as much again.
Here each box is one program that reads what it needs once. Without Triton, or without a compiler for it, the same is done in ordinary
products.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any
from warnings import warn

import torch
from torch import Tensor

from boxcov.errors import BoxcovWarning
from boxcov.predict.head.weights import Bands


class _Fused:
    """Whether the kernels can be used; not any more, once one could not be built."""

    def __init__(self) -> None:
        self.usable = True

    def tried(self, launch: Callable[[Any], Tensor]) -> Tensor | None:
        try:
            return launch(_kernels())
        except Exception as error:  # whatever a compiler may say
            self.usable = False
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            warn(
                f"Triton cannot build kernels here ({why}): ordinary products are used, which are slower",
                BoxcovWarning,
                stacklevel=6,
            )
            return None


_fused = _Fused()


@cache
def _kernels() -> Any:
    """Loaded when they are first needed: Triton takes its time."""
    from boxcov.predict.cuda import kernels

    return kernels


def usable(x: Tensor) -> bool:
    """Whether there are kernels for such numbers.

    >>> usable(torch.zeros(1))
    False
    """
    return x.is_cuda and x.dtype == torch.float32 and _fused.usable and bool(_kernels().KNOWN)


def grams(alpha: Tensor, bands: Bands, boxes: int, T: int) -> Tensor | None:
    """``alpha diag(columns[s]) alpha^T`` (boxes, S, T T) of rows (boxes T or more, n), band after band; None if that cannot be done here."""
    if not usable(alpha) or T > 64 or alpha.stride(1) != 1:
        return None
    counts = [1 if columns is None else len(columns) for _, columns in bands]

    def launch(kernels: Any) -> Tensor:
        out = alpha.new_empty(boxes, sum(counts), T * T)
        for number, ((q, columns), S) in enumerate(zip(bands, counts)):
            given = alpha[:, q]
            kernels.gram_kernel[(boxes, S)](
                *(
                    given,
                    given if columns is None else columns.contiguous(),
                    out,
                    alpha.stride(0),
                    q.stop - q.start,
                    T,
                ),
                *(out.shape[1], sum(counts[:number])),
                WEIGHED=columns is not None,
                TP=max(16, _power(T)),
                BLOCK=64,
                PRECISION=_precision(),
            )
        return out

    return _fused.tried(launch)


def contracted(grams: Tensor, index: Tensor, rows: Tensor, delta: Tensor) -> Tensor | None:
    """``sum over p of delta_p^T (sum over s of rows[p, s] grams[s]) delta_p`` (G, B, n, c, c), or None if that cannot be done here.

    grams (cells, S, T T), index (G, n) the cell of each box or -1, rows (G, B, p, S), delta (G, B, c, n, T, p).
    """
    G, B, c, n, T, p = delta.shape
    S, TP, CP = grams.shape[1], max(16, _power(T)), max(16, _power(c))
    if not usable(delta) or grams.shape[2] != T * T or TP > 64 or CP > 64:
        return None
    PB = max(1, 4096 // (TP * CP))
    parts = -(-p // PB)

    def launch(kernels: Any) -> Tensor:
        out = delta.new_empty(parts, G, B, n, c, c)
        kernels.contraction_kernel[(n, G * B, parts)](
            *(
                grams.contiguous(),
                index.contiguous(),
                rows.contiguous(),
                delta.contiguous(),
                out,
                S,
                T,
                p,
                c,
                n,
                B,
            ),
            TP=TP,
            CP=CP,
            PB=PB,
            PRECISION=_precision(),
        )
        found = out.sum(0)
        return (found + found.transpose(-1, -2)) / 2

    return _fused.tried(launch)


def _precision() -> str:
    """Three products in TF32, of leading and remaining digits, are float32 to 1e-6, and faster."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"


def _power(count: int) -> int:
    """The next power of two.

    >>> [_power(n) for n in (1, 9, 25, 32)]
    [1, 16, 32, 32]
    """
    return 1 << (count - 1).bit_length()
