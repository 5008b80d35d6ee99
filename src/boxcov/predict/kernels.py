# mypy: ignore-errors
"""Triton kernels for what the libraries of a GPU are slow at: thousands of products of matrices with ten to thirty rows. See ``fused.py``."""

from __future__ import annotations

try:
    import triton
    import triton.language as tl
except ImportError:  # as with a torch for CPUs alone; ``fused.py`` does without
    triton = tl = None

KNOWN = triton is not None


def _jit(function):
    return function if triton is None else triton.jit(function)


@_jit
def gram_kernel(
    alpha,  # rows of a box one after the other, T of them; ``row`` numbers from one to the next
    columns,  # (S, n)
    out,  # (boxes, all, T, T); this band's are those from ``first`` on
    row,
    n,
    T,
    all,
    first,
    WEIGHED: tl.constexpr,
    TP: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``sum over q of columns[s, q] alpha[t, q] alpha[t', q]`` for one box and one s."""
    box, s = tl.program_id(0), tl.program_id(1)
    t, q = tl.arange(0, TP), tl.arange(0, BLOCK)
    own = alpha + (box * T + t).to(tl.int64)[:, None] * row
    acc = tl.zeros((TP, TP), tl.float32)
    for start in range(0, n, BLOCK):
        on = start + q < n
        a = tl.load(own + (start + q)[None, :], mask=(t < T)[:, None] & on[None, :], other=0.0)
        w = a
        if WEIGHED:
            w = a * tl.load(columns + s * n + start + q, mask=on, other=0.0)[None, :]
        acc = tl.dot(a, tl.trans(w), acc, input_precision=PRECISION)
    pair = t[:, None] * T + t[None, :]
    tl.store(out + (box * all + first + s) * T * T + pair, acc, mask=(t < T)[:, None] & (t < T)[None, :])


@_jit
def contraction_kernel(
    grams,  # (cells, S, T, T)
    index,  # (kinds, n) the cell of each box
    rows,  # (kinds, branches, P, S)
    delta,  # (kinds, branches, C, n, T, P)
    out,  # (PARTS, kinds, branches, n, C, C)
    S,
    T,
    P,
    C,
    n,
    branches,
    SP: tl.constexpr,
    TP: tl.constexpr,
    CP: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``sum over p of delta_p^T (sum over s of rows[p, s] gram_s) delta_p`` for one box, branch and part of the p."""
    box, branch, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    s, t, c = tl.arange(0, SP), tl.arange(0, TP), tl.arange(0, CP)
    cell = tl.load(index + (branch // branches) * n + box)
    inside = (s < S)[:, None, None] & (t < T)[None, :, None] & (t < T)[None, None, :]
    at = s[:, None, None] * T * T + t[None, :, None] * T + t[None, None, :]
    gram = tl.load(grams + cell * S * T * T + at, mask=inside, other=0.0)
    own = delta + branch * C * n * T * P + box * T * P + t[:, None] * P + c[None, :] * n * T * P
    real = (t < T)[:, None] & (c < C)[None, :]
    acc = tl.zeros((CP, CP), tl.float32)
    step = tl.cdiv(P, PARTS)
    for p in range(part * step, min((part + 1) * step, P)):
        f = tl.load(rows + (branch * P + p) * S + s, mask=s < S, other=0.0)
        K = tl.sum(gram * f[:, None, None], 0)
        d = tl.load(own + p, mask=real, other=0.0)
        right = tl.dot(K, d, input_precision=PRECISION)
        acc = tl.dot(tl.trans(d), right, acc, input_precision=PRECISION)
    to = out + ((part * tl.num_programs(1) + branch) * n + box) * C * C
    tl.store(to + c[:, None] * C + c[None, :], acc, mask=(c < C)[:, None] & (c < C)[None, :])
