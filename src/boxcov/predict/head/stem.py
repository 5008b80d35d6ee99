"""The stem of a staged head: rows of cells, the same for all kinds of boxes; see ``stacked.py``."""

from __future__ import annotations

import torch
from torch import Tensor

from boxcov.predict.head.cells import Cells, Plan
from boxcov.predict.head.products import (
    Passed,
    chunks,
    contracted,
    filled,
    gathered,
    gram_matrices,
    outputs,
    pointwise,
    with_rest,
)
from boxcov.predict.head.weights import Drawn, Layers, Turned


def stem_stage(layers: Layers, cells: Cells, rows: Tensor) -> tuple[Tensor, Passed]:
    a = gathered(rows, cells.table, layers)
    alpha: Tensor | None = None
    if layers.turned is not None and layers.joined is not None:
        alpha, y = (a @ layers.joined).tensor_split([layers.joined.shape[1] - layers.W.shape[3]], 1)
    else:
        alpha = None if layers.turned is None else a @ layers.turned.U
        y = outputs(a, layers.W[0, 0], layers)
    if alpha is not None and isinstance(layers.turned, Turned):
        alpha = with_rest(a, alpha, layers.turned)
    h, slope = pointwise(y, layers.scale[0, 0], layers.shift[0, 0], layers)
    if cells.inside is not None:
        return h * cells.inside, Passed(alpha, slope * cells.inside)
    h[-1], slope[-1] = 0, 0
    return h, Passed(alpha, slope)


def stem_covariance(turned: Turned, alpha: Tensor, d: Tensor, cells: Cells, plan: Plan) -> Tensor:
    """(m, R, R) of gradients d (R, m, T, C)."""
    R, m, _, p = d.shape
    grams = gram_matrices(turned, alpha, cells, plan)  # (u, S, T T)
    T = round(grams.shape[-1] ** 0.5)
    delta = (d.flatten(0, 2) @ turned.V[0, 0]).view(d.shape)
    delta = filled(delta.permute(1, 3, 2, 0), T)  # (m, p, T, R)
    out = delta.new_empty(m, R, R)
    starts = chunks(m, p * T * T, delta, plan.room)
    for i in starts:
        part = slice(i, i + starts.step)
        K = grams[part] if plan.first is None else grams.index_select(0, plan.cell[part])
        K = K if turned.rows is None else turned.rows[0, 0] @ K
        out[part] = contracted(K.view(-1, p, T, T), delta[part].contiguous())[..., :R, :R]
    return out


def stem_directions(drawn: Drawn, alpha: Tensor, d: Tensor, cells: Cells, plan: Plan) -> Tensor:
    """(m, R, k) of gradients d (R, m, T, C) and what the directions make of the inputs, alpha (L + 1, k C)."""
    _, m, T, C = d.shape
    moved: Tensor = cells.seen(alpha).unflatten(2, (drawn.count, C))
    moved = moved.transpose(2, 3).reshape(m, T * C, drawn.count)
    return d.transpose(0, 1).flatten(2) @ moved


def from_below(layers: Layers, plan: Plan, d: Tensor, tangents: Tensor) -> Tensor:
    """(m, R, k) of gradients d (R, m, T, n_out) at the first stage's product, and tangents (k, B, C, height, width) of what it reads."""
    cells, (k, _, C) = plan.stages[0], tangents.shape[:3]
    rows = tangents.permute(0, 1, 3, 4, 2).reshape(k, -1, C)  # channels last, as they come: no copy
    beyond = (
        cells.table == len(plan.pixels) if plan.beyond is None else plan.beyond[:, 0][cells.table]
    )
    read = torch.cat([plan.pixels, plan.pixels.new_zeros(1)])[
        cells.table
    ]  # (L, taps) cells of the map
    W = layers.W[0, 0][: C * read.shape[1]].to(tangents.dtype)
    moved = d.new_zeros(k, len(read) + 1, W.shape[1])
    starts = chunks(k, read.numel() * C, tangents, plan.room) if d.is_cuda else range(k)
    for i in starts:
        seen = rows[i : i + starts.step].index_select(1, read.flatten()).view(-1, *read.shape, C)
        seen = seen.masked_fill_(beyond.unsqueeze(2), 0).flatten(2)
        moved[i : i + starts.step, :-1] = (seen @ W).to(d.dtype)
    moved = cells.seen(moved).flatten(2).permute(1, 2, 0)  # (m, T n_out, k)
    return d.transpose(0, 1).flatten(2) @ moved
