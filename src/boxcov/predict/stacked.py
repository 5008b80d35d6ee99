"""The exact covariance of all boxes of a frame through a staged head: products over all boxes, kinds and branches at once.

With A (T x n_in) the inputs of a layer at the T cells that a box sees and D_j (T x n_out) the gradient of its number j there, and in the eigenbasis
``alpha = A U``, ``delta_j = D_j V``, the layer adds

    C[j, j'] = sum over p of delta_j[:, p]^T K_p delta_j'[:, p],    K_p = alpha diag(v[p]) alpha^T    (T x T).

K_p has no j in it, and with v in separable form (``separable.py``) it is a combination of a few Gram matrices, which are the same for all
branches and for boxes on the same cell. alpha is computed once for each cell of the map. Numbers come first, the decoding's Jacobian last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from boxcov.predict import fused
from boxcov.predict.graphs import matrix_precision
from boxcov.predict.plan import Cells, Group, Plan
from boxcov.predict.prepared import Drawn, Layers, Prepared, Turned, in_parts, leading, missing


@dataclass(frozen=True)
class Passed:
    """What a stage leaves behind for the way back."""

    alpha: Tensor | None  # inputs in the eigenbasis, or times directions: (L + 1, n_in), or (G, B, n, T, n_in) in the branches
    slope: Tensor  # of norm and activation: (L + 1, C), or (G, B, n, T, C)


def through_head(
    head: Prepared, plan: Plan, pixels: Tensor, half: bool = False, tangents: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The covariance of the numbers of all boxes (m, R, R) and the numbers (m, R), from the features (P + 1, C) of the cells that they see.

    For a head prepared with k directions, the derivatives along them (m, R, k) come in the place of the covariance.
    half: take the one large product, of the stem's inputs with their eigenvectors, in half precision.
    tangents: (k, B, C, height, width) of the features, if they depend on weights, too; then also the derivatives (m, R, k) along these.
    """
    rows, stem = pixels, []
    for layers, cells in zip(head.stem, plan.stages):
        rows, passed = _stem_stage(layers, cells, rows, half)
        stem.append(passed)
    numbers, found, d = _branches(head, plan, rows)
    for layers, cells, passed in zip(reversed(head.stem), reversed(plan.stages[:-1]), reversed(stem)):
        d = d * cells.seen(passed.slope)  # (R, m, T, C)
        if layers.turned is not None:
            assert passed.alpha is not None
            add = _stem_directions if isinstance(layers.turned, Drawn) else _stem_covariance
            part = add(layers.turned, passed.alpha, d, cells, plan)  # type: ignore[arg-type]
            found = part if found is None else found + part
        if layers is not head.stem[0]:
            d = _back(d, layers.W[0, 0], layers)
    assert found is not None
    return found, numbers, None if tangents is None else _from_below(head.stem[0], plan, d, tangents)


def jacobian(numbers: Tensor, decode: Callable[[Tensor], Tensor]) -> Tensor:
    """Derivatives (m, D, R) of boxes in their numbers (m, R), each of its own.

    >>> jacobian(torch.zeros(3, 2), lambda x: 2 * x.exp())[0]
    tensor([[2., 0.],
            [0., 2.]])
    """
    with torch.enable_grad():
        numbers = numbers.detach().requires_grad_()
        boxes = decode(numbers)
        m, D = boxes.shape
        ones = torch.eye(D, dtype=boxes.dtype, device=boxes.device).unsqueeze(1).expand(D, m, D)
        (J,) = torch.autograd.grad(boxes, numbers, ones, is_grads_batched=True)  # (D, m, R)
    return J.transpose(0, 1)


def _pointwise(y: Tensor, scale: Tensor, shift: Tensor, layers: Layers) -> tuple[Tensor, Tensor]:
    """Norm and activation, and their derivative."""
    z = torch.addcmul(shift, y, scale)
    if layers.activation is None:
        return z, scale.expand_as(z)
    if layers.activation in (torch.relu, F.relu):
        on = z > 0
        return z * on, on * scale
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        h = layers.activation(z)
        (slope,) = torch.autograd.grad(h, z, torch.ones_like(h))
    return h.detach(), slope * scale


def _contracted(K: Tensor, delta: Tensor) -> Tensor:
    """``sum over p of delta^T K_p delta`` (..., R, R), for K (..., p, T, T) and delta (..., p, T, R)."""
    right = K @ delta
    C = delta.flatten(-3, -2).transpose(-1, -2) @ right.flatten(-3, -2)
    return (C + C.transpose(-1, -2)) / 2


def _chunks(count: int, size: int, like: Tensor, room: int) -> range:
    """Where to start anew so that ``size`` numbers for each of ``count`` items stay within ``room`` bytes."""
    return range(0, count, max(1, min(count, int(room // (size * like.element_size())))))


# the stem: rows of cells, the same for all kinds


def _stem_stage(layers: Layers, cells: Cells, rows: Tensor, half: bool) -> tuple[Tensor, Passed]:
    a = _gathered(rows, cells.table, layers)
    alpha: Tensor | None = None
    if layers.turned is not None and layers.joined is not None:
        alpha, y = (a @ layers.joined).tensor_split([layers.joined.shape[1] - layers.W.shape[3]], 1)
    else:
        alpha = None if layers.turned is None else _turned_inputs(a, layers.turned.U, layers, half)
        y = _outputs(a, layers.W[0, 0], layers)
    if alpha is not None and isinstance(layers.turned, Turned):
        alpha = _with_rest(a, alpha, layers.turned)
    h, slope = _pointwise(y, layers.scale[0, 0], layers.shift[0, 0], layers)
    if cells.inside is not None:
        return h * cells.inside, Passed(alpha, slope * cells.inside)
    h[-1], slope[-1] = 0, 0
    return h, Passed(alpha, slope)


def _with_rest(a: Tensor, alpha: Tensor, turned: Turned) -> Tensor:
    """Inputs in the eigenbasis (L + 1, kept), and what the kept eigenvectors leave of them behind (L + 1, kept + n_in), if that counts."""
    return torch.cat([alpha, a - alpha @ turned.U.T], 1) if turned.rest else alpha


def _turned_inputs(a: Tensor, U: Tensor, layers: Layers, half: bool) -> Tensor:
    """The one large product, on a GPU."""
    if half:
        return (a.half() @ U.half()).to(a.dtype)
    return a @ U if torch.backends.cuda.matmul.allow_tf32 or layers.parts is None else _in_full(a, U, layers.parts)


def _outputs(a: Tensor, W: Tensor, layers: Layers) -> Tensor:
    """What the network computes. For derivatives along directions in full: an activation near its kink is to fall to the side that it falls to
    in float32, as a few directions do not even that out."""
    return _in_full(a, W) if isinstance(layers.turned, Drawn) else a @ W


def _in_full(a: Tensor, W: Tensor, parts: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """A product as exact as float32 makes it, whatever precision is allowed.

    On a GPU it is three products in TF32, of leading and remaining digits, right to 1e-6 and faster than one in float32. parts: those of W.
    """
    if not a.is_cuda or a.dtype != torch.float32:
        return a @ W
    lead, rest = in_parts(W) if parts is None else parts
    a_lead = leading(a)
    with matrix_precision("tf32"):
        if a.dim() > 2:
            return a_lead @ lead + (a_lead @ rest + (a - a_lead) @ lead)
        return (a_lead @ rest).addmm_(a - a_lead, lead).addmm_(a_lead, lead)  # the small ones first


def _gathered(rows: Tensor, table: Tensor, layers: Layers) -> Tensor:
    """Inputs (L + 1, n_in) of a layer: what each cell reads, tap by tap, and a row of zeros."""
    n = table.shape[1] * rows.shape[1]
    if not layers.behind:
        a = rows.new_empty(len(table) + 1, n)
        torch.index_select(rows, 0, table.flatten(), out=a[:-1].view(-1, rows.shape[1]))
        a[-1] = 0
        return a
    a = rows.new_zeros(len(table) + 1, n + layers.behind)
    a[:-1, :n] = rows.index_select(0, table.flatten()).view(len(table), -1)
    if layers.has_bias:
        a[:-1, n] = 1
    return a


def _stem_covariance(turned: Turned, alpha: Tensor, d: Tensor, cells: Cells, plan: Plan) -> Tensor:
    """(m, R, R) of gradients d (R, m, T, C)."""
    R, m, _, p = d.shape
    grams = _grams(turned, alpha, cells, plan)  # (u, S, T T)
    T = round(grams.shape[-1] ** 0.5)
    delta = (d.flatten(0, 2) @ turned.V[0, 0]).view(d.shape)
    if turned.rows is not None:
        found = fused.contracted(grams, plan.cell.unsqueeze(0), turned.rows, delta[None, None])
        if found is not None:
            return found[0, 0]
    delta = _filled(delta.permute(1, 3, 2, 0), T)  # (m, p, T, R)
    out = delta.new_empty(m, R, R)
    chunks = _chunks(m, p * T * T, delta, plan.room)
    for i in chunks:
        part = slice(i, i + chunks.step)
        K = grams[part] if plan.first is None else grams.index_select(0, plan.cell[part])
        K = K if turned.rows is None else turned.rows[0, 0] @ K
        out[part] = _contracted(K.view(-1, p, T, T), delta[part].contiguous())[..., :R, :R]
    return out


def _filled(delta: Tensor, T: int) -> Tensor:
    """Gradients (..., T, R) filled up with zeros, as windows are; on a GPU R, too, to a multiple of four."""
    return F.pad(delta, (0, missing(delta.shape[-1], delta), 0, T - delta.shape[-2]))


def _stem_directions(drawn: Drawn, alpha: Tensor, d: Tensor, cells: Cells, plan: Plan) -> Tensor:
    """(m, R, k) of gradients d (R, m, T, C) and what the directions make of the inputs, alpha (L + 1, k C)."""
    _, m, T, C = d.shape
    moved: Tensor = cells.seen(alpha).unflatten(2, (drawn.count, C))
    moved = moved.transpose(2, 3).reshape(m, T * C, drawn.count)
    return d.transpose(0, 1).flatten(2) @ moved


def _grams(turned: Turned, alpha: Tensor, cells: Cells, plan: Plan) -> Tensor:
    """``alpha diag(columns[s]) alpha^T`` (u, S, T T) over the cells that boxes see; every variance by itself if not separable.

    Where every box has cells of its own, with the rows that fill them up.
    """
    bands = turned.bands or ((slice(0, alpha.shape[1]), turned.variances[0, 0]),)
    at = None if plan.first is None else cells.at[plan.first]
    u, T = (len(cells.at), cells.each) if at is None else at.shape
    made = fused.grams(alpha, bands, u, T) if at is None else None
    if made is not None:
        return made
    parts = []
    for q, columns in bands:
        S, n = (1, q.stop - q.start) if columns is None else columns.shape
        chunks = _chunks(u, S * T * n, alpha, plan.room)
        part = alpha.new_empty(u, T, S * T)
        weighed = alpha.new_empty(0 if columns is None else chunks.step, S, T, n)
        for i in chunks:
            if at is None:
                own = alpha[i * T : min(i + chunks.step, u) * T, q].unflatten(0, (-1, T))
            else:
                own = alpha[:, q].index_select(0, at[i : i + chunks.step].flatten()).view(-1, T, n)
            right = own if columns is None else torch.mul(own.unsqueeze(1), columns.unsqueeze(1), out=weighed[: len(own)]).flatten(1, 2)
            # the long side last: a CPU takes half as long again otherwise
            torch.bmm(own, right.transpose(1, 2), out=part[i : i + chunks.step])
        parts.append(part.view(u, T, S, T).transpose(1, 2))
    return torch.cat(parts, 1).view(u, -1, T * T)


def _from_below(layers: Layers, plan: Plan, d: Tensor, tangents: Tensor) -> Tensor:
    """(m, R, k) of gradients d (R, m, T, n_out) at the first stage's product, and tangents (k, B, C, height, width) of what it reads."""
    cells, (k, _, C) = plan.stages[0], tangents.shape[:3]
    rows = tangents.permute(0, 1, 3, 4, 2).reshape(k, -1, C)  # channels last, as they come: no copy
    beyond = cells.table == len(plan.pixels) if plan.beyond is None else plan.beyond[:, 0][cells.table]
    read = torch.cat([plan.pixels, plan.pixels.new_zeros(1)])[cells.table]  # (L, taps) cells of the map
    W = layers.W[0, 0][: C * read.shape[1]].to(tangents.dtype)
    moved = d.new_zeros(k, len(read) + 1, W.shape[1])
    chunks = _chunks(k, read.numel() * C, tangents, plan.room) if d.is_cuda else range(k)
    for i in chunks:
        seen = rows[i : i + chunks.step].index_select(1, read.flatten()).view(-1, *read.shape, C)
        seen = seen.masked_fill_(beyond.unsqueeze(2), 0).flatten(2)
        moved[i : i + chunks.step, :-1] = (seen @ W).to(d.dtype)
    moved = cells.seen(moved).flatten(2).permute(1, 2, 0)  # (m, T n_out, k)
    return d.transpose(0, 1).flatten(2) @ moved


# the branches: boxes by kind, (G kinds, B branches, n boxes, ...)


def _branches(head: Prepared, plan: Plan, rows: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """The numbers (m, R), what the branches' layers add (m, R, R or k), and the gradients at the stem's output (R, m, T, C)."""
    first, last = head.branches[0], head.branches[-1]
    a = _gathered(rows, plan.stages[-1].table, first)
    grams = None
    if isinstance(first.turned, Turned) and first.turned.rows is not None:
        grams = _grams(first.turned, _with_rest(a, a @ first.turned.U, first.turned), plan.stages[-1], plan)
    found = [_of_kinds(head, plan, group, a, grams) for group in plan.groups]
    numbers = _in_order([parts[0] for parts in found], plan).flatten(1)[:, last.picked]
    d = _in_order([parts[2] for parts in found], plan, 1)
    added = [parts[1] for parts in found if parts[1] is not None]
    if not added:
        return numbers, None, d
    part = _in_order(added, plan)  # (m, B, c, c or k)
    if any(isinstance(layers.turned, Turned) for layers in head.branches):  # numbers of two branches share no layer of theirs
        part = torch.diag_embed(part.permute(0, 2, 3, 1)).permute(0, 3, 1, 4, 2).flatten(3)[..., last.picked]
    return numbers, part.flatten(1, 2)[:, last.picked], d


def _in_order(parts: list[Tensor], plan: Plan, dim: int = 0) -> Tensor:
    """What the groups gave, box by box; a single group has them in order."""
    if len(plan.groups) == 1:
        return parts[0]
    return torch.cat(parts, dim).index_select(dim, torch.cat([group.boxes for group in plan.groups]).argsort())


def _of_kinds(head: Prepared, plan: Plan, group: Group, a: Tensor, grams: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """Numbers (g, B, c), what the layers add (g, B, c, c or k) and gradients (R, g, T, C) of the boxes of some kinds."""
    at = plan.stages[-1].at_or_beyond(group.members)  # (G, n, T)
    stages = [layers.of(group.kinds) for layers in head.branches]
    x, passed = _first_branches(stages[0], at, a, plan.stages[-1].inside)
    passes = [passed]
    for layers in stages[1:]:
        x, passed = _later_branches(layers, x)
        passes.append(passed)
    numbers, c = x, x.shape[-1]
    d = torch.eye(c, dtype=x.dtype, device=x.device).view(c, 1, 1, c).expand(*x.shape[:2], c, *x.shape[2:])  # (G, B, c, n, T, C)
    added: Tensor | None = None
    for number, layers, passed in zip(reversed(range(len(stages))), reversed(stages), reversed(passes)):
        d = d * passed.slope.unsqueeze(2)
        part: Tensor | None = None
        if isinstance(layers.turned, Drawn):
            part = _branch_directions(layers.turned, passed.alpha, d)
        elif layers.turned is not None:
            own = None if grams is None or number else (grams, plan.cell_or_none(group.members))
            part = _branch_covariance(layers.turned, passed.alpha, d, own)
        added = part if added is None else added if part is None else added + part
        if number:
            d = _back(d, layers.W, layers)
    # from here on a row a number: what was filled up falls away
    d = _back(d.flatten(1, 2)[:, stages[-1].picked], stages[0].W[:, stages[-1].branch_of], stages[0])  # (G, R, n, T, C)
    d = d.transpose(0, 1).flatten(1, 2).index_select(1, group.slot)
    by_box = [None if t is None else t.transpose(1, 2).flatten(0, 1)[group.slot] for t in (numbers.squeeze(3), added)]
    assert by_box[0] is not None
    return by_box[0], by_box[1], d


def _first_branches(layers: Layers, at: Tensor, a: Tensor, on: Tensor | None) -> tuple[Tensor, Passed]:
    """The first stage, which reads the stem's cells ``a`` (L + 1, n_in): (G, B, n, T, C)."""
    G, n, T = at.shape
    own = a.index_select(0, at.flatten()).view(G, n * T, -1)
    alpha = None
    if isinstance(layers.turned, Drawn):
        alpha = (own @ layers.turned.U.transpose(1, 2).flatten(2)).view(G, n, T, layers.W.shape[1], -1).permute(0, 3, 1, 2, 4)
    elif layers.turned is not None and layers.turned.rows is None:
        U = layers.turned.U  # one for all, or (G, B, n_in, n_in)
        alpha = (own @ U).view(G, 1, n, T, -1) if U.dim() == 2 else (own.unsqueeze(1) @ U).view(*U.shape[:2], n, T, -1)
    W = layers.W.transpose(1, 2).flatten(2)  # (G, n_in, B C)
    y = _outputs(own, W, layers).view(G, n, T, layers.W.shape[1], -1).permute(0, 3, 1, 2, 4)
    h, slope = _pointwise(y, layers.scale[:, :, None, None], layers.shift[:, :, None, None], layers)
    inside = ((at < len(a) - 1) if on is None else on[:, 0][at]).view(G, 1, n, T, 1)
    return h * inside, Passed(alpha, slope * inside)


def _later_branches(layers: Layers, x: Tensor) -> tuple[Tensor, Passed]:
    """A stage behind, on x (G, B, n, T, C)."""
    G, B, n, T, C = x.shape
    side, size = round(T**0.5), 2 * layers.reach + 1
    a = x.reshape(G, B, n, side, side, C).unfold(3, size, 1).unfold(4, size, 1)  # (G, B, n, s, s, C, k, k)
    a = a.movedim(5, 7).flatten(5).flatten(3, 4)  # (G, B, n, T', k k C)
    if layers.behind:
        a = torch.cat([a, _behind(a, layers)], -1)
    flat = a.flatten(2, 3)
    alpha = None if layers.turned is None else (flat @ layers.turned.U).view(*a.shape[:4], -1)
    y = _outputs(flat, layers.W, layers).view(*a.shape[:4], -1)
    h, slope = _pointwise(y, layers.scale[:, :, None, None], layers.shift[:, :, None, None], layers)
    return h, Passed(alpha, slope)


def _behind(a: Tensor, layers: Layers) -> Tensor:
    """What comes behind the inputs (..., behind): the 1 of a bias, then zeros."""
    behind = a.new_zeros(layers.behind)
    behind[: layers.has_bias] = 1
    return behind.expand(*a.shape[:-1], layers.behind)


def _branch_covariance(turned: Turned, alpha: Tensor | None, d: Tensor, grams: tuple[Tensor, Tensor] | None) -> Tensor:
    """(G, B, n, c, c) of gradients d (G, B, c, n, T, C); from Gram matrices of cells, and the cell of each box (G, n), where they are known."""
    G, B, c, n, T, p = d.shape
    delta = (d.flatten(2, 4) @ turned.V).view(d.shape)
    if grams is not None:
        assert turned.rows is not None
        found = fused.contracted(*grams, turned.rows, delta)
        if found is not None:
            return found
    delta = delta.permute(0, 1, 3, 5, 4, 2)  # (G, B, n, p, T, c)
    if grams is not None:
        assert turned.rows is not None
        T = round(grams[0].shape[-1] ** 0.5)
        delta = _filled(delta, T)
        own = grams[0].index_select(0, grams[1].flatten().clamp(min=0)).view(G, n, -1, T * T)  # of no box: any, its gradients are zero
        K = turned.rows.flatten(1, 2).unsqueeze(1) @ own  # (G, n, B p, T T)
        K = K.view(G, n, B, p, T, T).transpose(1, 2)
    else:
        assert alpha is not None
        pairs = (alpha.unsqueeze(-2) * alpha.unsqueeze(-3)).flatten(2, 4)  # (G, B, n T T, n_in)
        K = (pairs @ turned.variances.transpose(2, 3)).view(G, B, n, T * T, p).transpose(3, 4).unflatten(4, (T, T))
    return _contracted(K, delta)[..., :c, :c]


def _branch_directions(drawn: Drawn, alpha: Tensor | None, d: Tensor) -> Tensor:
    """(G, B, n, c, k) of gradients d (G, B, c, n, T, C) and what the directions make of the inputs, alpha (G, B, n, T, k C)."""
    assert alpha is not None
    G, B, n, T, _ = alpha.shape
    moved = alpha.reshape(G, B, n, T, drawn.count, -1).transpose(4, 5).flatten(3, 4)  # (G, B, n, T C, k)
    return d.transpose(2, 3).flatten(4) @ moved


def _back(d: Tensor, W: Tensor, layers: Layers) -> Tensor:
    """Gradients (..., T, n_out) at a stage's product, before its norm, as gradients at its input, over the larger window.

    W has the shape (*lead, n_in, n_out), with the first dimensions of d for ``lead``.
    """
    size = 2 * layers.reach + 1
    W = W[..., : W.shape[-2] - layers.behind, :].transpose(-1, -2)
    side = round(d.shape[-2] ** 0.5)
    spread = (d.flatten(W.dim() - 2, -2) @ W).view(*d.shape[:-2], side, side, size * size, -1)
    return _folded(spread, by_product=d.is_cuda)


def _folded(spread: Tensor, by_product: bool) -> Tensor:
    """What each tap of each cell adds (..., side, side, taps, C), summed up over the larger window (..., s s, C).

    by_product: as one product with ones and zeros, which is one launch on a GPU.
    """
    side, size, C = spread.shape[-3], round(spread.shape[-2] ** 0.5), spread.shape[-1]
    lead = spread.shape[:-4]
    if side == 1:
        return spread.view(*lead, size * size, C)
    if by_product:
        taps = spread.view(-1, side * side * size * size, C)
        ones = _where_taps_go(side, size, spread.dtype, spread.device)
        return torch.bmm(ones.expand(len(taps), -1, -1), taps).view(*lead, -1, C)
    out = spread.new_zeros(*lead, side + size - 1, side + size - 1, C)
    for tap in range(size * size):
        y, x = divmod(tap, size)
        out[..., y : y + side, x : x + side, :] += spread[..., tap, :]
    return out.flatten(-3, -2)


@lru_cache(maxsize=32)
def _where_taps_go(side: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(s s, cells taps) of ones and zeros: which of the larger window's cells each tap of each cell belongs to; one product instead of many sums.

    >>> _where_taps_go(2, 3, torch.float32, torch.device("cpu")).sum(1).view(4, 4)
    tensor([[1., 2., 2., 1.],
            [2., 4., 4., 2.],
            [2., 4., 4., 2.],
            [1., 2., 2., 1.]])
    """
    larger = side + size - 1
    row = torch.arange(side).view(-1, 1, 1, 1) + torch.arange(size).view(1, 1, -1, 1)
    column = torch.arange(side).view(1, -1, 1, 1) + torch.arange(size).view(1, 1, 1, -1)
    goes = (row * larger + column).flatten()
    return (goes == torch.arange(larger * larger).unsqueeze(1)).to(device, dtype)
