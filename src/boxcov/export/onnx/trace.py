"""Trace a function of tensors to a flat graph of basic operations with fixed shapes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from math import pi
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import core_aten_decompositions
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from boxcov.errors import BoxcovError

# ONNX has one operator for each of these, so they are not decomposed.
_NORMS = ("native_batch_norm", "_native_batch_norm_legit_no_training")
_WHOLE = (*_NORMS, "upsample_nearest2d", "silu")
# These use a shape, not values: the result is zero (also of ``empty``), one or an argument.
_FILL_VALUE: dict[str, float] = {
    **dict.fromkeys(("zeros_like", "new_zeros", "_new_zeros_with_same_feature_meta"), 0),
    **dict.fromkeys(("empty", "empty_like", "empty_permuted", "empty_strided"), 0),
    **dict.fromkeys(("new_empty", "new_empty_strided"), 0),
    **dict.fromkeys(("ones_like", "new_ones"), 1),
}
_FILL_ARGUMENT = {"full_like": 1, "fill": 1, "new_full": 2}


def trace(
    run: Callable[..., tuple[Tensor, ...]], *inputs: Tensor, may_read: bool = False
) -> fx.GraphModule:
    """Return what ``run`` does to tensors of these shapes, as a graph without writes in place.

    Derivatives and loops inside (``jvp``, ``vmap``, ``autograd.grad``) are written out, constants
    are computed. may_read: where ``run`` reads values, the graph holds those of these inputs;
    otherwise that is an error.
    """
    options: Any = {"tracing_mode": "real", "_allow_non_fake_inputs": True}
    options["_error_on_data_dependent_ops"] = not may_read
    # one mode for the shapes of all nodes: without it make_fx builds one for each
    with torch.no_grad(), tracing(TracingContext(FakeTensorMode())):
        plain: Any = make_fx(run, **options)(*inputs)
        functional = torch.func.functionalize(plain, remove="mutations")
        graph: fx.GraphModule = make_fx(functional, DECOMPOSITIONS, **options)(*inputs)
        graph.graph.eliminate_dead_code()
        _fold_constants(graph)
    return graph


def _convolution_backward(
    grad: Tensor, inputs: Tensor, weight: Tensor, bias_sizes: Any, *options: Any
) -> tuple[Tensor | None, ...]:
    """Return the gradient of the inputs of a convolution: one transposed, or not transposed."""
    stride, padding, dilation, transposed, _, groups, wanted = options
    convolve = torch.ops.aten.convolution
    if wanted[1] or wanted[2]:
        raise BoxcovError("the gradient of a convolution's weights cannot be written to ONNX")
    if transposed:
        none = [0] * len(stride)
        gradient = convolve(grad, weight, None, stride, padding, dilation, False, none, groups)
        return gradient, None, None
    sizes = zip(inputs.shape[2:], grad.shape[2:], weight.shape[2:], stride, padding, dilation)
    rest = [  # of the inputs, which the transposed convolution does not cover
        size - ((out - 1) * step - 2 * pad + spacing * (kernel - 1) + 1)
        for size, out, kernel, step, pad, spacing in sizes
    ]
    out = convolve(grad, weight, None, stride, padding, dilation, True, rest, groups)
    return out, None, None


def _atan2(y: Tensor, x: Tensor) -> Tensor:
    """Return the angle; that of ``torch.onnx`` is off by 2 pi at y = 0, x < 0."""
    slope = (y / torch.where(x == 0, 1, x)).atan()
    half_turn = torch.where(y < 0, -pi, pi)
    angle = torch.where(x < 0, slope + half_turn, slope)
    return torch.where(x == 0, y.sign() * (pi / 2), angle)


def _copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Return the source in the shape of ``x``; ``torch.onnx`` does not expand it."""
    return source.to(x.dtype).expand(x.shape)


def _slice_scatter(
    x: Tensor,
    source: Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Any:
    """Return ``x`` with a slice replaced, by concatenation.

    ``torch.onnx`` transposes ``x`` and scatters row by row, which took a third of a frame.
    """
    if step != 1:
        return NotImplemented
    size = x.shape[dim]
    first, last, _ = slice(start, end).indices(size)
    before, after = x.narrow(dim, 0, first), x.narrow(dim, last, size - last)
    return torch.cat([part for part in (before, source, after) if part.shape[dim]], dim)


def _select_scatter(x: Tensor, source: Tensor, dim: int, index: int) -> Any:
    """Return ``x`` with one entry along ``dim`` replaced."""
    index %= x.shape[dim]
    return _slice_scatter(x, source.unsqueeze(dim), dim, index, index + 1)


# torch.onnx decomposes, too, but only part of this table: silu_backward would be missing. The last
# five are what it writes falsely, slowly or not at all.
DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    **{
        op: way
        for op, way in core_aten_decompositions().items()
        if str(op).split(".")[1] not in _WHOLE
    },
    torch.ops.aten.convolution_backward.default: _convolution_backward,
    torch.ops.aten.atan2.default: _atan2,
    torch.ops.aten.copy.default: _copy,
    torch.ops.aten.slice_scatter.default: _slice_scatter,
    torch.ops.aten.select_scatter.default: _select_scatter,
}


def _fold_constants(module: fx.GraphModule) -> None:
    """Replace what does not depend on the inputs by its value, in place."""
    graph, values = module.graph, _constants(module)
    for number, (node, value) in enumerate(values.items()):
        if isinstance(value, Tensor) and any(user not in values for user in node.users):
            with graph.inserting_before(node):
                new = _constant_node(module, f"_constant{number}", value)
            node.replace_all_uses_with(new, delete_user_cb=lambda user: user not in values)
    graph.eliminate_dead_code()
    module.delete_all_unused_submodules()
    module.recompile()


def _constants(module: fx.GraphModule) -> dict[fx.Node, Any]:
    """Return the value of every node that does not depend on the inputs."""
    values: dict[fx.Node, Any] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            values[node] = operator.attrgetter(node.target)(module)
        elif node.op == "call_function":
            fill = _fill_value(node)
            if fill is not None:  # first: empty() would put uninitialised memory into the file
                like = node.meta["val"]
                values[node] = torch.full(like.shape, fill, dtype=like.dtype)
            elif all(arg in values for arg in node.all_input_nodes):
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
    return values


def _fill_value(node: fx.Node) -> float | None:
    """Return the value that ``node`` fills a tensor with, or None if it does something else."""
    kind = str(node.target).removeprefix("aten.").split(".")[0]
    position = _FILL_ARGUMENT.get(kind)
    fill = _FILL_VALUE.get(kind) if position is None else node.args[position]
    return fill if isinstance(fill, (int, float)) else None


def _constant_node(module: fx.GraphModule, name: str, value: Tensor) -> fx.Node:
    """Add a constant to the graph; along repeated dimensions it is stored once."""
    if value.numel() > 1 and bool((value == value.flatten()[0]).all()):
        value = value.flatten()[0].expand(value.shape)
    stored = value
    for dim, step in enumerate(value.stride()):
        stored = stored.narrow(dim, 0, 1) if step == 0 and value.shape[dim] > 1 else stored
    module.register_buffer(name, stored.detach().contiguous())
    node = module.graph.get_attr(name)
    node.meta["val"] = stored
    if stored.shape != value.shape:
        node = module.graph.call_function(torch.ops.aten.expand.default, (node, list(value.shape)))
        node.meta["val"] = value
    return node
