"""The smallest products of the exact covariance as Triton kernels.

A frame has about 70,000 products of matrices of 9 to 28 rows (``predict/head/covariance.py``). In
plain torch their operands are first copied into the layout of a batched product, and the products
leave most of a GPU idle: 0.5 ms of a frame of 5 ms on an H200.
"""

from __future__ import annotations

import torch
from torch import Tensor

from boxcov._torch.process_state import allows_tf32
from boxcov._torch.triton_kernels import has_triton, launch, tile_side, tl

_OUTPUTS = 16  # p of a program of the quadratic forms
_MEMBERS, _CELLS = 4, 128  # most boxes, and cells of them, of a program of the convolution
_ROWS, _WIDTH, _DEPTH = 16, 64, 32  # of a tile of a product, and of a step of its sum


def has_kernels(x: Tensor) -> bool:
    """Whether the kernels can take the tensors of a frame, of which x is one."""
    return x.is_cuda and x.dtype == torch.float32 and has_triton(x)


def gram_matrices(alpha: Tensor, h: Tensor, columns: Tensor, rows: int) -> Tensor:
    """Return ``alpha_i diag(h[s]) alpha_i^T`` (m, S, rows x rows), box by box.

    alpha: (at least m x rows, n), the rows of one box after the other; a last row is left out.
    h: (S, n). columns: (S, 2) the first column that counts, and the end, outside of which h[s] is
    not read.
    """
    m, S = len(alpha) // rows, len(h)
    out, precision = alpha.new_empty(m, S, rows * rows), _precision()
    launch(
        _gram,
        (m, S),
        *(alpha, h, columns, out, alpha.stride(0), h.stride(0), S, rows),
        SIDE=tile_side(rows),
        STEP=64 if precision == "tf32" else 32,
        PRECISION=precision,
        num_warps=4 if rows > 16 else 2,
    )
    return out


def quadratic_forms(grams: Tensor, F: Tensor, delta: Tensor, box_of: Tensor) -> Tensor:
    """Return ``sum over p of delta_p^T K_p delta_p`` (G, B, n, c, c), K_p = sum_s F[p, s] gram_s.

    grams: (m, S, rows x rows) per box. F: (G, B, P, S). delta: (G, B, c, n, T, P), of T rows, at
    most those of the Gram matrices. box_of: (G, n); m is padding, with a form of zero.
    """
    (G, B, c, n, T, P), (m, S, square) = delta.shape, grams.shape
    delta = delta.contiguous()
    rows = round(square**0.5)
    parts = -(-P // _OUTPUTS)
    out = delta.new_empty(G, B, n, parts, c, c)
    launch(
        _form,
        (G * B * n, parts),
        *(grams, F.contiguous(), delta, box_of.contiguous(), out),
        *(m, B, n, P, T, c, rows),
        TERMS=S,
        SIDE=tile_side(rows),
        WIDTH=tile_side(c),
        STEP=_OUTPUTS,
        num_warps=1 if rows <= 16 else 2,
    )
    return out.sum(3)


def convolve_back(
    d: Tensor, W: Tensor, k: int, output_index: Tensor, members: Tensor, m: int
) -> Tensor:
    """Return gradients (R, m, T', C) at the input of a convolution, from those at its outputs.

    d: (G, B, c, n, T, n_out) at the T cells of a square; T' are those of the larger square that
    they read. W: (G, B, k k C, n_out). output_index: (R,) which of the B c gradients count.
    members: (G, n) the boxes of d; m is padding. Rows of boxes that are no members are not written.
    """
    (G, B, c, n, T, n_out), R = d.shape, len(output_index)
    side, C = round(T**0.5), W.shape[2] // (k * k)
    size = side + k - 1
    out = d.new_empty(R, m, size * size, C)
    width, cells = min(_WIDTH, tile_side(C)), tile_side(size * size)
    at_once = max(1, min(_MEMBERS, _CELLS // cells))  # a small GPU has 99 KB for a program
    launch(
        _back,
        (G * -(-n // at_once), R, -(-C // width)),
        *(d.contiguous(), W, output_index, members.contiguous(), out),
        *(W.stride(0), W.stride(1), m, B, c, n, n_out, C, side, k),
        MEMBERS=at_once,
        CELLS=cells,
        WIDTH=width,
        DEPTH=min(_DEPTH if cells <= _CELLS else 16, tile_side(n_out)),
        PRECISION=_precision(),
    )
    return out


def project(x: Tensor, U: Tensor, kinds: Tensor) -> Tensor:
    """Return ``x[g] U[kinds[g]]`` (G, B, n, N), for x (G, B, n, K) and U (kinds, B, K, N)."""
    (G, B, n, K), N = x.shape, U.shape[3]
    out = x.new_empty(G, B, n, N)
    launch(
        _project,
        (-(-N // _WIDTH), -(-n // _ROWS), G * B),
        *(x.contiguous(), U.contiguous(), kinds, out, B, n, K, N),
        ROWS=_ROWS,
        WIDTH=_WIDTH,
        DEPTH=_DEPTH,
        PRECISION=_precision(),
    )
    return out


def _precision() -> str:
    """TF32, or three products in TF32, which are as exact as float32 and faster than its units."""
    return "tf32" if allows_tf32()[0] else "tf32x3"


def _gram(  # type: ignore[no-untyped-def]
    alpha,
    h,
    columns,
    out,
    alpha_stride,
    h_stride,
    S,
    ROWS,
    SIDE: tl.constexpr,
    STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the Gram matrix of one box and one s."""
    box, s = tl.program_id(0), tl.program_id(1)
    start, stop = tl.load(columns + 2 * s), tl.load(columns + 2 * s + 1)
    t = tl.arange(0, SIDE)
    row = (box * ROWS + t).to(tl.int64) * alpha_stride
    total = tl.zeros((SIDE, SIDE), dtype=tl.float32)
    for first in range(start, stop, STEP):
        q = first + tl.arange(0, STEP)
        is_inside = (t < ROWS)[:, None] & (q < stop)[None, :]
        a = tl.load(alpha + row[:, None] + q[None, :], mask=is_inside, other=0.0)
        scale = tl.load(h + s * h_stride + q, mask=q < stop, other=0.0)
        total += tl.dot(a * scale[None, :], tl.trans(a), input_precision=PRECISION)
    at = (box * S + s).to(tl.int64) * ROWS * ROWS + t[:, None] * ROWS + t[None, :]
    tl.store(out + at, total, mask=(t < ROWS)[:, None] & (t < ROWS)[None, :])


def _form(  # type: ignore[no-untyped-def]
    grams,
    F,
    delta,
    box_of,
    out,
    m,
    B,
    n,
    P,
    T,
    C,
    ROWS,
    TERMS: tl.constexpr,
    SIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
):
    """Write the sum over STEP p of one box and branch.

    Three products in TF32 stand for one in float32: a single one would be 0.1 % too small.
    """
    item, part = tl.program_id(0), tl.program_id(1)
    layer, number = item // n, item % n
    box = tl.load(box_of + (layer // B) * n + number)
    t, j = tl.arange(0, SIDE), tl.arange(0, WIDTH)
    in_gram = (t < ROWS)[:, None] & (t < ROWS)[None, :]
    in_delta = (t < T)[:, None] & (j < C)[None, :]
    # delta is (layer, C, n, T, P)
    at_delta = ((layer * C + j[None, :]) * n + number) * T + t[:, None]
    total = tl.zeros((WIDTH, WIDTH), dtype=tl.float32)
    if box < m:
        gram = grams + (box * TERMS).to(tl.int64) * ROWS * ROWS + t[:, None] * ROWS + t[None, :]
        for p in range(part * STEP, min(part * STEP + STEP, P)):
            K = tl.zeros((SIDE, SIDE), dtype=tl.float32)
            for s in tl.static_range(TERMS):  # the loads of the Gram matrices leave the loop over p
                weight = tl.load(F + (layer * P + p) * TERMS + s)
                K += weight * tl.load(gram + s * ROWS * ROWS, mask=in_gram, other=0.0)
            d = tl.load(delta + at_delta.to(tl.int64) * P + p, mask=in_delta, other=0.0)
            moved = tl.dot(K, d, input_precision="tf32x3")
            total += tl.dot(tl.trans(d), moved, input_precision="tf32x3")
    total = (total + tl.trans(total)) * 0.5
    at = (item * tl.num_programs(1) + part).to(tl.int64) * C * C + j[:, None] * C + j[None, :]
    tl.store(out + at, total, mask=(j < C)[:, None] & (j < C)[None, :])


def _back(  # type: ignore[no-untyped-def]
    d,
    W,
    output_index,
    members,
    out,
    W_stride_G,
    W_stride_B,
    m,
    B,
    c,
    n,
    n_out,
    C,
    side,
    k,
    MEMBERS: tl.constexpr,
    CELLS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the gradients of one raw output of MEMBERS boxes of a row at WIDTH channels."""
    blocks = tl.cdiv(n, MEMBERS)
    layer, block, r = tl.program_id(0) // blocks, tl.program_id(0) % blocks, tl.program_id(1)
    output, size = tl.load(output_index + r), side + k - 1
    rows, channel = tl.arange(0, MEMBERS * CELLS), tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    number, cell = block * MEMBERS + rows // CELLS, rows % CELLS
    box = tl.load(members + layer * n + number, mask=number < n, other=m)
    is_box = (box < m) & (cell < size * size)
    row, column = cell // size, cell % size
    # d is (G, B c, n, T, n_out)
    d += ((layer * B * c + output) * n + number[:, None]).to(tl.int64) * side * side * n_out
    W += layer.to(tl.int64) * W_stride_G + (output // c) * W_stride_B
    total = tl.zeros((MEMBERS * CELLS, WIDTH), dtype=tl.float32)
    for tap in range(k * k):
        y, x = row - tap // k, column - tap % k
        is_read = is_box & (y >= 0) & (y < side) & (x >= 0) & (x < side)
        for start in range(0, n_out, DEPTH):
            o = start + tl.arange(0, DEPTH)
            at = (y * side + x)[:, None] * n_out + o[None, :]
            a = tl.load(d + at, mask=is_read[:, None] & (o < n_out)[None, :], other=0.0)
            at = (tap * C + channel)[None, :] * n_out + o[:, None]
            w = tl.load(W + at, mask=(channel < C)[None, :] & (o < n_out)[:, None], other=0.0)
            total += tl.dot(a, w, input_precision=PRECISION)
    at = ((r * m + box) * size * size + cell)[:, None].to(tl.int64) * C + channel[None, :]
    tl.store(out + at, total, mask=is_box[:, None] & (channel < C)[None, :])


def _project(  # type: ignore[no-untyped-def]
    x,
    U,
    kinds,
    out,
    B,
    n,
    K,
    N,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write a tile of the product of one row and branch."""
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    row, layer = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.program_id(2)
    U += (tl.load(kinds + layer // B) * B + layer % B).to(tl.int64) * K * N
    x += layer.to(tl.int64) * n * K
    total = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    for start in range(0, K, DEPTH):
        k = start + tl.arange(0, DEPTH)
        is_x, is_U = (row < n)[:, None] & (k < K)[None, :], (k < K)[:, None] & (column < N)[None, :]
        a = tl.load(x + row[:, None] * K + k[None, :], mask=is_x, other=0.0)
        b = tl.load(U + k[:, None] * N + column[None, :], mask=is_U, other=0.0)
        total += tl.dot(a, b, input_precision=PRECISION)
    at = layer.to(tl.int64) * n * N + row[:, None] * N + column[None, :]
    tl.store(out + at, total, mask=(row < n)[:, None] & (column < N)[None, :])
