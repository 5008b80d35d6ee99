"""An ONNX graph in the making, from a traced one: what is constant is computed here, the rest is handed to the operators."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from boxcov.errors import BoxcovError

OPSET = 17
LARGEST = (
    2**31 - 2**20
)  # bytes of a file: the limit of the format (protobuf), less what is not numbers
TYPES = {
    torch.float32: 1,
    torch.float64: 11,
    torch.int64: 7,
    torch.int32: 6,
    torch.bool: 9,
    torch.float16: 10,
    torch.uint8: 2,
}
# what has a shape and no content that matters: constants, though they are asked for by a tensor
_FILLED: dict[str, float] = {
    **dict.fromkeys(
        ("zeros_like", "new_zeros", "empty_like", "new_empty", "_new_zeros_with_same_feature_meta"),
        0,
    ),
    **dict.fromkeys(("ones_like", "new_ones"), 1),
}
_FILLING = {
    "full_like": 1,
    "fill": 1,
    "new_full": 2,
}  # the same, with the argument that it is filled with


class Builder:
    """Names of ONNX for the values of a traced graph. ``op`` adds an operation, ``name`` tells what a node is called."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []
        self.size = 0  # bytes of constants so far
        self._names: dict[fx.Node, Any] = {}
        self._constants: dict[fx.Node, Any] = {}
        self._held: dict[Any, str] = {}  # names of constants that are in the graph
        self._kept: list[Tensor] = []  # so that an address is not given out twice

    # what operators use

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """A node of ONNX with one output, by its name."""
        return self.several(1, kind, *inputs, **attributes)[0]

    def several(self, count: int, kind: str, *inputs: str, **attributes: Any) -> list[str]:
        """A node of ONNX with ``count`` outputs."""
        from onnx import helper

        names = [f"v{len(self.nodes)}_{i}" for i in range(count)]
        self.nodes.append(
            helper.make_node(
                kind, list(inputs), names, name=f"{kind}_{len(self.nodes)}", **attributes
            )
        )
        return names

    def constant(self, value: Tensor) -> str:
        """The name of a tensor that does not depend on the inputs; the same tensor is kept once."""
        from onnx import numpy_helper

        value = value.detach()
        small = value.numel() <= 16
        key = (
            value.dtype,
            tuple(value.shape),
            tuple(value.flatten().tolist()) if small else (value.data_ptr(), value.stride()),
        )
        if key not in self._held and not small and bool((value == value.flatten()[0]).all()):
            self._held[key] = self.op(
                "Expand", self.constant(value.flatten()[:1]), self.numbers(*value.shape)
            )  # one number says it
            self._kept.append(value)
        elif key not in self._held:
            name = f"c{len(self._held)}"
            self.initializers.append(
                numpy_helper.from_array(value.cpu().contiguous().numpy(), name)
            )
            self._held[key] = name
            self._kept.append(value)
            self.size += value.numel() * value.element_size()
            if self.size > LARGEST:
                raise BoxcovError(
                    f"the graph holds more than {LARGEST / 2**30:.1f} GiB of constants, the limit of one ONNX file: take fewer samples, or a "
                    "posterior of fewer layers (--depth head)"
                )
        return self._held[key]

    def numbers(self, *values: int) -> str:
        """A list of whole numbers: a shape, axes, indices."""
        return self.constant(torch.tensor(values, dtype=torch.long))

    def scalar(self, value: float, dtype: torch.dtype) -> str:
        return self.constant(torch.tensor(value, dtype=dtype))

    def name(self, value: Any, dtype: torch.dtype | None = None) -> str:
        """What a node is called, as numbers of ``dtype``; a plain number becomes a constant."""
        if not isinstance(value, fx.Node):
            assert dtype is not None
            return self.scalar(value, dtype)
        if value in self._constants:
            known: Tensor = self._constants[value]
            return self.constant(known if dtype is None else known.to(dtype))
        found: str = self._names[value]
        return (
            found
            if dtype is None or dtype == self.dtype(value)
            else self.op("Cast", found, to=TYPES[dtype])
        )

    def dtype(self, node: fx.Node) -> torch.dtype:
        return self.value(node).dtype

    def shape(self, node: fx.Node) -> list[int]:
        return list(self.value(node).shape)

    def value(self, node: fx.Node) -> Tensor:
        """A tensor of the shape and type of a node, not of its content."""
        found = self._constants.get(node, node.meta.get("val"))
        assert isinstance(found, Tensor)
        return found

    def known(self, node: Any) -> Tensor | None:
        """The content of a node that does not depend on the inputs."""
        return self._constants.get(node)

    # the walk over the traced graph

    def add(
        self, graph: fx.GraphModule, operators: dict[str, Callable[..., Any]], inputs: Sequence[str]
    ) -> list[str]:
        """All of ``graph``, its inputs under these names; gives the names of its outputs."""
        given = iter(inputs)
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                self._names[node] = next(given)
            elif node.op == "get_attr":
                self._constants[node] = operator.attrgetter(node.target)(graph)
            elif node.op == "call_function":
                self._call(node, operators)
            elif node.op == "output":
                return [self.op("Identity", self.name(out)) for out in node.args[0]]
        raise AssertionError("a graph without outputs")

    def used(self, outputs: Sequence[str]) -> tuple[list[Any], list[Any]]:
        """The nodes and constants that the outputs depend on."""
        needed = set(outputs)
        nodes = []
        for node in reversed(self.nodes):
            if needed.intersection(node.output):
                needed.update(node.input)
                nodes.append(node)
        return nodes[::-1], [held for held in self.initializers if held.name in needed]

    def _call(self, node: fx.Node, operators: dict[str, Callable[..., Any]]) -> None:
        if all(arg in self._constants for arg in node.all_input_nodes):
            args, kwargs = fx.map_arg((node.args, node.kwargs), self._constants.__getitem__)
            self._constants[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            return
        if node.target is operator.getitem:
            self._names[node] = self._names[node.args[0]][node.args[1]]  # type: ignore[index]
            return
        kind = str(node.target).removeprefix("aten.").split(".")[0]
        filled = node.args[_FILLING[kind]] if kind in _FILLING else _FILLED.get(kind)
        if isinstance(filled, (int, float)):
            like = self.value(node)
            self._constants[node] = torch.full(like.shape, filled, dtype=like.dtype)
            return
        if kind not in operators:
            raise BoxcovError(
                f"the detector, or its derivative, uses {node.target}, which boxcov cannot write to ONNX"
            )
        self._names[node] = operators[kind](self, node, *node.args, **node.kwargs)
