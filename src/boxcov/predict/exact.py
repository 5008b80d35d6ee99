"""ExactGLM: the GLM covariance whole, without sampling error, the instances as a batch.

Run one instance at a time (``Detector.instances``), the head's layers see every instance as its own item of the batch. D backward passes then give
the gradients of all instances at every layer, however many instances there are. Layers below the head are added exactly, one
backward pass a number, or by Monte Carlo, which is one estimator with less noise: covariance adds over layers.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_map_only

from boxcov._torch.layer_calls import LayerCall, LayerCallMode
from boxcov._torch.precision import at_least_float32
from boxcov._torch.unfold import columns, rows
from boxcov.detections import Detections
from boxcov.detector import Detector
from boxcov.errors import BoxcovError
from boxcov.posterior.posterior import Posterior
from boxcov.predict.cuda.graphs import matrix_precision
from boxcov.predict.dependence import Trace, groups, instances_of, leaves_read, trace
from boxcov.predict.forward_mode.carried import Carried
from boxcov.predict.forward_mode.directions import directional_derivatives
from boxcov.predict.forward_mode.tangents import NoRule, Tangents
from boxcov.predict.head.stages import Stages
from boxcov.predict.layer_covariance import MEMORY, layer_covariance
from boxcov.predict.linearize import LinearizationPoint
from boxcov.predict.predictor import (
    PosteriorPredictor,
    check_samples,
    sample_covariance,
    score_parts,
)
from boxcov.predict.route import EngineOptions

Uses = dict[str, list[tuple[LayerCall, GradientEdge]]]
"""By weight, the products it takes part in, and where the gradient passes each."""


class ExactGLM(PosteriorPredictor):
    """``J Sigma J^T`` of every box, whole D x D blocks, exact.

    samples: for a posterior that reaches below the head: estimate what lies below by Monte Carlo with that many samples, drawn with ``seed``;
    unless given, that part is exact too, at one backward pass for each output number.
    engine: speed against accuracy and memory, see ``EngineOptions``.
    calibrated: also fill ``Detections.predictive``, by the posterior's calibration.
    with_logit: also the variance of each score's logit, and its covariance with the box, exact alike; by instance, stages or not.

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
        engine: EngineOptions | None = None,
        with_logit: bool = False,
    ) -> None:
        if samples is not None:
            check_samples(samples)
        super().__init__(detector, posterior, calibrated, with_logit, engine)
        self.samples, self.seed = samples, seed
        self._checked, self._checked_scored = Checked(), Checked()
        self._variances = {name: self.posterior.variances(name) for name in self.posterior.blocks}
        self._block_of = {block.layer.weight: name for name, block in self.posterior.blocks.items()}
        self._etas: dict[str, Tensor] | None = None
        self._stages = Stages(self.posterior, self.engine)
        self._carried = Carried(self.engine.precision)

    def settings(self) -> dict[str, Any]:
        return {
            **super().settings(),
            "samples": self.samples,
            "seed": self.seed,
            "precision": self.engine.precision,
            "tolerance": self.engine.tolerance,
        }

    def asks(self) -> bool:
        return self.with_logit or not (
            self._stages.suffice or (self._stages.known and self._carried.trusted)
        )

    def along(self) -> Tangents | None:
        """Of a posterior that reaches below a head in stages: the directions of what lies below, as far as the head's input."""
        if self.samples is None or not self._stages.below:
            return None
        return self._carried.along(
            self.linearized, self._directions(self._stages.below), self._stages.ends
        )

    def predict(self, point: LinearizationPoint) -> Detections:
        plain = replace(point, logits=None)
        covariance, below, carried = self._head(plain)
        if below and self.samples is not None:
            covariance = covariance + self._sampled(plain, below, carried)
        elif below and not self.with_logit:
            covariance = covariance + self._below(plain, below)[0]
        if not self.with_logit:
            return point.detections(covariance=covariance, meta=self.settings())
        row, deeper = self._logit_row(point)
        if below and self.samples is None:
            if below == deeper:
                parts = self._below(point, below)
                return point.detections(
                    covariance=covariance + parts[0],
                    meta=self.settings(),
                    **score_parts(row + parts[1]),
                )
            covariance = (
                covariance + self._below(plain, below)[0]
            )  # boxes and logits are known by instance to different depths
        row = row + self._below(point, deeper)[1] if deeper else row
        return point.detections(covariance=covariance, meta=self.settings(), **score_parts(row))

    def _head(self, point: LinearizationPoint) -> tuple[Tensor, list[str], Tensor | None]:
        """What the layers of the head add (m, D, D), the names of those that lie below, and the derivatives along these that were carried."""
        found = self._stages.found(point)
        fast = None if found is None else found.part
        if found is not None and self._stages.trusted:
            return found.part, self._stages.below, found.below
        if not point.remembered:
            point = self.linearized.at(point.inputs)
        m, D = point.boxes.shape
        zeros = at_least_float32(point.boxes).new_zeros(m, D, D)
        if instances_of(point) is None:
            return zeros, list(self.posterior.blocks), None
        with (
            nullcontext() if fast is None else matrix_precision("float32")
        ):  # to be compared, it must be as exact
            part, direct, upstream = self._by_instance(point)
        if (
            upstream & direct
        ):  # a weight used on both sides of the cut: its gradient cannot be told apart
            return zeros, list(self.posterior.blocks), None
        below = [name for weight, name in self._block_of.items() if weight in upstream]
        if fast is not None:
            self._stages.compare(fast, part, below)
            part = fast  # the same numbers for a frame, whether it was the first or not
        return part, below, None

    def _logit_row(self, point: LinearizationPoint) -> tuple[Tensor, list[str]]:
        """The covariance of the logits with boxes and logits (m, D + 1) as far as the head's layers go, and those that lie below."""
        nothing = at_least_float32(point.z).new_zeros(point.z.shape)
        if instances_of(point) is None:
            return nothing, list(self.posterior.blocks)
        row, direct, upstream = self._by_instance(point)
        if upstream & direct:
            return nothing, list(self.posterior.blocks)
        return row, [name for weight, name in self._block_of.items() if weight in upstream]

    # the head, one instance at a time

    def _by_instance(self, point: LinearizationPoint) -> tuple[Tensor, set[str], set[str]]:
        """What the layers that instances() runs add (m, D, D); the weights it used; and those that what it read depends on.

        With logits the last row alone (m, D + 1), which most layers do not bear on.
        """
        leaves = tree_map_only(
            Tensor, lambda t: t.detach().requires_grad_(t.is_floating_point()), point.raw
        )
        watched = replace(point, raw=leaves)
        m, D = point.z.shape
        checked = self._checked if point.logits is None else self._checked_scored
        out = at_least_float32(point.boxes).new_zeros((m, D, D) if point.logits is None else (m, D))
        direct: set[str] = set()
        read: set[int] = set()
        for index, run in groups(watched):
            uses: Uses = {}
            boxes = self.watched(run, uses, len(index))
            out[index] = self.group(boxes, uses, checked, last=point.logits is not None)
            direct |= {name for name in uses if name in self._block_of}
            read |= leaves_read(boxes)
        if (
            checked.trace is None
            or not direct <= checked.verified
            or not checked.trace.knows(leaves)
        ):
            checked.trace = trace(watched)
            checked.verified |= direct
        return out, direct, checked.trace.upstream_of(leaves, read)

    def group(
        self, boxes: Tensor, uses: Uses, checked: Checked | None, *, last: bool = False
    ) -> Tensor:
        """(g, D, D) of the numbers (g, D) of some instances; the last row alone (g, D) if asked for.

        checked: None if no number may be looked at, as in a graph that is traced; what there is to check was then checked before.
        """
        g, D = boxes.shape
        total = at_least_float32(boxes.detach()).new_zeros((g, D) if last else (g, D, D))
        edges = [edge for calls in uses.values() for _, edge in calls]
        if not edges:
            return total
        grads = _gradients_by_field(boxes, edges)
        if checked is not None and g > 1 and not set(uses) <= checked.apart:
            _check_apart(
                boxes,
                edges,
                [call for calls in uses.values() for call, _ in calls],
                self.linearized.shadow,
            )
            checked.apart |= set(uses)
        remaining = iter(grads)
        layers = {}
        for name, calls in uses.items():
            pairs = [(call, d) for (call, _), d in zip(calls, remaining) if d is not None]
            if pairs:
                a = torch.cat(
                    [columns(at_least_float32(call.batched_x), call.geometry) for call, _ in pairs],
                    3,
                )
                d = torch.cat(
                    [
                        rows(call.batched_out(at_least_float32(d), lead=1), call.geometry)
                        for call, d in pairs
                    ],
                    4,
                )
                layers[self._block_of[name]] = a, d
        every = [list(range(D))] * len(layers)
        reached = every if checked is None else _fields_reached([d for _, d in layers.values()])
        for (name, (a, d)), fields in zip(layers.items(), reached):
            if last and fields[-1] != D - 1:
                continue
            C = layer_covariance(
                a,
                d if len(fields) == D else d[fields],
                self.posterior.blocks[name],
                self._variances[name],
            )
            if len(fields) == D:
                total += C[:, -1] if last else C
                continue
            at = torch.tensor(fields, device=total.device)
            if last:
                total[:, at] += C[:, -1]
            else:
                total[:, at[:, None], at] += C
        return total

    def watched(self, run: Any, uses: Uses, g: int) -> Tensor:
        """The numbers (g, D) that ``run`` gives for g instances; ``uses`` is filled with what each weight was multiplied with."""
        theta = {name: w.requires_grad_() for name, w in self.linearized.theta().items()}
        exchange = self.linearized.exchanged(theta)

        def on_call(name: str, call: LayerCall) -> Tensor:
            items = call.batched_x.shape[0]
            if items != g:
                raise BoxcovError(
                    f"{type(self.linearized.shadow).__name__}.instances() runs {name} on {items} items for {g} instances: "
                    "every layer must see each instance as one item of the batch"
                )
            out = exchange(name, call)
            # the call keeps the input only: what the gradient passes is told by the edge, before anything works in place
            uses.setdefault(name, []).append(
                (replace(call, x=call.x.detach()), get_gradient_edge(out))
            )
            return out

        with torch.enable_grad(), LayerCallMode(self.linearized.names, on_call):
            boxes: Tensor = run()
        return boxes

    # what lies below the head

    def _directions(self, names: list[str]) -> dict[str, Tensor]:
        if (
            self._etas is None
        ):  # of all layers, so that the same seed gives the same directions whichever of them a frame needs
            self._etas = self.posterior.sample(
                cast(int, self.samples), torch.Generator().manual_seed(self.seed)
            )
        return {name: self._etas[name] for name in self.posterior.restricted(names).parameters}

    def _sampled(
        self, point: LinearizationPoint, names: list[str], carried: Tensor | None
    ) -> Tensor:
        """The covariance (m, D, D) by Monte Carlo: from tangents carried beside the plain pass, compared with the plain way at first."""
        if carried is not None and self._carried.trusted:
            return sample_covariance(self._carried.scaled(carried))
        A = directional_derivatives(point, self._directions(names))
        tangents = self.along() if names == self._stages.below else None
        if tangents is not None:
            try:
                found = self._stages.found(self.linearized.again(point, tangents))
            except NoRule:
                self._carried.usable = False
                return sample_covariance(A)
            if (
                found is not None
                and found.below is not None
                and self._carried.compare(self._carried.scaled(found.below), A)
            ):
                A = self._carried.scaled(
                    found.below
                )  # the same numbers for a frame, whether it was the first or not
        return sample_covariance(A)

    def _below(self, point: LinearizationPoint, names: list[str]) -> tuple[Tensor, Tensor]:
        """The covariance of the boxes (m, D, D), and the last row (m, D) of that of all that is asked about: with logits (m, D + 1)."""
        posterior = self.posterior.restricted(names)
        if self.samples is None:
            return _vectorised(point, posterior)
        A = directional_derivatives(point, self._directions(names))
        covariance = sample_covariance(A[:, : point.boxes.shape[1]])
        return covariance, covariance[:, -1] if point.logits is None else sample_covariance(A)[
            :, -1
        ]


@dataclass
class Checked:
    """What is known of a detector's way to run its head by instance, after the first boxes."""

    trace: Trace | None = None
    verified: set[str] = field(
        default_factory=set
    )  # weights whose gradients by instance were seen to be right
    apart: set[str] = field(
        default_factory=set
    )  # weights that were seen to keep the instances apart, which takes two of them


def _gradients_by_field(boxes: Tensor, edges: list[GradientEdge]) -> list[Tensor | None]:
    """Gradients (D, g, ...) at the edges of each of the D fields, of all instances at once: D backward passes, batched."""
    g, D = boxes.shape
    ones = torch.eye(D, dtype=boxes.dtype, device=boxes.device).unsqueeze(1).expand(D, g, D)
    with torch.enable_grad():
        return list(
            torch.autograd.grad(
                boxes, edges, ones, is_grads_batched=True, allow_unused=True, retain_graph=True
            )
        )


def _fields_reached(gradients: list[Tensor]) -> list[list[int]]:
    """For each layer, the fields of a box that it bears on at all: a branch for the size has nothing to say of the heading."""
    if not gradients:
        return []
    reached = torch.stack(
        [d.flatten(1).abs().amax(1) > 0 for d in gradients]
    ).tolist()  # one look at the device for all layers
    return [[j for j, yes in enumerate(row) if yes] or [0] for row in reached]


def _check_apart(
    boxes: Tensor, edges: list[GradientEdge], calls: list[LayerCall], detector: Detector
) -> None:
    """Check that box i depends on item i of every layer and on no other item.

    Doubling some of the boxes must double the gradients of the same items. A factor of two is exact in every floating-point format, so
    rounding cannot make a correct detector fail. One pass for each binary digit of the box number tells any two boxes apart.
    """
    g, D = boxes.shape
    number = torch.arange(g, device=boxes.device)

    def gradients(weight: Tensor) -> tuple[Tensor | None, ...]:
        seed = weight.to(boxes.dtype).unsqueeze(1).expand(g, D)
        return torch.autograd.grad(boxes, edges, seed, retain_graph=True, allow_unused=True)

    with torch.enable_grad():
        plain = gradients(torch.ones_like(number))
        for digit in range((g - 1).bit_length()):
            weight = 1 + (number >> digit) % 2
            for call, once, weighted in zip(calls, plain, gradients(weight)):
                if once is None or weighted is None:
                    continue
                expected = at_least_float32(call.batched_out(once))
                expected = expected * weight.to(expected.dtype).reshape(
                    -1, *[1] * (expected.dim() - 1)
                )
                off = at_least_float32(call.batched_out(weighted)) - expected
                if float(off.norm()) > 1e-2 * float(expected.norm()):
                    raise BoxcovError(
                        f"{type(detector).__name__}.instances(): box i must depend on item i of every layer alone, "
                        "but items are mixed or in another order than the boxes"
                    )


def _vectorised(point: LinearizationPoint, posterior: Posterior) -> tuple[Tensor, Tensor]:
    """``J Sigma J^T`` from the gradients of each number by itself, as many at a time as memory allows: for any detector. As ``_below``."""
    with torch.enable_grad():
        theta = point.linearized.theta()
        weights = {name: theta[name].requires_grad_() for name in posterior.parameters}
        z = point.z_at(weights)
        m, D = point.boxes.shape
        size = sum(w.numel() * w.element_size() for w in weights.values())
        step = max(1, int(MEMORY // (size * D)))
        blocks, last = [], []
        for start in range(0, m, step):
            found = _gradients_of(z[:, :D], start, min(start + step, m), weights)
            blocks.append(posterior.quadratic(found))
            if z.shape[1] > D:
                own = _gradients_of(z[:, D:], start, min(start + step, m), weights)
                blocks_of_all = posterior.quadratic(
                    {name: torch.cat([g, own[name]], 1) for name, g in found.items()}
                )
                last.append(blocks_of_all[:, -1])
            else:
                last.append(blocks[-1][:, -1])
    return torch.cat(blocks), torch.cat(last)


def _gradients_of(
    z: Tensor, start: int, stop: int, weights: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Gradients (c, D, *shape) of the numbers of the instances from ``start`` to ``stop``."""
    m, D = z.shape
    seeds = z.new_zeros(stop - start, D, m, D)
    rows, fields = torch.arange(stop - start, device=z.device), torch.arange(D, device=z.device)
    seeds[rows[:, None], fields, rows[:, None] + start, fields] = 1
    every = list(weights.values())
    grads = torch.autograd.grad(
        z, every, seeds.flatten(0, 1), retain_graph=True, is_grads_batched=True, allow_unused=True
    )
    found = {
        name: at_least_float32(g).unflatten(0, (-1, D))
        for name, g in zip(weights, grads)
        if g is not None
    }
    return {
        name: found.get(name, at_least_float32(w.new_zeros(stop - start, D, *w.shape)))
        for name, w in weights.items()
    }
