"""ExactGLM: the GLM covariance whole, without sampling error, the instances as a batch.

Run one instance at a time (``Detector.instances``), the head's layers see every instance as its own item of the batch. D backward passes then give
the gradients of all instances at every layer, however many instances there are. Layers below the head are added exactly, one
backward pass a number, or by Monte Carlo, which is one estimator with less noise: covariance adds over layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map_only

from boxcov.curvature.calls import Call, Watch
from boxcov.curvature.fisher import at_least_float32
from boxcov.curvature.layers import columns, rows
from boxcov.curvature.posterior import Posterior
from boxcov.detections import Detections
from boxcov.detector import Detector, InstanceGroup
from boxcov.errors import BoxcovError
from boxcov.frozen import listed
from boxcov.predict.contract import MEMORY, layer_covariance
from boxcov.predict.linearise import Point
from boxcov.predict.mcglm import directional_derivatives
from boxcov.predict.predictor import PosteriorPredictor, check_samples, sample_covariance


class ExactGLM(PosteriorPredictor):
    """``J Sigma J^T`` of every box, whole D x D blocks, exact.

    samples: for a posterior that reaches below the head: estimate what lies below by Monte Carlo with that many samples, drawn with ``seed``;
    unless given, that part is exact too, at one backward pass for each output number.

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

    def __init__(self, detector: Detector, posterior: Posterior, samples: int | None = None, seed: int = 0) -> None:
        if samples is not None:
            check_samples(samples)
        super().__init__(detector, posterior)
        self.samples, self.seed = samples, seed
        self._split: _Split | None = None  # known after the first box
        self._variances = {name: self.posterior.variances(name) for name in self.posterior.blocks}
        self._block_of = {block.layer.weight: name for name, block in self.posterior.blocks.items()}
        self._etas: dict[str, Tensor] | None = None

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "samples": self.samples, "seed": self.seed}

    def predict(self, point: Point) -> Detections:
        if self._split is None:
            self._split = self._find_split(point)
        covariance = torch.zeros((), device=self.device)
        if self._split.by_instance:
            covariance = covariance + self._by_instance(point)
        if self._split.below:
            covariance = covariance + self._below(point, self._split.below)
        if covariance.dim() == 0:
            D = point.boxes.shape[1]
            covariance = at_least_float32(point.boxes).new_zeros(len(point.boxes), D, D)
        return point.detections(covariance=covariance, meta=self.settings())

    # the head, one instance at a time

    def _by_instance(self, point: Point) -> Tensor:
        D = point.boxes.shape[1]
        out: Tensor | None = None
        for index, run in groups(point):
            part = self._group(run, len(index), D)
            if out is None:
                out = part.new_zeros(len(point.selection), D, D)
            out[index] = part
        assert out is not None
        return out

    def _group(self, run: Any, g: int, D: int) -> Tensor:
        uses: dict[str, list[tuple[Call, GradientEdge]]] = {}
        boxes = self._watched(run, uses, g)
        edges = [edge for calls in uses.values() for _, edge in calls]
        grads = iter(_gradients_by_field(boxes, edges))
        layers = {}
        for name, calls in uses.items():
            pairs = [(call, d) for (call, _), d in zip(calls, grads) if d is not None]
            if pairs:
                a = torch.cat([columns(at_least_float32(call.batched_x), call.geometry) for call, _ in pairs], 3)
                d = torch.cat([rows(call.batched_out(at_least_float32(d), lead=1), call.geometry) for call, d in pairs], 4)
                layers[self._block_of[name]] = a, d
        total = at_least_float32(boxes.detach()).new_zeros(g, D, D)
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
        posterior = replace(self.posterior, blocks={name: self.posterior.blocks[name] for name in names})
        if self.samples is None:
            return _vectorised(point, posterior)
        if self._etas is None:
            self._etas = posterior.sample(self.samples, torch.Generator().manual_seed(self.seed))
        return sample_covariance(directional_derivatives(point, self._etas))

    # which layers are which

    def _find_split(self, point: Point) -> _Split:
        """Once, on the first boxes: find the layers that ``instances`` runs, those below it, and see that it tells the truth."""
        everything = list(self.posterior.blocks)
        if point.linearised.shadow.instances(point.raw, point.selection) is None:
            return _Split(False, everything)
        upstream, direct = _trace(point)
        if upstream & direct:  # a weight used on both sides of the cut: its gradient cannot be told apart
            return _Split(False, everything)
        return _Split(True, [name for weight, name in self._block_of.items() if weight in upstream])


@dataclass(frozen=True)
class _Split:
    by_instance: bool
    below: list[str]  # layer names


def groups(point: Point) -> list[InstanceGroup]:
    """The instances of a frame, group by group, checked to be each there once."""
    given: Iterable[InstanceGroup] | None = point.linearised.shadow.instances(point.raw, point.selection)
    found = [(index, run) for index, run in given or [] if len(index)]
    index = torch.cat([index for index, _ in found]) if found else torch.zeros(0)
    if sorted(index.tolist()) != list(range(len(point.selection))):
        raise BoxcovError(
            f"{type(point.linearised.shadow).__name__}.instances() must give each of the {len(point.selection)} instances once, "
            f"it gave {len(index)}"
        )
    return found


def _trace(point: Point) -> tuple[set[str], set[str]]:
    """Weights that what ``instances`` reads depends on, and weights that it uses itself; raises if it contradicts ``decode``."""
    linearised = point.linearised
    detector = linearised.shadow
    with torch.enable_grad():
        theta = {name: w.requires_grad_() for name, w in linearised.theta().items()}
        raw = linearised.run(point.inputs, linearised.exchanged(theta))
        decoded = detector.decode(raw, point.selection)
        leaves = tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.is_floating_point()), raw)
        boxes = torch.zeros_like(decoded)
        with Watch(linearised.names, linearised.exchanged(theta)):
            for index, run in groups(replace(point, raw=leaves)):
                boxes = boxes.index_copy(0, index, run())
        probe = torch.linspace(-1, 1, boxes.numel(), device=boxes.device).cos().reshape(boxes.shape).to(boxes.dtype)
        read = [t for t in tree_leaves(leaves) if isinstance(t, Tensor) and t.requires_grad]
        by_instance = torch.autograd.grad((boxes * probe).sum(), [*read, *theta.values()], allow_unused=True)
        whole = torch.autograd.grad((decoded * probe).sum(), list(theta.values()), allow_unused=True, retain_graph=True)
        direct = {name for name, g in zip(theta, by_instance[len(read) :]) if g is not None}
        made = [t for t in tree_leaves(raw) if isinstance(t, Tensor) and t.is_floating_point()]
        features = [t for t, g in zip(made, by_instance[: len(read)]) if g is not None and t.requires_grad]
        flow = (
            torch.autograd.grad(features, list(theta.values()), [torch.ones_like(t) for t in features], allow_unused=True)
            if features
            else ()
        )
        upstream = {name for name, g in zip(theta, flow) if g is not None}
    _check_agreement(point, decoded, boxes, dict(zip(theta, whole)), dict(zip(theta, by_instance[len(read) :])), upstream)
    return upstream, direct


def _check_agreement(
    point: Point,
    decoded: Tensor,
    boxes: Tensor,
    whole: dict[str, Tensor | None],
    by_instance: dict[str, Tensor | None],
    upstream: set[str],
) -> None:
    """``instances`` must give the boxes of ``decode``, and the same gradients: crops too small or borders forgotten show here."""
    slack = 1e-2 if decoded.dtype in (torch.float32, torch.float64) else 0.1
    who = type(point.linearised.shadow).__name__
    if not torch.allclose(boxes, decoded, rtol=slack, atol=slack):
        row = int((boxes - decoded).abs().amax(1).argmax())
        raise BoxcovError(f"{who}.instances() gives box {row} as {boxes[row].tolist()}, decode() gives {decoded[row].tolist()}")
    wrong = []
    for name, g in whole.items():
        if name in upstream or g is None:
            continue
        own = by_instance[name]
        if float(g.norm()) > 0 and (own is None or float((g - own).norm()) > slack * float(g.norm())):
            wrong.append(name)
    if wrong:
        raise BoxcovError(
            f"{who}.instances() gives other gradients than decode() for {listed(wrong)}: is its crop too small, or its border off?"
        )


def _gradients_by_field(boxes: Tensor, edges: list[GradientEdge]) -> list[Tensor | None]:
    """Gradients (D, g, ...) at the edges of each of the D fields, of all instances at once: D backward passes, batched."""
    g, D = boxes.shape
    ones = torch.eye(D, dtype=boxes.dtype, device=boxes.device).unsqueeze(1).expand(D, g, D)
    with torch.enable_grad():
        return list(torch.autograd.grad(boxes, edges, ones, is_grads_batched=True, allow_unused=True))


def _fields_reached(gradients: list[Tensor]) -> list[list[int]]:
    """For each layer, the fields of a box that it bears on at all: a branch for the size has nothing to say of the heading."""
    if not gradients:
        return []
    reached = torch.stack([d.flatten(1).abs().amax(1) > 0 for d in gradients]).tolist()  # one look at the device for all layers
    return [[j for j, yes in enumerate(row) if yes] or [0] for row in reached]


def _vectorised(point: Point, posterior: Posterior) -> Tensor:
    """``J Sigma J^T`` from the gradients of each number by itself, as many at a time as memory allows: for any detector."""
    with torch.enable_grad():
        theta = point.linearised.theta()
        layers = [block.layer for block in posterior.blocks.values()]
        names = [layer.weight for layer in layers] + [layer.bias for layer in layers if layer.bias is not None]
        weights = {name: theta[name].requires_grad_() for name in names}
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
