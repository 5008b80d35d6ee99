"""ExactGLM: the covariance ``J Sigma J^T`` of every box, without sampling error.

``ExactRouter`` chooses the engine of each frame; see ``route.py`` for the states and the policy.
``autograd_covariance`` works for any detector.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from boxcov._torch.layers import at_least_float32
from boxcov._torch.process_state import matrix_precision
from boxcov.box_layout import log_variances
from boxcov.detections import PART_BELOW, Detections
from boxcov.detector import Detector, part_modules
from boxcov.errors import check_whole
from boxcov.posterior.kronecker_block import MEMORY
from boxcov.posterior.posterior import Posterior
from boxcov.predict.forward_mode.derivatives import (
    PosteriorSamples,
    directional_derivatives,
    sample_covariance,
)
from boxcov.predict.forward_mode.tangents import NoRule, Tangents
from boxcov.predict.head.stages import StagedResult
from boxcov.predict.instances import (
    InstanceEngine,
    InstancesCheck,
    instance_groups,
    leaves_read,
    with_leaves,
)
from boxcov.predict.linearize import LinearizationPoint, LinearizedDetector
from boxcov.predict.predictor import PosteriorPredictor, logit_fields
from boxcov.predict.route import DEFAULT_ENGINE, EngineOptions, State, TangentRouter, warn_of_route

_EVERY, _LOGIT = slice(None), slice(-1, None)  # fields of z


class ExactGLM(PosteriorPredictor):
    """The full D x D covariance of every box, exact.

    samples: for a posterior that reaches below the head: estimate that part by Monte Carlo with
        this many samples, drawn with ``seed``. None: that part is exact too, at one backward pass
        per number. Covariance adds over layers, so the two parts are added.
    with_logit: also return the variance of each score's logit and its covariance with the box.
    engine: speed against accuracy and memory.

    >>> import boxcov
    >>> from boxcov.data import shapes
    >>> from boxcov.detectors.tiny import TinyCenter
    >>> frames = shapes.frames(count=2)
    >>> detector = TinyCenter(threshold=0.05, most=3)
    >>> model = ExactGLM(detector, boxcov.fit(detector, frames))
    >>> detections = model(frames[0][0])
    >>> bool((detections.uncertainty > 0).all())
    True
    """

    method = "exact"
    router: ExactRouter

    def __init__(
        self,
        detector: Detector,
        posterior: Posterior,
        samples: int | None = None,
        seed: int = 0,
        *,
        with_logit: bool = False,
        engine: EngineOptions = DEFAULT_ENGINE,
    ) -> None:
        if samples is not None:
            check_whole("samples", samples, 2)
        super().__init__(detector, posterior, with_logit, engine)
        self.samples, self.seed = samples, seed
        self._samples = None if samples is None else PosteriorSamples(self.posterior, samples, seed)
        head = part_modules(detector)["head"]
        own = {id(p) for module in head for p in module.parameters()}
        named = dict(detector.named_parameters(remove_duplicate=False))
        self._reaches_below = any(id(named[name]) not in own for name in posterior.parameters)
        self.router = self.build_router()
        self.set_error_model(posterior.error_model)

    def build_router(self) -> ExactRouter:
        return ExactRouter(
            self.linearize(), self.posterior, self.engine, self._samples, self.with_logit
        )

    def settings(self) -> dict[str, Any]:
        own = {"samples": self.samples, "seed": self.seed}
        precision, tolerance = self.engine.precision, self.engine.tolerance
        return {**super().settings(), **own, "precision": precision, "tolerance": tolerance}

    def predict(self, point: LinearizationPoint) -> Detections:
        covariance, row, below = self.router.covariance(point)
        found = point.detections(covariance=covariance, meta=self.settings(), **logit_fields(row))
        return self._with_part_below(found, below) if self._reaches_below else found

    def _empty(self, point: LinearizationPoint) -> Detections:
        found = super()._empty(point)
        return self._with_part_below(found, None) if self._reaches_below else found

    def _with_part_below(self, found: Detections, below: Tensor | None) -> Detections:
        """Add the log variances of the layers that ``instances()`` does not run, as signals.

        These are the layers below the head, or all layers of a detector without ``instances()``.
        """
        assert found.covariance is not None
        part = torch.zeros_like(found.covariance) if below is None else below
        logs = log_variances(found.fields, part.diagonal(dim1=1, dim2=2), found.clipped)
        names = [f"{PART_BELOW} {name}" for name in found.fields]
        return replace(found, signals=logs, meta={**found.meta, "signals": names})


@dataclass(frozen=True)
class HeadPart:
    """The part of a covariance that the layers of the head contribute."""

    covariance: Tensor  # (m, D, D), with logits (m, D + 1, D + 1)
    below: list[str]  # layers of the posterior that are not included
    tangents_below: Tensor | None = None  # derivatives (m, D, k) along normalised directions


class ExactRouter(TangentRouter):
    """Routes of ``ExactGLM``: the head by stages, instances or autograd; below it by autograd, or
    by Monte Carlo along ``samples``."""

    def __init__(
        self,
        linearized: LinearizedDetector,
        posterior: Posterior,
        options: EngineOptions,
        samples: PosteriorSamples | None = None,
        with_logit: bool = False,
    ) -> None:
        super().__init__(linearized, posterior, options)
        self.samples, self.with_logit = samples, with_logit
        self.instances = InstanceEngine(linearized, posterior)
        self.instances_check = InstancesCheck()
        self._below_stages: list[str] = []  # known once the stages are verified
        self._warned_of_slow_logit = False

    def needs_trunk(self) -> bool:
        if self.with_logit or self.stages_check.state is not State.VERIFIED:
            return True
        return bool(self._below_stages) and self.tangents_check.state is not State.VERIFIED

    def next_tangents(self) -> Tangents | None:
        if self.samples is None or not self._below_stages or self.tangents_check.is_refused:
            return None
        return self.propagation.tangents(
            self._etas(self._below_stages), self.staged_head.first_layer
        )

    def covariance(self, point: LinearizationPoint) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The covariance of the boxes (m, D, D), the row (m, D + 1) of the score logit, and the
        part of the covariance that comes from the layers below the head."""
        boxes = replace(point, logits=None)
        head = self._head(boxes)
        below = self._below(boxes, head) if head.below else None
        covariance = head.covariance if below is None else head.covariance + below
        return covariance, self._logit_row(point, head) if self.with_logit else None, below

    def _head(self, point: LinearizationPoint) -> HeadPart:
        """By stages where they are verified for all boxes, else by instance or not at all."""
        staged = self.staged_head.run(point)
        if staged is not None and not self.new_kinds(staged):
            return HeadPart(staged.head, self._below_stages, staged.below)
        point = self.with_trunk(point)
        part = self._head_by_instance(point) if staged is None else self._verify_head(point, staged)
        engine = "instances" if self._has_layers(part) else "autograd"
        if staged is not None and not self.new_kinds(staged):
            engine = "stages"
        rest = "autograd" if self.samples is None else "vmap(jvp) along samples"
        self.settle(engine, rest if part.below else "none")
        return part

    @matrix_precision("float32")
    def _verify_head(self, point: LinearizationPoint, staged: StagedResult) -> HeadPart:
        """By stages if they agree with the instances of some of the boxes, else by instance."""
        rows = self.rows_to_verify(staged)
        some = point.subset(rows)
        part = self._head_by_instance(some or point)
        compared = None if some is None else rows
        if self._has_layers(part) and self.verify_stages(staged, part.covariance, compared):
            self._below_stages = part.below
            return HeadPart(staged.head, part.below)
        return part if some is None else self._head_by_instance(point)

    def _has_layers(self, part: HeadPart) -> bool:
        """Whether at least one layer of the posterior contributes to a part."""
        return len(part.below) < len(self.posterior.blocks)

    def _no_head(self, point: LinearizationPoint) -> HeadPart:
        m, D = point.z.shape
        covariance = at_least_float32(point.boxes).new_zeros(m, D, D)
        return HeadPart(covariance, list(self.posterior.blocks))

    def _head_by_instance(self, point: LinearizationPoint) -> HeadPart:
        """The part of the layers that instances() runs."""
        watched = with_leaves(point)
        groups = instance_groups(watched)
        if groups is None:
            return self._no_head(point)
        check = self.instances_check
        total = self._no_head(point).covariance
        direct: set[str] = set()
        read: set[int] = set()
        for group in groups:
            run = self.instances.run(*group)
            check.verify_items(run, point)
            total[run.index] = self.instances.covariance(run)
            direct |= run.uses.keys()
            read |= leaves_read(run.z)
        is_verified = check.verify(watched, direct)
        upstream = check.upstream(watched, read)
        if upstream & direct:  # a weight used in instances() and before it
            return self._no_head(point)
        blocks = self.instances.block_of
        if not is_verified:  # too few boxes to decide: the oracle's numbers
            layers = self.posterior.restricted([blocks[name] for name in direct])
            total = autograd_covariance(point, layers)
        return HeadPart(total, [name for weight, name in blocks.items() if weight in upstream])

    def _logit_row(self, point: LinearizationPoint, head: HeadPart) -> Tensor:
        """The row (m, D + 1) of the score logit in the covariance of box and logit."""
        with matrix_precision("float32"):  # in TF32 crops and the map differ by per cent
            part = self._head_by_instance(point)
            row, below = part.covariance[:, -1], part.below
            if len(below) == len(self.posterior.blocks) > len(head.below):
                self._warn_of_slow_logit(len(point.boxes))
                row, below = self._logit_by_autograd(point, head), head.below
        if not below:
            return row
        if self.samples is None:
            return row + autograd_covariance(point, self.posterior.restricted(below))[:, -1]
        return row + sample_covariance(directional_derivatives(point, self._etas(below)))[:, -1]

    def _logit_by_autograd(self, point: LinearizationPoint, head: HeadPart) -> Tensor:
        """The logit's row where instances() gives the boxes alone: a backward pass per logit.

        The layers of ``head`` know the gradients of the boxes, so these need no pass of their own.
        """
        layers = [name for name in self.posterior.blocks if name not in head.below]
        runs = [
            self.instances.run(*group)
            for group in instance_groups(with_leaves(replace(point, logits=None))) or []
        ]
        rows = [
            self.instances.logit_row(runs, start, gradients)
            for start, gradients in _gradients(point, self.posterior.restricted(layers), _LOGIT)
        ]
        return torch.cat(rows)

    def _warn_of_slow_logit(self, m: int) -> None:
        if not self._warned_of_slow_logit:
            self._warned_of_slow_logit = True
            warn_of_route(
                f"with_logit=True takes {m} backward passes for the {m} boxes of this frame, "
                "because instances() and stages() do not give the score logit: accept "
                "with_logit=True in instances(), which makes it a few"
            )

    def _etas(self, layers: list[str]) -> dict[str, Tensor]:
        """The samples of some layers, cut from those of all: a seed gives the same directions."""
        assert self.samples is not None
        etas = self.samples.etas
        return {name: etas[name] for name in self.posterior.restricted(layers).parameters}

    def _below(self, point: LinearizationPoint, head: HeadPart) -> Tensor:
        """The covariance (m, D, D) of the layers below the head."""
        if self.samples is None:
            return autograd_covariance(point, self.posterior.restricted(head.below))
        ends = self.staged_head.first_layer
        if head.tangents_below is not None and self.tangents_check.covers({ends}):
            return sample_covariance(self.propagation.rescale(head.tangents_below))
        A = directional_derivatives(self.with_trunk(point), self._etas(head.below))
        tangents = self.next_tangents() if head.below == self._below_stages else None
        if tangents is None:
            return sample_covariance(A)
        try:
            staged = self.staged_head.run(self.linearized.with_tangents(point, tangents))
        except NoRule:
            self.tangents_check.refuse()
            return sample_covariance(A)
        if staged is not None and staged.below is not None:
            fast = self.propagation.rescale(staged.below)
            if self.verify_tangents(fast, A, tangents):
                self.settle("stages", "propagated tangents along samples")
                return sample_covariance(fast)
        return sample_covariance(A)


def autograd_covariance(point: LinearizationPoint, posterior: Posterior) -> Tensor:
    """``J Sigma J^T`` of z (m, D, D), by one backward pass per number."""
    parts = [posterior.quadratic(gradients) for _, gradients in _gradients(point, posterior)]
    return torch.cat(parts)


def _gradients(
    point: LinearizationPoint, posterior: Posterior, fields: slice = _EVERY
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Gradients (c, D, *shape) of some fields of z by parameter, and the first of the c boxes.

    As many boxes at a time as memory allows.
    """
    with torch.enable_grad():
        theta = point.linearized.theta()
        weights = {name: theta[name].requires_grad_() for name in posterior.parameters}
        z = point.z_at(weights)[:, fields]
        size = sum(w.numel() * w.element_size() for w in weights.values())
        step = max(1, int(MEMORY // (size * z.shape[1])))
        for start in range(0, len(z), step):
            yield start, _gradients_of(z[start : start + step], weights)


def _gradients_of(z: Tensor, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients (c, D, *shape) of numbers z (c, D)."""
    c, D = z.shape
    seeds = torch.eye(c * D, dtype=z.dtype, device=z.device).view(-1, c, D)
    gradients = torch.autograd.grad(
        *(z, list(weights.values()), seeds),
        retain_graph=True,
        is_grads_batched=True,
        allow_unused=True,
    )
    return {
        name: at_least_float32(w.new_zeros(c, D, *w.shape) if g is None else g.unflatten(0, (c, D)))
        for (name, w), g in zip(weights.items(), gradients)
    }
