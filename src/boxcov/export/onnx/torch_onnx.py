"""Lower a traced graph to an ONNX model with ``torch.onnx``, without what it stores twice."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import decomposition_table

from boxcov.errors import BoxcovError
from boxcov.version import __version__

OPSET = 18
IR_VERSION = 8  # the oldest with this opset; older runtimes refuse newer ones
LARGEST = 2**31 - 2**20  # bytes of constants: protobuf's limit for one file, less the nodes
_FOLDED_SIZE = 1024  # elements; folding larger results makes the file larger than the nodes do


def build_model(
    graph: fx.GraphModule,
    inputs: Mapping[str, Tensor],
    names: Sequence[str],
    metadata: Mapping[str, str],
) -> bytes:
    """Return the content of an ONNX file that computes ``graph``.

    inputs: examples by name. names: of the outputs. metadata: the custom properties of the file.
    """
    import onnx_ir
    from onnx import checker

    with _quiet():
        model: Any = _lower(graph, inputs, names)
        _simplify(model)
    if sum(value.const_value.nbytes for value in model.graph.initializers.values()) > LARGEST:
        raise BoxcovError(
            f"the graph holds more than {LARGEST / 2**30:.1f} GiB of constants, the limit of one "
            "ONNX file: take fewer samples, or a posterior of fewer layers (--depth head)"
        )
    model.ir_version = IR_VERSION
    model.producer_name, model.producer_version = "boxcov", __version__
    model.graph.name = "boxcov"
    model.metadata_props.update(metadata)
    proto = onnx_ir.to_proto(model)
    checker.check_model(proto)
    return proto.SerializeToString()


def missing_operators(graph: fx.GraphModule) -> list[str]:
    """Return the names of the operators that ``torch.onnx`` lacks, if it cannot write a graph.

    Operators that write in place, or allocate, are replaced by ``torch.export``.
    """
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    targets = {node.target for node in graph.graph.nodes if node.op == "call_function"}
    with _quiet():
        registry = ONNXRegistry.from_torchlib(opset_version=OPSET)
    decomposed = {*torch.export.default_decompositions(), *decomposition_table}
    return sorted(
        str(target)
        for target in targets
        if isinstance(target, torch._ops.OpOverload)
        and target not in decomposed
        and not target._schema.is_mutable
        and "empty" not in str(target)
        and not registry.is_registered(target)
    )


def _lower(graph: fx.GraphModule, inputs: Mapping[str, Tensor], names: Sequence[str]) -> Any:
    """Return the graph as a model of ``onnx_ir``, not optimized."""
    examples = tuple(inputs.values())
    try:
        program = torch.onnx.export(
            torch.export.export(graph, examples, strict=False),
            examples,
            dynamo=True,
            opset_version=OPSET,
            input_names=list(inputs),
            output_names=list(names),
            optimize=False,
            verbose=False,
        )
    except RuntimeError as error:  # of torch.export, or an OnnxExporterError
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        missing = ", ".join(missing_operators(graph))
        reason = f"it has no version of {missing}" if missing else str(cause).strip().split("\n")[0]
        raise BoxcovError(
            f"torch.onnx cannot write the detector or its derivative to ONNX: {reason}"
        ) from error
    assert program is not None
    return program.model


def _simplify(model: Any) -> None:
    """Fold constants and remove what is unused or stored twice, in place.

    ``onnxscript.optimizer.optimize`` also rewrites patterns of nodes, which took 70 of the 117 s
    of an export; onnxruntime does that when it loads the file.
    """
    from onnx_ir.passes import common
    from onnxscript import optimizer

    clear = common.ClearMetadataAndDocStringPass()  # stack traces: half of the bytes
    clear(model)
    common.InlinePass()(model)
    for _ in range(2):  # folded shapes make more constants
        optimizer.fold_constants_ir(
            model,
            onnx_shape_inference=True,
            input_size_limit=_FOLDED_SIZE,
            output_size_limit=_FOLDED_SIZE,
        )
        common.RemoveUnusedNodesPass()(model)
    for simplify in (
        common.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]
        common.RemoveUnusedOpsetsPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.LiftSubgraphInitializersToMainGraphPass(),
        common.DeduplicateInitializersPass(size_limit=LARGEST),
        common.CommonSubexpressionEliminationPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
        clear,
    ):
        simplify(model)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the warnings of the exporter: the file is compared with PyTorch instead."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)
