"""ExactGLM: the GLM covariance whole, without sampling error, the instances as a batch.

Run one instance at a time (``Detector.instances``), the head's layers see every instance as its own item of the batch. D backward passes then give
the gradients of all instances at every layer, however many instances there are. Layers below the head are added exactly, one
backward pass a number, or by Monte Carlo, which is one estimator with less noise: covariance adds over layers.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_map_only

from boxcov.curvature.calls import Call, Watch
from boxcov.curvature.fisher import at_least_float32
from boxcov.curvature.layers import columns, rows
from boxcov.curvature.posterior import Posterior
from boxcov.detections import Detections
from boxcov.detector import Detector
from boxcov.errors import BoxcovError
from boxcov.predict.contract import MEMORY, layer_covariance
from boxcov.predict.graphs import Precision, matrix_precision
from boxcov.predict.linearise import Point
from boxcov.predict.mcglm import directional_derivatives
from boxcov.predict.predictor import PosteriorPredictor, check_samples, sample_covariance
from boxcov.predict.stages import Stages
from boxcov.predict.trace import Trace, groups, leaves_read, trace


class ExactGLM(PosteriorPredictor):
    """``J Sigma J^T`` of every box, whole D x D blocks, exact.

    samples: for a posterior that reaches below the head: estimate what lies below by Monte Carlo with that many samples, drawn with ``seed``;
    unless given, that part is exact too, at one backward pass for each output number.
    precision: of the products on a GPU, for a detector whose head is given as stages: "float32", or "tf32" or "half", faster and less exact.
    graphs: on a GPU, keep what was computed for a number of boxes as a CUDA graph, for the next frame with about as many.
    calibrated: also fill ``Detections.predictive``, by the posterior's calibration.

    >>> import boxcov
    >>> from boxcov.data import shapes
    >>> from boxcov.detectors.tiny import TinyCenter
    >>> frames = shapes.frames(count=2)
    >>> detector = TinyCenter(threshold=0.05, most=3)
    >>> model = ExactGLM(detector, boxcov.fit(detector, frames))
    >>> found = model(frames[0][0])
    >>> bool((found.uncertainty > 0).all())
    True
    """

    method = "exact"

    def __init__(
        self,
        detector: Detector,
        posterior: Posterior,
        samples: int | None = None,
        seed: int = 0,
        *,
        calibrated: bool = False,
        precision: Precision = "float32",
        graphs: bool = True,
    ) -> None:
        if samples is not None:
            check_samples(samples)
        if precision not in get_args(Precision):
            raise BoxcovError(f"precision must be one of {', '.join(get_args(Precision))}, got {precision!r}")
        super().__init__(detector, posterior, calibrated)
        self.samples, self.seed = samples, seed
        self._trace: Trace | None = None  # known after the first boxes
        self._verified: set[str] = set()  # weights whose gradients by instance were seen to be right
        self._apart: set[str] = set()  # weights that were seen to keep the instances apart, which takes two of them
        self._variances = {name: self.posterior.variances(name) for name in self.posterior.blocks}
        self._block_of = {block.layer.weight: name for name, block in self.posterior.blocks.items()}
        self._etas: dict[str, Tensor] | None = None
        self.precision = precision
        self._stages = Stages(self.posterior, precision, graphs)

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "samples": self.samples, "seed": self.seed, "precision": self.precision}

    def asks(self) -> bool:
        return not self._stages.suffice

    def predict(self, point: Point) -> Detections:
        covariance, below = self._head(point)
        if below:
            covariance = covariance + self._below(point, below)
        return point.detections(covariance=covariance, meta=self.settings())

    def _head(self, point: Point) -> tuple[Tensor, list[str]]:
        """What the layers of the head add (m, D, D), and the names of those that lie below."""
        fast = self._stages.found(point)
        if fast is not None and self._stages.trusted:
            return fast, self._stages.below
        if not point.remembered:
            point = self.linearised.at(point.inputs)
        m, D = point.boxes.shape
        zeros = at_least_float32(point.boxes).new_zeros(m, D, D)
        if point.linearised.shadow.instances(point.raw, point.selection) is None:
            return zeros, list(self.posterior.blocks)
        with nullcontext() if fast is None else matrix_precision("float32"):  # to be compared, it must be as exact
            part, direct, upstream = self._by_instance(point)
        if upstream & direct:  # a weight used on both sides of the cut: its gradient cannot be told apart
            return zeros, list(self.posterior.blocks)
        below = [name for weight, name in self._block_of.items() if weight in upstream]
        if fast is not None:
            self._stages.compare(fast, part, below)
            part = fast  # the same numbers for a frame, whether it was the first or not
        return part, below

    # the head, one instance at a time

    def _by_instance(self, point: Point) -> tuple[Tensor, set[str], set[str]]:
        """What the layers that instances() runs add (m, D, D); the weights it used; and those that what it read depends on."""
        leaves = tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.is_floating_point()), point.raw)
        watched = replace(point, raw=leaves)
        m, D = point.boxes.shape
        out = at_least_float32(point.boxes).new_zeros(m, D, D)
        direct: set[str] = set()
        read: set[int] = set()
        for index, run in groups(watched):
            uses: dict[str, list[tuple[Call, GradientEdge]]] = {}
            boxes = self._watched(run, uses, len(index))
            out[index] = self._group(boxes, uses)
            direct |= {name for name in uses if name in self._block_of}
            read |= leaves_read(boxes)
        if self._trace is None or not direct <= self._verified or not self._trace.knows(leaves):
            self._trace = trace(watched)
            self._verified |= direct
        return out, direct, self._trace.upstream_of(leaves, read)

    def _group(self, boxes: Tensor, uses: dict[str, list[tuple[Call, GradientEdge]]]) -> Tensor:
        g, D = boxes.shape
        total = at_least_float32(boxes.detach()).new_zeros(g, D, D)
        edges = [edge for calls in uses.values() for _, edge in calls]
        if not edges:
            return total
        grads = _gradients_by_field(boxes, edges)
        if g > 1 and not set(uses) <= self._apart:
            _check_apart(boxes, edges, grads, [call for calls in uses.values() for call, _ in calls], self.linearised.shadow)
            self._apart |= set(uses)
        remaining = iter(grads)
        layers = {}
        for name, calls in uses.items():
            pairs = [(call, d) for (call, _), d in zip(calls, remaining) if d is not None]
            if pairs:
                a = torch.cat([columns(at_least_float32(call.batched_x), call.geometry) for call, _ in pairs], 3)
                d = torch.cat([rows(call.batched_out(at_least_float32(d), lead=1), call.geometry) for call, d in pairs], 4)
                layers[self._block_of[name]] = a, d
        for (name, (a, d)), fields in zip(layers.items(), _fields_reached([d for _, d in layers.values()])):
            C = layer_covariance(a, d[fields], self.posterior.blocks[name], self._variances[name])
            at = torch.tensor(fields, device=total.device)
            total[:, at[:, None], at] += C
        return total

    def _watched(self, run: Any, uses: dict[str, list[tuple[Call, GradientEdge]]], g: int) -> Tensor:
        theta = {name: w.requires_grad_() for name, w in self.linearised.theta().items()}
        exchange = self.linearised.exchanged(theta)

        def on_call(name: str, call: Call) -> Tensor:
            items = call.batched_x.shape[0]
            if items != g:
                raise BoxcovError(
                    f"{type(self.linearised.shadow).__name__}.instances() runs {name} on {items} items for {g} instances: "
                    "every layer must see each instance as one item of the batch"
                )
            out = exchange(name, call)
            # the call keeps the input only: what the gradient passes is told by the edge, before anything works in place
            uses.setdefault(name, []).append((replace(call, x=call.x.detach()), get_gradient_edge(out)))
            return out

        with torch.enable_grad(), Watch(self.linearised.names, on_call):
            boxes: Tensor = run()
        return boxes

    # what lies below the head

    def _below(self, point: Point, names: list[str]) -> Tensor:
        posterior = self.posterior.restricted(names)
        if self.samples is None:
            return _vectorised(point, posterior)
        if self._etas is None:  # of all layers, so that the same seed gives the same directions whichever of them a frame needs
            self._etas = self.posterior.sample(self.samples, torch.Generator().manual_seed(self.seed))
        etas = {name: self._etas[name] for name in posterior.parameters}
        return sample_covariance(directional_derivatives(point, etas))


def _gradients_by_field(boxes: Tensor, edges: list[GradientEdge]) -> list[Tensor | None]:
    """Gradients (D, g, ...) at the edges of each of the D fields, of all instances at once: D backward passes, batched."""
    g, D = boxes.shape
    ones = torch.eye(D, dtype=boxes.dtype, device=boxes.device).unsqueeze(1).expand(D, g, D)
    with torch.enable_grad():
        return list(torch.autograd.grad(boxes, edges, ones, is_grads_batched=True, allow_unused=True, retain_graph=True))


def _fields_reached(gradients: list[Tensor]) -> list[list[int]]:
    """For each layer, the fields of a box that it bears on at all: a branch for the size has nothing to say of the heading."""
    if not gradients:
        return []
    reached = torch.stack([d.flatten(1).abs().amax(1) > 0 for d in gradients]).tolist()  # one look at the device for all layers
    return [[j for j, yes in enumerate(row) if yes] or [0] for row in reached]


def _check_apart(boxes: Tensor, edges: list[GradientEdge], grads: list[Tensor | None], calls: list[Call], detector: Detector) -> None:
    """Whether box i depends on item i of every layer and on no other: weigh the boxes, and the items' gradients must weigh the same."""
    g, D = boxes.shape
    # weights far apart for any two boxes, near ones too
    weight = (1 + (torch.arange(g, device=boxes.device) * 0.6180339887) % 1).to(boxes.dtype)
    slack = 1e-2 if boxes.dtype in (torch.float32, torch.float64) else 0.1
    with torch.enable_grad():
        weighed = torch.autograd.grad(boxes, edges, weight.unsqueeze(1).expand(g, D), retain_graph=True, allow_unused=True)
    for call, part, whole in zip(calls, weighed, grads):
        if part is None or whole is None:
            continue
        expected = call.batched_out(whole.sum(0))
        off = call.batched_out(part) - expected * weight.reshape(-1, *[1] * (expected.dim() - 1))
        if float(off.norm()) > slack * float(expected.norm()):
            raise BoxcovError(
                f"{type(detector).__name__}.instances(): box i must depend on item i of every layer alone, "
                "but items are mixed or in another order than the boxes"
            )


def _vectorised(point: Point, posterior: Posterior) -> Tensor:
    """``J Sigma J^T`` from the gradients of each number by itself, as many at a time as memory allows: for any detector."""
    with torch.enable_grad():
        theta = point.linearised.theta()
        weights = {name: theta[name].requires_grad_() for name in posterior.parameters}
        z = point.boxes_at(weights)
        m, D = z.shape
        size = sum(w.numel() * w.element_size() for w in weights.values())
        step = max(1, int(MEMORY // (size * D)))
        basis = torch.eye(m * D, dtype=z.dtype, device=z.device).reshape(m, D, m, D)
        blocks = []
        for start in range(0, m, step):
            seeds = basis[start : start + step].flatten(0, 1)  # (c D, m, D)
            grads = torch.autograd.grad(z, list(weights.values()), seeds, retain_graph=True, is_grads_batched=True, allow_unused=True)
            found = {name: at_least_float32(g).unflatten(0, (-1, D)) for name, g in zip(weights, grads) if g is not None}
            found = {name: found.get(name, w.new_zeros(len(seeds) // D, D, *w.shape)) for name, w in weights.items()}
            blocks.append(posterior.quadratic(found))
    return torch.cat(blocks)
