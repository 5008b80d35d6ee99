"""Engine: the covariance of the head's layers with the instance as the batch dimension.

``Detector.instances`` runs the head once with every instance as one item of the batch. D backward
passes, batched, then give the gradients of all instances at every layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_map_only

from boxcov._torch.layers import LayerCall, columns, rows
from boxcov._torch.modules import LayerCallMode
from boxcov._torch.process_state import at_least_float32
from boxcov.detector import Detector, InstanceGroup
from boxcov.errors import BoxcovError
from boxcov.posterior.kronecker_block import layer_covariance
from boxcov.posterior.posterior import Posterior
from boxcov.predict.linearize import LinearizationPoint, LinearizedDetector, field_gradients

LayerUses = dict[str, list[tuple[LayerCall, GradientEdge]]]
"""By weight, the layer calls that used it, and where the gradient enters each."""


@dataclass(frozen=True)
class InstanceRun:
    """One group of instances after its forward pass."""

    index: Tensor  # (g,) rows of the frame's boxes
    z: Tensor  # (g, D), with the logit (g, D + 1)
    uses: LayerUses


class InstanceEngine:
    """Covariances of boxes from the layers that ``instances()`` runs."""

    def __init__(self, linearized: LinearizedDetector, posterior: Posterior) -> None:
        self.linearized, self.posterior = linearized, posterior
        self.block_of = {block.layer.weight: name for name, block in posterior.blocks.items()}
        self._variances = {name: posterior.variances(name) for name in posterior.blocks}

    def runs(self, point: LinearizationPoint) -> list[InstanceRun]:
        """Run all groups of a frame."""
        return [self.run(*group) for group in instance_groups(with_leaves(point)) or []]

    def run(self, index: Tensor, run: Callable[[], Tensor]) -> InstanceRun:
        """Run one group, recording every use of a weight of the posterior."""
        uses: LayerUses = {}
        theta = self.linearized.variables()
        substitute = self.linearized.substitute(theta)

        def on_call(name: str, call: LayerCall) -> Tensor:
            items = call.batched_x.shape[0]
            if items != len(index):
                raise BoxcovError(
                    f"{type(self.linearized.shadow).__name__}.instances() runs {name} on {items} "
                    f"items for {len(index)} instances: every layer must see each instance as one "
                    "item of the batch"
                )
            out = substitute(name, call)
            # the edge is taken here, before anything changes the output in place
            edge = get_gradient_edge(out)
            uses.setdefault(name, []).append((replace(call, x=call.x.detach()), edge))
            return out

        with torch.enable_grad(), LayerCallMode(self.linearized.names, on_call):
            return InstanceRun(index, run(), uses)

    def covariance(self, run: InstanceRun) -> Tensor:
        """(g, D, D) of the run's numbers (g, D)."""
        g, D = run.z.shape
        total = at_least_float32(run.z.detach()).new_zeros(g, D, D)
        for name, (a, d) in self._layers(run).items():
            total += layer_covariance(a, d, self.posterior.blocks[name], self._variances[name])
        return total

    def logit_row(
        self, runs: list[InstanceRun], start: int, gradients: dict[str, Tensor]
    ) -> Tensor:
        """The logit's row (c, D + 1) of c boxes, given its gradients (c, 1, *shape) by parameter.

        runs: of the boxes of the frame, without logits; ``start`` is the first of the c.
        """
        c, D = len(next(iter(gradients.values()))), runs[0].z.shape[1]
        weighted: dict[str, Tensor] = {}  # Sigma times the gradient
        row = at_least_float32(runs[0].z.detach()).new_zeros(c, D + 1)
        for name, block in self.posterior.blocks.items():
            if block.layer.weight in gradients:
                variances = self._variances[name]
                matrix = block.layer.matrix(gradients)[:, 0].to(variances)
                weighted[name] = block.unrotate(block.rotate(matrix) * variances).to(row)
                row[:, -1] += (weighted[name] * matrix).flatten(1).sum(1)
        for run in runs:
            held = ((run.index >= start) & (run.index < start + c)).nonzero()[:, 0]
            rows = run.index[held] - start
            for name, (a, d) in self._layers(run).items():
                if name in weighted:
                    change, n_in = weighted[name][rows], a.shape[2]
                    moved = change[..., :n_in] @ a[held]  # (h, G, n_out, T)
                    if change.shape[-1] > n_in:
                        moved = moved + change[..., n_in:]  # of the bias
                    row[rows, :D] += (d[:, held] * moved).flatten(2).sum(2).T
        return row

    def _layers(self, run: InstanceRun) -> dict[str, tuple[Tensor, Tensor]]:
        """By posterior layer, inputs (g, G, n_in, T) and gradients (D, g, G, n_out, T)."""
        edges = [edge for calls in run.uses.values() for _, edge in calls]
        gradients = iter(field_gradients(run.z, edges) if edges else [])
        layers = {}
        for name, calls in run.uses.items():
            a, d = [], []
            for (call, _), gradient in zip(calls, gradients):
                if gradient is not None:
                    own = call.batched_out(at_least_float32(gradient), lead=1)
                    a.append(columns(at_least_float32(call.batched_x), call.geometry))
                    d.append(rows(own, call.geometry))
            if a:
                layers[self.block_of[name]] = torch.cat(a, 3), torch.cat(d, 4)
        return layers


def instance_groups(point: LinearizationPoint) -> list[InstanceGroup] | None:
    """The instances of a frame, group by group, each once; None if the detector cannot do that."""
    detector = point.shadow
    options = {} if point.logits is None else {"with_logit": True}
    given = detector.instances(point.raw, point.selection, **options)
    if given is None:
        return None
    found = [(index, run) for index, run in given if len(index)]
    index = torch.cat([index for index, _ in found]) if found else torch.zeros(0)
    if sorted(index.tolist()) != list(range(len(point.selection))):
        raise BoxcovError(
            f"{method_name(point)} must give each of the {len(point.selection)} instances once, "
            f"it gave {len(index)}"
        )
    return found


def with_leaves(point: LinearizationPoint) -> LinearizationPoint:
    """The same point with raw outputs that are leaves of a new autograd graph."""
    leaves = tree_map_only(
        Tensor, lambda t: t.detach().requires_grad_(t.is_floating_point()), point.raw
    )
    return replace(point, raw=leaves)


def leaves_read(z: Tensor) -> set[int]:
    """Ids of the leaves that ``z`` depends on."""
    found: set[int] = set()
    seen: set[Any] = set()
    todo: list[Any] = [z.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        todo += [following for following, _ in node.next_functions]
    return found


def method_name(point: LinearizationPoint) -> str:
    """The method of the detector that gives the instances, for messages."""
    kind = type(point.shadow)
    if kind.instances is Detector.instances:  # derived from the stages, so these are wrong
        return f"{kind.__name__}.stages()"
    return f"{kind.__name__}.instances({'' if point.logits is None else 'with_logit=True'})"
