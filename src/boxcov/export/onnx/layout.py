"""How torch's operations on the layout of tensors are said in ONNX: views, slices, indices, sums over dimensions, ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from boxcov.errors import BoxcovError
from boxcov.export.onnx.builder import TYPES, Builder


def _same(b: Builder, node: fx.Node, x: Any, *rest: Any, **kwargs: Any) -> str:
    return b.name(x)


def _cast(b: Builder, node: fx.Node, x: Any, *rest: Any, **kwargs: Any) -> str:
    return b.name(x, b.dtype(node))


def _view(b: Builder, node: fx.Node, x: Any, *rest: Any) -> str:
    """Whatever keeps the order of the numbers: views, squeezes, unsqueezes."""
    return b.op("Reshape", b.name(x), b.numbers(*b.shape(node)))


def _expand(b: Builder, node: fx.Node, x: Any, *rest: Any, **kwargs: Any) -> str:
    return b.op("Expand", b.name(x), b.numbers(*b.shape(node)))


def _copy(b: Builder, node: fx.Node, x: Any, source: Any, *rest: Any) -> str:
    return b.op("Expand", b.name(source, b.dtype(node)), b.numbers(*b.shape(node)))


def _permute(b: Builder, node: fx.Node, x: Any, order: Any) -> str:
    return b.op("Transpose", b.name(x), perm=[d % len(order) for d in order])


def _transpose(b: Builder, node: fx.Node, x: Any, first: int = 0, second: int = 1) -> str:
    order = list(range(len(b.shape(x))))
    order[first], order[second] = order[second], order[first]
    return b.op("Transpose", b.name(x), perm=order)


def _cat(b: Builder, node: fx.Node, parts: Any, dim: int = 0) -> str:
    full = [part for part in parts if b.value(part).numel()] or [parts[0]]
    return b.op(
        "Concat", *(b.name(part, b.dtype(node)) for part in full), axis=dim % len(b.shape(node))
    )


def _stack(b: Builder, node: fx.Node, parts: Any, dim: int = 0) -> str:
    axis = dim % len(b.shape(node))
    shape = b.shape(node)
    shape[axis] = 1
    views = [b.op("Reshape", b.name(part, b.dtype(node)), b.numbers(*shape)) for part in parts]
    return b.op("Concat", *views, axis=axis)


def _bounds(start: int | None, end: int | None, size: int) -> tuple[int, int]:
    """As Python cuts a list."""
    low, high, _ = slice(start, end).indices(size)
    return low, max(low, high)


def _slice(
    b: Builder,
    node: fx.Node,
    x: Any,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> str:
    axis = dim % len(b.shape(x))
    low, high = _bounds(start, end, b.shape(x)[axis])
    if (low, high, step) == (0, b.shape(x)[axis], 1):
        return b.name(x)
    return _cut(b, b.name(x), axis, low, high, step)


def _cut(b: Builder, name: str, axis: int, low: int, high: int, step: int = 1) -> str:
    return b.op("Slice", name, b.numbers(low), b.numbers(high), b.numbers(axis), b.numbers(step))


def _flip(b: Builder, node: fx.Node, x: Any, dims: Any) -> str:
    name = b.name(x)
    for axis in _axes(b, x, dims):
        name = _cut(b, name, axis, -1, -(2**31), -1)
    return name


def _slice_scatter(
    b: Builder,
    node: fx.Node,
    x: Any,
    source: Any,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> str:
    axis = dim % len(b.shape(x))
    size = b.shape(x)[axis]
    low, high = _bounds(start, end, size)
    if step != 1:
        raise BoxcovError("writing to every other row cannot be written to ONNX")
    dtype = b.dtype(node)
    name = b.name(x, dtype)
    before = [_cut(b, name, axis, 0, low)] if low else []
    after = [_cut(b, name, axis, high, size)] if high < size else []
    return (
        b.op("Concat", *before, b.name(source, dtype), *after, axis=axis)
        if before or after
        else b.name(source, dtype)
    )


def _select(b: Builder, node: fx.Node, x: Any, dim: int, index: int) -> str:
    axis = dim % len(b.shape(x))
    return b.op("Gather", b.name(x), b.scalar(index % b.shape(x)[axis], torch.long), axis=axis)


def _select_scatter(b: Builder, node: fx.Node, x: Any, source: Any, dim: int, index: int) -> str:
    shape = b.shape(x)
    axis = dim % len(shape)
    at = index % shape[axis]
    row = [1 if d == axis else n for d, n in enumerate(shape)]
    dtype = b.dtype(node)
    name, middle = b.name(x, dtype), b.op("Reshape", b.name(source, dtype), b.numbers(*row))
    before = [_cut(b, name, axis, 0, at)] if at else []
    after = [_cut(b, name, axis, at + 1, shape[axis])] if at + 1 < shape[axis] else []
    return b.op("Concat", *before, middle, *after, axis=axis)


def _split(b: Builder, node: fx.Node, x: Any, sizes: Any, dim: int = 0) -> list[str]:
    axis, total = dim % len(b.shape(x)), b.shape(x)[dim]
    each = (
        list(sizes)
        if isinstance(sizes, (list, tuple))
        else [min(sizes, total - i) for i in range(0, total, sizes)]
    )
    name, starts = b.name(x), [sum(each[:i]) for i in range(len(each))]
    return [_cut(b, name, axis, low, low + n) for low, n in zip(starts, each)]


def _unbind(b: Builder, node: fx.Node, x: Any, dim: int = 0) -> list[str]:
    axis, name = dim % len(b.shape(x)), b.name(x)
    return [
        b.op("Gather", name, b.scalar(i, torch.long), axis=axis) for i in range(b.shape(x)[axis])
    ]


def _unfold(b: Builder, node: fx.Node, x: Any, dim: int, size: int, step: int) -> str:
    shape = b.shape(x)
    axis = dim % len(shape)
    windows = torch.arange(shape[axis]).unfold(0, size, step)  # (n, size)
    found = b.op("Gather", b.name(x), b.constant(windows.contiguous()), axis=axis)
    order = [*range(axis + 1), *range(axis + 2, len(shape) + 1), axis + 1]
    return b.op("Transpose", found, perm=order)


def _diagonal(
    b: Builder, node: fx.Node, x: Any, offset: int = 0, first: int = 0, second: int = 1
) -> str:
    shape = b.shape(x)
    rows, columns = first % len(shape), second % len(shape)
    rest = [d for d in range(len(shape)) if d not in (rows, columns)]
    name = b.op("Transpose", b.name(x), perm=[*rest, rows, columns])
    name = b.op("Reshape", name, b.numbers(*(shape[d] for d in rest), shape[rows] * shape[columns]))
    places = (
        torch.arange(shape[rows] * shape[columns])
        .view(shape[rows], shape[columns])
        .diagonal(offset)
    )
    return b.op("Gather", name, b.constant(places.contiguous()), axis=len(rest))


def _pad(b: Builder, node: fx.Node, x: Any, sides: Any, value: float = 0) -> str:
    pairs = list(zip(sides[::2], sides[1::2]))[::-1]  # torch begins with the last dimension
    none = [(0, 0)] * (len(b.shape(x)) - len(pairs))
    low, high = zip(*(none + pairs))
    return b.op("Pad", b.name(x), b.numbers(*low, *high), b.scalar(value, b.dtype(x)))


# by index


def _index(b: Builder, node: fx.Node, x: Any, indices: Any) -> str:
    """Several dimensions by tensors that belong together: those dimensions become one, and so do the tensors."""
    shape = b.shape(x)
    dims = [d for d, index in enumerate(indices) if index is not None]
    if any(b.dtype(indices[d]) == torch.bool for d in dims):
        raise BoxcovError(
            "a choice of rows by a mask has no fixed shape and cannot be written to ONNX: use torch.where"
        )
    name = b.name(x)
    adjacent = dims == list(range(dims[0], dims[-1] + 1))
    if not adjacent:  # the chosen dimensions go first, as torch has it
        rest = [d for d in range(len(shape)) if d not in dims]
        name = b.op("Transpose", name, perm=[*dims, *rest])
        shape = [shape[d] for d in (*dims, *rest)]
    first, count = (dims[0] if adjacent else 0), len(dims)
    sizes = shape[first : first + count]
    merged = [*shape[:first], torch.Size(sizes).numel(), *shape[first + count :]]
    if count > 1:
        name = b.op("Reshape", name, b.numbers(*merged))
    return b.op("Gather", name, _flat(b, [indices[d] for d in dims], sizes), axis=first)


def _flat(b: Builder, indices: list[fx.Node], sizes: list[int]) -> str:
    """Several indices as one, over dimensions of these sizes in one; negative ones counted from the end."""
    steps = [torch.Size(sizes[i + 1 :]).numel() for i in range(len(sizes))]
    total: str | None = None
    for index, size, step in zip(indices, sizes, steps):
        known = b.known(index)
        if known is not None:
            part = b.constant(known.long() % size * step)
        else:
            part = b.op(
                "Mod", b.op("Add", b.name(index, torch.long), b.numbers(size)), b.numbers(size)
            )
            part = part if step == 1 else b.op("Mul", part, b.numbers(step))
        total = part if total is None else b.op("Add", total, part)
    assert total is not None
    return total


def _index_put(
    b: Builder, node: fx.Node, x: Any, indices: Any, values: Any, accumulate: bool = False
) -> str:
    """Only where the places are known: as numbers of the flat tensor."""
    known = [None if index is None else b.known(index) for index in indices]
    if any(index is not None and place is None for index, place in zip(indices, known)):
        raise BoxcovError(
            "writing to places that depend on the inputs (x[index] = y) cannot be written to ONNX: use scatter or gather"
        )
    shape = b.shape(x)
    places = torch.arange(b.value(x).numel()).view(shape)
    places = places[tuple(slice(None) if place is None else place for place in known)]
    dtype = b.dtype(node)
    source = b.op("Expand", b.name(values, dtype), b.numbers(*places.shape))
    flat = [b.op("Reshape", name, b.numbers(-1)) for name in (b.name(x, dtype), source)]
    out = b.op(
        "ScatterElements",
        flat[0],
        b.constant(places.flatten().contiguous()),
        flat[1],
        axis=0,
        reduction="add" if accumulate else "none",
    )
    return b.op("Reshape", out, b.numbers(*shape))


def _index_select(b: Builder, node: fx.Node, x: Any, dim: int, index: Any) -> str:
    return b.op("Gather", b.name(x), b.name(index, torch.long), axis=dim % len(b.shape(x)))


def _gather(b: Builder, node: fx.Node, x: Any, dim: int, index: Any, **kwargs: Any) -> str:
    return b.op("GatherElements", b.name(x), b.name(index, torch.long), axis=dim % len(b.shape(x)))


def _scatter(
    b: Builder, node: fx.Node, x: Any, dim: int, index: Any, source: Any, reduction: str = "none"
) -> str:
    dtype = b.dtype(node)
    values = b.name(source, dtype)
    if not isinstance(source, fx.Node):
        values = b.op("Expand", values, b.numbers(*b.shape(index)))
    about = {"axis": dim % len(b.shape(x)), "reduction": reduction}
    return b.op("ScatterElements", b.name(x, dtype), b.name(index, torch.long), values, **about)


def _scatter_add(b: Builder, node: fx.Node, x: Any, dim: int, index: Any, source: Any) -> str:
    return _scatter(b, node, x, dim, index, source, "add")


# over dimensions


def _axes(b: Builder, x: Any, dims: Any) -> list[int]:
    rank = len(b.shape(x))
    chosen = [dims] if isinstance(dims, int) else list(dims) if dims else list(range(rank))
    return [d % rank for d in chosen]


def _sum(
    b: Builder, node: fx.Node, x: Any, dims: Any = None, keep: bool = False, **kwargs: Any
) -> str:
    return b.op(
        "ReduceSum", b.name(x, b.dtype(node)), b.numbers(*_axes(b, x, dims)), keepdims=int(keep)
    )


def _reduced(kind: str) -> Callable[..., str]:
    def run(
        b: Builder, node: fx.Node, x: Any, dims: Any = None, keep: bool = False, **kwargs: Any
    ) -> str:
        return b.op(kind, b.name(x, b.dtype(node)), axes=_axes(b, x, dims), keepdims=int(keep))

    return run


def _norm(
    b: Builder,
    node: fx.Node,
    x: Any,
    order: float = 2,
    dims: Any = None,
    keep: bool = False,
    **kwargs: Any,
) -> str:
    if order != 2:
        raise BoxcovError(f"a norm of order {order} cannot be written to ONNX")
    return b.op("ReduceL2", b.name(x, b.dtype(node)), axes=_axes(b, x, dims), keepdims=int(keep))


def _counted(kind: str) -> Callable[..., str]:
    """any and all, by the largest and smallest of 0 and 1."""

    def run(b: Builder, node: fx.Node, x: Any, dims: Any = None, keep: bool = False) -> str:
        least = b.op(
            kind,
            b.op("Cast", b.name(x, torch.bool), to=TYPES[torch.int32]),
            axes=_axes(b, x, dims),
            keepdims=int(keep),
        )
        return b.op("Cast", least, to=TYPES[torch.bool])

    return run


def _max_along(b: Builder, node: fx.Node, x: Any, dim: int, keep: bool = False) -> list[str]:
    axis = dim % len(b.shape(x))
    return [
        b.op("ReduceMax", b.name(x), axes=[axis], keepdims=int(keep)),
        b.op("ArgMax", b.name(x), axis=axis, keepdims=int(keep)),
    ]


def _argmax(b: Builder, node: fx.Node, x: Any, dim: int | None = None, keep: bool = False) -> str:
    name = b.name(x) if dim is not None else b.op("Reshape", b.name(x), b.numbers(-1))
    return b.op(
        "ArgMax",
        name,
        axis=0 if dim is None else dim % len(b.shape(x)),
        keepdims=int(keep and dim is not None),
    )


def _cumsum(b: Builder, node: fx.Node, x: Any, dim: int, **kwargs: Any) -> str:
    return b.op("CumSum", b.name(x, b.dtype(node)), b.scalar(dim % len(b.shape(x)), torch.long))


def _topk(
    b: Builder,
    node: fx.Node,
    x: Any,
    k: int,
    dim: int = -1,
    largest: bool = True,
    ordered: bool = True,
) -> Any:
    return b.several(
        2,
        "TopK",
        b.name(x),
        b.numbers(k),
        axis=dim % len(b.shape(x)),
        largest=int(largest),
        sorted=int(ordered),
    )


LAYOUT: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("clone", "alias", "detach", "lift_fresh_copy", "contiguous"), _same),
    **dict.fromkeys(("_to_copy", "to"), _cast),
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze"), _view),
    "expand": _expand,
    "copy": _copy,
    "fill": _copy,
    "permute": _permute,
    "transpose": _transpose,
    "t": _transpose,
    "cat": _cat,
    "stack": _stack,
    "slice": _slice,
    "flip": _flip,
    "slice_scatter": _slice_scatter,
    "select": _select,
    "select_scatter": _select_scatter,
    **dict.fromkeys(("split", "split_with_sizes"), _split),
    "unbind": _unbind,
    "unfold": _unfold,
    "diagonal": _diagonal,
    "constant_pad_nd": _pad,
    "index": _index,
    "index_put": _index_put,
    "index_select": _index_select,
    "gather": _gather,
    "scatter": _scatter,
    "scatter_add": _scatter_add,
    "sum": _sum,
    "mean": _reduced("ReduceMean"),
    "amax": _reduced("ReduceMax"),
    "amin": _reduced("ReduceMin"),
    "prod": _reduced("ReduceProd"),
    "linalg_vector_norm": _norm,
    "any": _counted("ReduceMax"),
    "all": _counted("ReduceMin"),
    "max": _max_along,
    "argmax": _argmax,
    "cumsum": _cumsum,
    "topk": _topk,
}
