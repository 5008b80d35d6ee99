"""The routes of ExactGLM: the head by stages, instances or autograd, and what lies below it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from boxcov._torch.process_state import at_least_float32, matrix_precision
from boxcov.posterior.posterior import Posterior
from boxcov.predict.backward_mode import autograd_covariance, gradients
from boxcov.predict.engine_options import EngineOptions
from boxcov.predict.forward_mode.derivatives import directional_derivatives, sample_covariance
from boxcov.predict.forward_mode.jvp import NoRule
from boxcov.predict.forward_mode.tangents import Tangents
from boxcov.predict.head.stages import StagedResult
from boxcov.predict.instances import InstanceEngine, instance_groups, leaves_read, with_leaves
from boxcov.predict.linearize import LinearizationPoint, LinearizedDetector
from boxcov.predict.route.base import TangentRouter
from boxcov.predict.route.instances import InstancesCheck
from boxcov.predict.route.verification import warn_of_boxes, warn_of_route

_LOGIT = slice(-1, None)  # the last field of z


@dataclass(frozen=True)
class HeadPart:
    """The part of a covariance that the layers of the head contribute."""

    covariance: Tensor  # (m, D, D), with logits (m, D + 1, D + 1)
    layers_below: list[str]  # layers of the posterior that are not included
    derivatives_below: Tensor | None = None  # (m, D, k) along normalised directions


class ExactRouter(TangentRouter):
    """Chooses the engines of ``ExactGLM``.

    Without etas, what lies below the head is computed by autograd.
    """

    def __init__(
        self,
        linearized: LinearizedDetector,
        posterior: Posterior,
        options: EngineOptions,
        etas: Mapping[str, Tensor],
        with_logit: bool,
    ) -> None:
        super().__init__(linearized, posterior, options, etas, with_logit)
        self.instances = InstanceEngine(linearized, posterior)
        self.instances_check = InstancesCheck()
        self._layers_below: list[str] = []  # below the stages, once these are verified
        self._warned_of_slow_logit = False

    def needs_trunk(self) -> bool:
        if self.with_logit or not self.stages_check.is_verified:
            return True
        return bool(self._layers_below) and not self.tangents_check.is_verified

    def next_tangents(self) -> Tangents | None:
        if not self._etas_below or self.tangents_check.is_refused:
            return None
        return self.propagation.tangents(self._etas_below, self.staged_head.first_layer)

    def covariance(self, point: LinearizationPoint) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The covariance (m, D, D) of a frame with at least one box, and two further results.

        These are the row (m, D + 1) of the score logit in the covariance of box and logit, and the
        part (m, D, D) from the layers below the head.
        """
        without_logits = replace(point, logits=None)
        head = self._head(without_logits)
        part_below = self._part_below(without_logits, head) if head.layers_below else None
        boxes = head.covariance if part_below is None else head.covariance + part_below
        row = self._logit_row(point, head) if self.with_logit else None
        return boxes, row, part_below

    def _head(self, point: LinearizationPoint) -> HeadPart:
        """By stages where they are verified for all boxes, else by instance or not at all."""
        staged = self.staged_head.run(point)
        if staged is not None and not self.stages_check.new_kinds(staged):
            if not self.stages_check.same_boxes(staged, point):
                return self._without_stages(point)
            return HeadPart(staged.head, self._layers_below, staged.derivatives_below)
        point = self.with_trunk(point)
        part = self._verify_stages(point, staged) if staged else self._head_by_instance(point)
        engine = "instances" if self._has_layers(part) else "autograd"
        if staged is not None and not self.stages_check.new_kinds(staged):
            engine = "stages"
        rest = "vmap(jvp) along samples" if self.etas else "autograd"
        self.settle(engine, rest if part.layers_below else "none")
        return part

    @matrix_precision("float32")
    def _verify_stages(self, point: LinearizationPoint, staged: StagedResult) -> HeadPart:
        """By stages if they agree with the instances of some of the boxes, else by instance."""
        rows = self.stages_check.rows_to_compare(staged)
        some = point.subset(rows)
        part = self._head_by_instance(some or point)
        compared = None if some is None else rows
        agrees = self._has_layers(part) and self.stages_check.compare(
            staged, part.covariance, compared
        )
        if self.stages_check.is_verified:  # at least for some kinds of boxes
            self._layers_below, self._etas_below = part.layers_below, self._etas(part.layers_below)
        if agrees and not self.stages_check.same_boxes(staged, point):
            return self._without_stages(point)
        if agrees:
            return HeadPart(staged.head, part.layers_below)
        return part if some is None else self._head_by_instance(point)

    def _without_stages(self, point: LinearizationPoint) -> HeadPart:
        """By instance, for a frame in which the stages give other boxes than ``decode()``."""
        part = self._head_by_instance(self.with_trunk(point))  # raises if derived from the stages
        warn_of_boxes(point, self.posterior.fingerprint, "exact")
        return part

    def _head_by_instance(self, point: LinearizationPoint) -> HeadPart:
        """The part of the layers that instances() runs; of no layer if it cannot be used."""
        (m, D), check = point.z.shape, self.instances_check
        total = at_least_float32(point.boxes).new_zeros(m, D, D)
        no_head = HeadPart(torch.zeros_like(total), list(self.posterior.blocks))
        watched = with_leaves(point)
        groups = instance_groups(watched)
        if groups is None:
            return no_head
        direct, read, z = set[str](), set[int](), torch.zeros_like(point.z)
        for group in groups:
            run = self.instances.run(*group)
            check.verify_items(run, point)
            total[run.index] = self.instances.covariance(run)
            direct |= run.uses.keys()
            read |= leaves_read(run.z)
            z[run.index] = run.z.detach().to(z.dtype)
        is_verified = check.verify(watched, direct, z)
        upstream = check.upstream(watched, read)
        if upstream & direct:  # a weight used in instances() and before it
            return no_head
        blocks = self.instances.block_of
        if not is_verified:  # too few boxes to decide: the oracle's numbers
            layers = [name for weight, name in blocks.items() if weight not in upstream]
            total = autograd_covariance(point, self.posterior.restricted(layers))
        return HeadPart(total, [name for weight, name in blocks.items() if weight in upstream])

    def _has_layers(self, part: HeadPart) -> bool:
        """Whether at least one layer of the posterior contributes to a part."""
        return len(part.layers_below) < len(self.posterior.blocks)

    def _part_below(self, point: LinearizationPoint, head: HeadPart) -> Tensor:
        """The covariance (m, D, D) of the layers below the head."""
        if not self.etas:
            return autograd_covariance(point, self.posterior.restricted(head.layers_below))
        is_verified = self.tangents_check.covers({self.staged_head.first_layer})
        if head.derivatives_below is not None and is_verified:
            return sample_covariance(self.propagation.rescale(head.derivatives_below))
        A = self.oracle(self.with_trunk(point), self._etas(head.layers_below))
        fast = self._verify_tangents(point, A) if head.layers_below == self._layers_below else None
        return sample_covariance(A if fast is None else fast)

    def _verify_tangents(self, point: LinearizationPoint, slow: Tensor) -> Tensor | None:
        """Derivatives (m, D, k) by propagated tangents; None unless they agree with ``slow``."""
        tangents = self.next_tangents()
        if tangents is None:
            return None
        try:
            staged = self.staged_head.run(self.linearized.with_tangents(point, tangents))
        except NoRule:
            self.tangents_check.refuse()
            return None
        if staged is None or staged.derivatives_below is None:
            return None
        fast = self.propagation.rescale(staged.derivatives_below)
        agrees = self.tangents_agree(fast, slow, tangents)
        if agrees is None:
            return self._verify_tangents(point, slow)
        if not agrees:
            return None
        self.settle("stages", "propagated tangents along samples")
        return fast

    def _etas(self, layers: list[str]) -> dict[str, Tensor]:
        """The directions of ``layers``, a part of those drawn for all layers of the posterior.

        They do not depend on which layers are below the head, so a seed always gives the same ones.
        """
        if not self.etas:
            return {}
        return {name: self.etas[name] for name in self.posterior.restricted(layers).parameters}

    def _logit_row(self, point: LinearizationPoint, head: HeadPart) -> Tensor:
        """The row (m, D + 1) of the score logit in the covariance of box and logit."""
        with matrix_precision("float32"):  # in TF32 crops and the map differ by per cent
            part = self._head_by_instance(point)
            row, layers_below = part.covariance[:, -1], part.layers_below
            if self._has_layers(head) and not self._has_layers(part):
                row, layers_below = self._logit_by_autograd(point, head), head.layers_below
        if not layers_below:
            return row
        if not self.etas:
            return row + autograd_covariance(point, self.posterior.restricted(layers_below))[:, -1]
        A = directional_derivatives(point, self._etas(layers_below))
        return row + sample_covariance(A)[:, -1]

    def _logit_by_autograd(self, point: LinearizationPoint, head: HeadPart) -> Tensor:
        """The logit's row where instances() gives boxes without logits: a backward pass per logit.

        The gradients of the boxes come from instances(), so they need no backward pass of the
        whole network.
        """
        if not self._warned_of_slow_logit:
            self._warned_of_slow_logit, m = True, len(point.boxes)
            warn_of_route(
                f"with_logit=True takes {m} backward passes for the {m} boxes of this frame, "
                "because instances() and stages() do not give the score logit: accept "
                "with_logit=True in instances(), which makes it a few"
            )
        layers = [name for name in self.posterior.blocks if name not in head.layers_below]
        runs = self.instances.runs(replace(point, logits=None))
        rows = [
            self.instances.logit_row(runs, start, of_logits)
            for start, of_logits in gradients(point, self.posterior.restricted(layers), _LOGIT)
        ]
        return torch.cat(rows)
