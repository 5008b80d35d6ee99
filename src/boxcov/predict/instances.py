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
from torch.utils._pytree import tree_leaves, tree_map_only

from boxcov._torch.layers import LayerCall, at_least_float32, columns, rows, to_matrix
from boxcov._torch.modules import LayerCallMode
from boxcov.detector import Detector, InstanceGroup
from boxcov.errors import BoxcovError, join_names
from boxcov.posterior.kronecker_block import layer_covariance
from boxcov.posterior.posterior import Posterior
from boxcov.predict.linearize import LinearizationPoint, LinearizedDetector, short_way
from boxcov.predict.route import Verdict, Verification, judge_weights, rounding_tolerance

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

    def run(self, index: Tensor, run: Callable[[], Tensor]) -> InstanceRun:
        """Run one group, recording every use of a weight of the posterior."""
        uses: LayerUses = {}
        theta = {name: w.requires_grad_() for name, w in self.linearized.theta().items()}
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
            layer = block.layer
            if layer.weight in gradients:
                bias = None if layer.bias is None else gradients[layer.bias]
                variances = self._variances[name]
                matrix = to_matrix(gradients[layer.weight], bias, layer.geometry)[:, 0].to(
                    variances
                )
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
        gradients = iter(_gradients_by_field(run.z, edges) if edges else [])
        layers = {}
        for name, calls in run.uses.items():
            pairs = [(call, d) for (call, _), d in zip(calls, gradients) if d is not None]
            if pairs:
                a = [columns(at_least_float32(call.batched_x), call.geometry) for call, _ in pairs]
                d = [
                    rows(call.batched_out(at_least_float32(d), lead=1), call.geometry)
                    for call, d in pairs
                ]
                layers[self.block_of[name]] = torch.cat(a, 3), torch.cat(d, 4)
        return layers


def instance_groups(point: LinearizationPoint) -> list[InstanceGroup] | None:
    """The instances of a frame, group by group, each once; None if the detector cannot do that."""
    detector = point.linearized.shadow
    options = {} if point.logits is None else {"with_logit": True}
    given = detector.instances(point.raw, point.selection, **options)
    if given is None:
        return None
    found = [(index, run) for index, run in given if len(index)]
    index = torch.cat([index for index, _ in found]) if found else torch.zeros(0)
    if sorted(index.tolist()) != list(range(len(point.selection))):
        raise BoxcovError(
            f"{_method_name(point)} must give each of the {len(point.selection)} instances once, "
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


class InstancesCheck(Verification):
    """Verifies ``instances()`` against ``decode()``: equal boxes, equal gradients.

    Its subjects are weights, with logits and without.
    """

    def __init__(self) -> None:
        super().__init__()
        # with logits or without: for each tensor of the raw outputs, the weights it depends on
        self._upstream: dict[bool, list[set[str]]] = {}
        self._items = Verification()

    def verify(self, point: LinearizationPoint, weights: set[str]) -> bool:
        """Compare, unless that is done; False if the frame has too few boxes to decide."""
        has_logits = point.logits is not None
        subjects = {(has_logits, name) for name in weights}
        known = self._upstream.get(has_logits, [])
        if self.covers(subjects) and len(known) == len(_float_tensors(point.raw)):
            return True
        if self._compare(point) is not Verdict.AGREES:
            return False
        self.accept(subjects)
        return True

    def upstream(self, point: LinearizationPoint, read: set[int]) -> set[str]:
        """The weights upstream of those raw outputs of ``point`` that were ``read`` (by id)."""
        behind = zip(_float_tensors(point.raw), self._upstream[point.logits is not None])
        return set().union(*(names for tensor, names in behind if id(tensor) in read))

    def verify_items(self, run: InstanceRun, point: LinearizationPoint) -> None:
        """Raise unless box i depends on item i of every layer alone."""
        subjects = {(point.logits is not None, name) for name in run.uses}
        if run.uses and len(run.index) > 1 and not self._items.covers(subjects):
            check_items(run, type(point.linearized.shadow).__name__)
            self._items.accept(subjects)

    def _compare(self, point: LinearizationPoint) -> Verdict:
        """Verdict on numbers and gradients of a frame, both from the raw outputs of one pass.

        In another precision than the plain pass those are not exactly the point's.
        """
        linearized = point.linearized
        with torch.enable_grad():
            theta = {name: w.requires_grad_() for name, w in linearized.theta().items()}
            on_call = linearized.substitute(theta)
            raw, decoded = point.raw_and_z_by(on_call)
            behind = [_weights_behind(tensor, theta) for tensor in _float_tensors(raw)]
            self._upstream[point.logits is not None] = behind
            own = with_leaves(replace(point, raw=raw))
            z = torch.zeros_like(decoded)
            boxes: dict[str, int] = {}

            def count_boxes(name: str, call: LayerCall) -> Tensor:
                boxes[name] = boxes.get(name, 0) + call.batched_x.shape[0]
                return on_call(name, call)

            with LayerCallMode(linearized.names, count_boxes):
                for index, run in instance_groups(own) or []:
                    z = z.index_copy(0, index, run())
            probe = torch.linspace(-1, 1, z.numel(), device=z.device).cos().reshape(z.shape)
            gradients = [
                _gradients((numbers * probe.to(numbers.dtype)).sum(), list(theta.values()))
                for numbers in (decoded, z)
            ]
        # the gradient of a weight upstream of what instances() reads does not pass the instances
        upstream = self.upstream(own, leaves_read(z))
        errors = {
            name: _gradient_error(whole, by_instance)
            for name, whole, by_instance in zip(theta, *gradients)
            if name not in upstream
        }
        _check_numbers(point, z.detach(), decoded.detach())
        # a weight that instances() does not use matters to any of the boxes
        return _judge_gradients(point, errors, {n: boxes.get(n, len(z)) for n in errors})


def _check_numbers(point: LinearizationPoint, z: Tensor, decoded: Tensor) -> None:
    """Raise unless the numbers (m, D) by instance are those by ``decode()``."""
    tolerance = rounding_tolerance(point.linearized.weights.values())
    delta = short_way(z - decoded, point.linearized.shadow).abs()
    errors = (delta / (1 + decoded.abs())).amax(1)
    if not bool((errors <= tolerance).all()):  # values have no kinks: every box must agree
        row = int(errors.argmax())
        raise BoxcovError(
            f"{_method_name(point)} gives box {row} as {z[row].tolist()}, {_oracle(point)} gives "
            f"{decoded[row].tolist()}"
        )


def _judge_gradients(
    point: LinearizationPoint, errors: dict[str, float], boxes: dict[str, int]
) -> Verdict:
    """Verdict on the gradients of each weight, summed over ``boxes``."""
    tolerance = rounding_tolerance(point.linearized.weights.values())
    verdict = judge_weights(errors, boxes, tolerance)
    if verdict is Verdict.CONTRADICTS:
        wrong = [name for name, error in errors.items() if not error <= tolerance]
        raise BoxcovError(
            f"{_method_name(point)} gives other gradients than {_oracle(point)} for "
            f"{join_names(wrong)}: is its crop too small, or its border off?"
        )
    return verdict


def _oracle(point: LinearizationPoint) -> str:
    return "decode()" if point.logits is None else "decode() with logits()"


def _method_name(point: LinearizationPoint) -> str:
    with_logit = "" if point.logits is None else "with_logit=True"
    kind = type(point.linearized.shadow)
    if kind.instances is Detector.instances:  # derived from the stages, so these are wrong
        return f"{kind.__name__}.stages()"
    return f"{kind.__name__}.instances({with_logit})"


def check_items(run: InstanceRun, detector_name: str) -> None:
    """Check that box i depends on item i of every layer and on no other item.

    Doubling some of the boxes must double the gradients of the same items. A factor of two is exact
    in every floating-point format, so rounding cannot make a correct detector fail. One pass for
    each binary digit of the box number tells any two boxes apart.
    """
    g, D = run.z.shape
    number = torch.arange(g, device=run.z.device)
    calls = [call for pairs in run.uses.values() for call, _ in pairs]
    edges = [edge for pairs in run.uses.values() for _, edge in pairs]

    def gradients(weight: Tensor) -> tuple[Tensor | None, ...]:
        seed = weight.to(run.z.dtype).unsqueeze(1).expand(g, D)
        return torch.autograd.grad(run.z, edges, seed, retain_graph=True, allow_unused=True)

    with torch.enable_grad():
        plain = gradients(torch.ones_like(number))
        for digit in range((g - 1).bit_length()):
            weight = 1 + (number >> digit) % 2
            for call, once, weighted in zip(calls, plain, gradients(weight)):
                if once is None or weighted is None:
                    continue
                expected = at_least_float32(call.batched_out(once))
                factor = weight.to(expected.dtype).reshape(-1, *[1] * (expected.dim() - 1))
                expected = expected * factor
                off = at_least_float32(call.batched_out(weighted)) - expected
                if float(off.norm()) > 1e-2 * float(expected.norm()):
                    raise BoxcovError(
                        f"{detector_name}.instances(): box i must depend on item i of every layer "
                        "alone, but items are mixed or in another order than the boxes"
                    )


def _gradients_by_field(z: Tensor, edges: list[GradientEdge]) -> list[Tensor | None]:
    """Gradients (D, g, ...) at the edges: D backward passes, batched."""
    g, D = z.shape
    ones = torch.eye(D, dtype=z.dtype, device=z.device).unsqueeze(1).expand(D, g, D)
    with torch.enable_grad():
        return list(
            torch.autograd.grad(
                z, edges, ones, is_grads_batched=True, allow_unused=True, retain_graph=True
            )
        )


def _float_tensors(raw: Any) -> list[Tensor]:
    return [t for t in tree_leaves(raw) if isinstance(t, Tensor) and t.is_floating_point()]


def _weights_behind(tensor: Tensor, theta: dict[str, Tensor]) -> set[str]:
    read = leaves_read(tensor.sum())  # of the graph alone: a gradient per tensor takes longer
    return {name for name, weight in theta.items() if id(weight) in read}


def _gradients(number: Tensor, weights: list[Tensor]) -> list[Tensor | None]:
    if not number.requires_grad:
        return [None] * len(weights)
    return list(torch.autograd.grad(number, weights, retain_graph=True, allow_unused=True))


def _gradient_error(whole: Tensor | None, own: Tensor | None) -> float:
    if whole is None or float(whole.norm()) == 0:
        return 0.0
    return 1.0 if own is None else float((whole - own).norm()) / float(whole.norm())
