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
def _tf32(x, PRECISION: tl.constexpr):
    """Rounded to the digits that TF32 keeps: left to the hardware, they are cut off, and errors add up."""
    if PRECISION == "tf32":
        x = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return x


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
        acc = tl.dot(
            _tf32(a, PRECISION), tl.trans(_tf32(w, PRECISION)), acc, input_precision=PRECISION
        )
    pair = t[:, None] * T + t[None, :]
    tl.store(
        out + (box * all + first + s) * T * T + pair, acc, mask=(t < T)[:, None] & (t < T)[None, :]
    )


@_jit
def contraction_kernel(
    grams,  # (cells, S, T, T)
    index,  # (kinds, n) the cell of each box, -1 for none
    rows,  # (kinds, branches, P, S)
    delta,  # (kinds, branches, C, n, T, P)
    out,  # (P / PB, kinds, branches, n, C, C)
    S,
    T,
    P,
    C,
    n,
    branches,
    TP: tl.constexpr,
    CP: tl.constexpr,
    PB: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``sum over p of delta_p^T (sum over s of rows[p, s] gram_s) delta_p`` for one box, branch and PB of the p."""
    box, branch, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    t, both = tl.arange(0, TP), tl.arange(0, PB * CP)
    p, c = (
        part * PB + both // CP,
        both % CP,
    )  # side by side, so that one product with a Gram matrix serves PB of the p
    to = out + ((part * tl.num_programs(1) + branch) * n + box) * C * C
    i = tl.arange(0, CP)
    to += i[:, None] * C + i[None, :]
    wanted = (i < C)[:, None] & (i < C)[None, :]
    cell = tl.load(index + (branch // branches) * n + box)
    if cell < 0:
        tl.store(to, tl.zeros((CP, CP), tl.float32), mask=wanted)
        return
    real = (p < P) & (c < C)
    own = (
        delta + branch * C * n * T * P + box * T * P + t[:, None] * P + (c * n * T * P + p)[None, :]
    )
    d = _tf32(tl.load(own, mask=(t < T)[:, None] & real[None, :], other=0.0), PRECISION)
    square = (t < T)[:, None] & (t < T)[None, :]
    moved = tl.zeros((TP, PB * CP), tl.float32)
    for s in range(S):
        gram = tl.load(
            grams + (cell * S + s) * T * T + t[:, None] * T + t[None, :], mask=square, other=0.0
        )
        f = tl.load(rows + (branch * P + p) * S + s, mask=real, other=0.0)
        moved += tl.dot(_tf32(gram, PRECISION), d, input_precision=PRECISION) * f[None, :]
    left = tl.reshape(tl.permute(tl.reshape(d, (TP, PB, CP)), (2, 0, 1)), (CP, TP * PB))
    right = tl.reshape(_tf32(moved, PRECISION), (TP * PB, CP))
    tl.store(to, tl.dot(left, right, input_precision=PRECISION), mask=wanted)
