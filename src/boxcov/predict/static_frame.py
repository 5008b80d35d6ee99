"""A detector with its covariances as one function of tensors with fixed shapes, to be traced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from boxcov.detector import Detector, Selection
from boxcov.errors import BoxcovError, join_names
from boxcov.posterior.posterior import Posterior
from boxcov.predict.covariance import sample_covariance
from boxcov.predict.exact import ExactGLM
from boxcov.predict.forward_mode.derivatives import directional_derivatives
from boxcov.predict.head.cells import group_in_blocks, plan_own_cells
from boxcov.predict.head.covariance import head_covariance
from boxcov.predict.head.stages import decode_result
from boxcov.predict.head.weights import HeadWeights, build_head_weights
from boxcov.predict.instances import check_items
from boxcov.predict.linearize import LinearizationPoint
from boxcov.predict.predictor import add_signals
from boxcov.static_selection import StaticLimits, StaticSelection

OUTPUTS = ("boxes", "scores", "labels", "covariance", "count", "left_off")
ERROR_OUTPUTS = (
    *("risk", "no_object", "misplaced", "iou_below", "flipped", "scale", "predictive"),
    *("region_widths", "joint_widths"),
)
MAX_ROWS = 2000  # the neighbours of more boxes would be computed frame by frame
Covariance = Callable[[LinearizationPoint, StaticSelection], Tensor]


class FrameFunction:
    """Compute the tensors ``names`` of one frame: n rows, of which the first ``count`` are boxes.

    They are ``OUTPUTS`` and, if the posterior holds an error model, ``ERROR_OUTPUTS``; ``flipped``
    is left out for boxes without a heading.

    samples: number of posterior samples, those of ``MCGLM`` with ``seed``; None for the exact
    covariance.

    >>> import boxcov
    >>> from boxcov.data import shapes
    >>> from boxcov.detectors.tiny import TinyCenter
    >>> frames = shapes.frames(count=2)
    >>> detector = TinyCenter(threshold=0.05, most=3).eval()
    >>> posterior = boxcov.fit(detector, frames)
    >>> inputs, limits = frames[0][0], StaticLimits(boxes=4)
    >>> function = FrameFunction(detector, posterior, inputs, samples=5, seed=0, limits=limits)
    >>> [tuple(out.shape) for out in function(inputs)]
    [(3, 5), (3,), (3,), (3, 5, 5), (), ()]
    """

    def __init__(
        self,
        detector: Detector,
        posterior: Posterior,
        inputs: Tensor,
        samples: int | None,
        seed: int,
        limits: StaticLimits,
    ) -> None:
        self.limits, self.error_model = limits, posterior.error_model
        posterior = posterior.with_error_model(None)
        model = ExactGLM(detector, posterior)
        self.linearized = model.linearized
        with torch.no_grad():
            point, static = self._linearize(inputs)
            n, D = point.boxes.shape
            # a first run, which refuses an error model that the graph cannot compute
            results = self._error_results(point, static, point.boxes.new_ones(n, D, D))
            self.names = (*OUTPUTS, *results)
            moving = _moving_parameters(point, static)
            if samples is None:
                self.covariance = _exact_covariance(posterior, moving, point, static, model)
            else:
                etas = posterior.sample(samples, torch.Generator().manual_seed(seed))
                self.covariance = _sampled_covariance(posterior, moving, point, etas)
            self.linearized.trunk.forget()

    def __call__(self, inputs: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            point, static = self._linearize(inputs)
            covariance = self.covariance(point, static)
            self.linearized.trunk.forget()
        valid, selection = static.valid, static.selection
        plain = (
            torch.where(valid.unsqueeze(1), point.boxes, 0),
            torch.where(valid, selection.scores, 0),
            torch.where(valid, selection.labels, -1),
            torch.where(valid[:, None, None], covariance, 0),
            static.count,
            static.left_off,
        )
        return plain + tuple(
            torch.where(valid.view(-1, *[1] * (value.dim() - 1)), value, 0)
            for value in self._error_results(point, static, covariance).values()
        )

    def _error_results(
        self, point: LinearizationPoint, static: StaticSelection, covariance: Tensor
    ) -> dict[str, Tensor]:
        """Return what the error model says about each row, by name; nothing without one."""
        if self.error_model is None:
            return {}
        rows = torch.arange(len(covariance))
        found = add_signals(point.detections(covariance=covariance), point)
        # each row of padding has a frame of its own, so that it is no neighbour of a box
        frame = torch.where(static.valid, 0, rows + 1)
        found = self.error_model.apply(replace(found, frame=frame), check=False)
        results = {name: getattr(found, name) for name in ERROR_OUTPUTS}
        return {name: value for name, value in results.items() if value is not None}

    def _linearize(self, inputs: Tensor) -> tuple[LinearizationPoint, StaticSelection]:
        """Run the plain detector and select its boxes in a fixed number of rows."""
        shadow = self.linearized.shadow
        raw = self.linearized.recorded(inputs)
        static = shadow.select_static(raw, self.limits)
        if static is None:
            raise BoxcovError(
                f"{type(shadow).__name__} has no select_static(): an ONNX file needs a selection "
                "whose shapes do not depend on the frame"
            )
        boxes = shadow.decode(raw, static.selection)
        return LinearizationPoint(self.linearized, inputs, raw, static.selection, boxes), static


def _moving_parameters(point: LinearizationPoint, static: StaticSelection) -> set[str]:
    """Return the posterior's parameters that boxes depend on, unlike those of a score branch."""
    moving: set[str] = set()
    with torch.enable_grad():
        theta = {name: w.requires_grad_() for name, w in point.linearized.theta().items()}
        for selection in static.of_kind or (static.selection,):
            z = replace(point, selection=selection).z_at(theta)
            probe = torch.linspace(1, 2, z.numel(), dtype=z.dtype).view(z.shape)
            gradients = torch.autograd.grad(
                (z * probe).sum(), list(theta.values()), allow_unused=True
            )
            moving |= {name for name, g in zip(theta, gradients) if g is not None and bool(g.any())}
    return moving


def _sampled_covariance(
    posterior: Posterior, moving: set[str], point: LinearizationPoint, etas: dict[str, Tensor]
) -> Covariance:
    """Return the sample covariance along ``etas``: by the head's stages, or by forward mode."""
    head = _head_weights(posterior, moving, point, etas)
    if head is not None:
        return lambda point, static: sample_covariance(_apply_head(head, point))
    directions = {name: eta for name, eta in etas.items() if name in moving}
    return lambda point, static: sample_covariance(directional_derivatives(point, directions))


def _exact_covariance(
    posterior: Posterior,
    moving: set[str],
    point: LinearizationPoint,
    static: StaticSelection,
    model: ExactGLM,
) -> Covariance:
    """Return ``J Sigma J^T``: by the head's stages, or by its layers per instance."""
    head = _head_weights(posterior, moving, point, None)
    if head is not None:
        return lambda point, static: _apply_head(head, point)
    used: set[str] = set()
    _covariance_by_kind(model, point, static, used)  # verifies instances(), outside the graph
    below = sorted(moving - used)
    if below:
        raise BoxcovError(
            "an exact covariance can be exported for layers that instances() runs: "
            f"{join_names(below)} lie below the head. Take samples, or a posterior of the head"
        )
    return lambda point, static: _covariance_by_kind(model, point, static, None)


def _head_weights(
    posterior: Posterior,
    moving: set[str],
    point: LinearizationPoint,
    etas: dict[str, Tensor] | None,
) -> HeadWeights | None:
    """Return the weights of the head's stages, if they include all that boxes depend on."""
    staged = point.linearized.shadow.stages(point.raw, point.selection)
    if staged is None:
        return None
    head = build_head_weights(staged, posterior, point.linearized.names, etas)
    return head if head is not None and head.parameters and moving <= head.parameters else None


def _apply_head(head: HeadWeights, point: LinearizationPoint) -> Tensor:
    """Return covariances (n, D, D), or derivatives (n, D, k) for a head with k directions."""
    staged = point.linearized.shadow.stages(point.raw, point.selection)
    assert staged is not None
    pixels, plan = plan_own_cells(staged, head, group_in_blocks(staged.kind, head.n_kinds))
    return decode_result(head, head_covariance(head, plan, pixels), staged)[0]


def _covariance_by_kind(
    model: ExactGLM, point: LinearizationPoint, static: StaticSelection, used: set[str] | None
) -> Tensor:
    """Compute all rows as every kind in turn, and take each row from its own kind (n, D, D).

    used: receives the names of the weights used, in a pass that may read values; None to trace.
    """
    leaves = tree_map_only(
        Tensor, lambda t: t.detach().requires_grad_(t.is_floating_point()), point.raw
    )
    kind = static.kind
    if kind is None:
        kind = static.selection.labels.new_zeros(len(static.selection))
    n, D = point.boxes.shape
    out = point.boxes.new_zeros(n, D, D)
    for number, selection in enumerate(static.of_kind or (static.selection,)):
        run = model.router.instances.run(*_single_group(point, leaves, selection))
        part = model.router.instances.covariance(run, is_traced=used is None)
        out = torch.where((kind == number)[:, None, None], part, out)
        if used is not None:
            if n > 1 and run.uses:
                check_items(run, type(point.linearized.shadow).__name__)
            for block in model.posterior.blocks.values():
                if block.layer.weight in run.uses:
                    names = (block.layer.weight, block.layer.bias)
                    used |= {name for name in names if name is not None}
    return out


def _single_group(point: LinearizationPoint, leaves: Any, selection: Selection) -> Any:
    """Return the one group of instances of a selection of one kind."""
    shadow, n = point.linearized.shadow, len(point.boxes)
    groups = [group for group in shadow.instances(leaves, selection) or [] if len(group[0])]
    if len(groups) != 1 or len(groups[0][0]) != n:
        raise BoxcovError(
            f"{type(shadow).__name__}.instances() must return one group for boxes of one kind, "
            f"got {len(groups)} groups for {n} boxes"
        )
    return groups[0]
