"""A function of tensors as a flat graph of plain operations: derivatives taken, nothing done in place, every shape a number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import core_aten_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

_KEPT = (
    "native_batch_norm",
    "_native_batch_norm_legit_no_training",
    "upsample_nearest2d",
    "silu",
)  # better told whole than in pieces


def traced(run: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> fx.GraphModule:
    """What ``run`` does to tensors of these shapes, as a graph without derivatives, writes in place or loops.

    The function must not look at numbers: the graph holds what it did with these inputs. ``jvp``, ``vmap`` and ``autograd.grad`` inside are
    written out.

    >>> graph = traced(lambda x: (torch.func.jvp(torch.sin, (x,), (torch.ones(3),))[1],), torch.zeros(3))
    >>> bool((graph(torch.zeros(3))[0] == 1).all())
    True
    """
    table = {
        op: way
        for op, way in core_aten_decompositions().items()
        if str(op).split(".")[1] not in _KEPT
    }
    with torch.no_grad():
        plain: Any = make_fx(run, tracing_mode="real", _allow_non_fake_inputs=True)(*inputs)
        once = torch.func.functionalize(plain, remove="mutations")
        graph: fx.GraphModule = make_fx(
            once, table, tracing_mode="real", _allow_non_fake_inputs=True
        )(*inputs)
    graph.graph.eliminate_dead_code()
    return graph
