"""A detector with its uncertainty as one function of tensors of fixed shapes: what is traced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from boxcov.detector import Detector
from boxcov.errors import BoxcovError, join_names
from boxcov.posterior.posterior import Posterior
from boxcov.predict.covariance import sample_covariance
from boxcov.predict.exact import ExactGLM
from boxcov.predict.forward_mode.jvp import directional_derivatives
from boxcov.predict.head.cells import BoxPositions, group_in_blocks, plan_own_cells
from boxcov.predict.head.covariance import decode_jacobian, head_covariance
from boxcov.predict.head.weights import HeadWeights, build_head_weights
from boxcov.predict.instances import check_items
from boxcov.predict.linearize import LinearizationPoint
from boxcov.static_selection import StaticLimits, StaticSelection

OUTPUTS = ("boxes", "scores", "labels", "covariance", "count", "left_off")
Covariance = Callable[[LinearizationPoint, StaticSelection], Tensor]


class Frame:
    """``frame(inputs)`` gives the tensors ``OUTPUTS``: n boxes, of which the first ``count`` are the detector's.

    samples: as many directions of the posterior, those that ``MCGLM`` draws with ``seed``; None for the exact covariance.

    >>> import boxcov
    >>> from boxcov.data import shapes
    >>> from boxcov.detectors.tiny import TinyCenter
    >>> frames = shapes.frames(count=2)
    >>> detector = TinyCenter(threshold=0.05, most=3).eval()
    >>> frame = Frame(detector, boxcov.fit(detector, frames), frames[0][0], samples=5, seed=0, limits=StaticLimits(boxes=4))
    >>> [tuple(out.shape) for out in frame(frames[0][0])]
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
        self.limits = limits
        model = ExactGLM(detector, posterior)
        self.linearized = model.linearized
        with torch.no_grad():
            point, fixed = self._point(inputs)
            moving = _moving(point, fixed)
            if samples is None:
                self.covariance = _exact(posterior, moving, point, fixed, model)
            else:
                etas = posterior.sample(samples, torch.Generator().manual_seed(seed))
                self.covariance = _sampled(posterior, moving, point, etas)
            self.linearized.trunk.forget()

    def __call__(self, inputs: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            point, fixed = self._point(inputs)
            covariance = self.covariance(point, fixed)
            self.linearized.trunk.forget()
        valid, selection = fixed.valid, fixed.selection
        return (
            torch.where(valid.unsqueeze(1), point.boxes, 0),
            torch.where(valid, selection.scores, 0),
            torch.where(valid, selection.labels, -1),
            torch.where(valid[:, None, None], covariance, 0),
            fixed.count,
            fixed.left_off,
        )

    def _point(self, inputs: Tensor) -> tuple[LinearizationPoint, StaticSelection]:
        """The plain pass, and the boxes of the detector in a fixed number of rows."""
        shadow = self.linearized.shadow
        raw = self.linearized.recorded(inputs)
        fixed = shadow.select_static(raw, self.limits)
        if fixed is None:
            raise BoxcovError(
                f"{type(shadow).__name__} has no select_static(): it does not say what it reports in shapes that do not depend on the frame"
            )
        return LinearizationPoint(
            self.linearized, inputs, raw, fixed.selection, shadow.decode(raw, fixed.selection)
        ), fixed


def _moving(point: LinearizationPoint, fixed: StaticSelection) -> set[str]:
    """Parameters of the posterior that move boxes at all, of any kind: a branch for the scores does not."""
    moving: set[str] = set()
    with torch.enable_grad():
        theta = {name: w.requires_grad_() for name, w in point.linearized.theta().items()}
        for selection in fixed.of_kind or (fixed.selection,):
            z = replace(point, selection=selection).z_at(theta)
            probe = torch.linspace(1, 2, z.numel(), dtype=z.dtype).view(z.shape)
            gradients = torch.autograd.grad(
                (z * probe).sum(), list(theta.values()), allow_unused=True
            )
            moving |= {name for name, g in zip(theta, gradients) if g is not None and bool(g.any())}
    return moving


def _sampled(
    posterior: Posterior, moving: set[str], point: LinearizationPoint, etas: dict[str, Tensor]
) -> Covariance:
    """The sample covariance of the derivatives along ``etas``: through the stages of the head, or forward mode through all layers."""
    head = _head(posterior, moving, point, etas)
    if head is not None:
        return lambda point, fixed: sample_covariance(_through(head, point))
    own = {name: eta for name, eta in etas.items() if name in moving}
    return lambda point, fixed: sample_covariance(directional_derivatives(point, own))


def _exact(
    posterior: Posterior,
    moving: set[str],
    point: LinearizationPoint,
    fixed: StaticSelection,
    model: ExactGLM,
) -> Covariance:
    """``J Sigma J^T``: through the stages of the head, or its layers one instance at a time."""
    head = _head(posterior, moving, point, None)
    if head is not None:
        return lambda point, fixed: _through(head, point)
    seen: set[str] = set()
    _by_kind(model, point, fixed, seen)  # which checks what instances() says: not in the graph
    below = sorted(moving - seen)
    if below:
        raise BoxcovError(
            f"an exact covariance goes into a graph for layers that instances() runs: {join_names(below)} lie below the head. "
            "Take samples, or a posterior of the head"
        )
    return lambda point, fixed: _by_kind(model, point, fixed, None)


def _head(
    posterior: Posterior,
    moving: set[str],
    point: LinearizationPoint,
    etas: dict[str, Tensor] | None,
) -> HeadWeights | None:
    """The stages of the head, if there are any and all that moves boxes is in them."""
    staged = point.linearized.shadow.stages(point.raw, point.selection)
    head = (
        None
        if staged is None
        else build_head_weights(staged, posterior, point.linearized.names, etas)
    )
    return head if head is not None and head.parameters and moving <= head.parameters else None


def _through(head: HeadWeights, point: LinearizationPoint) -> Tensor:
    """Covariances (n, D, D), or derivatives (n, D, k) for a head prepared with directions."""
    staged = point.linearized.shadow.stages(point.raw, point.selection)
    assert staged is not None
    where = BoxPositions(staged.frame, staged.row, staged.column, staged.kind)
    pixels, plan = plan_own_cells(
        staged.features, where, head.radius, head.reaches, group_in_blocks(where.kind, head.n_kinds)
    )
    found, numbers, _ = head_covariance(head, plan, pixels)
    J = decode_jacobian(numbers, lambda values: staged.decode(values, where.row, where.column))
    return J @ found if head.has_directions else J @ found @ J.transpose(1, 2)


def _by_kind(
    model: ExactGLM, point: LinearizationPoint, fixed: StaticSelection, seen: set[str] | None
) -> Tensor:
    """All rows as if they were of one kind, kind by kind, and of each row what belongs to its own.

    seen: to be filled with the weights that were met, on a pass that may look at numbers.
    """
    leaves = tree_map_only(
        Tensor, lambda t: t.detach().requires_grad_(t.is_floating_point()), point.raw
    )
    kind = (
        fixed.selection.labels.new_zeros(len(fixed.selection)) if fixed.kind is None else fixed.kind
    )
    n, D = point.boxes.shape
    out = point.boxes.new_zeros(n, D, D)
    for number, selection in enumerate(fixed.of_kind or (fixed.selection,)):
        groups = [
            group
            for group in point.linearized.shadow.instances(leaves, selection) or []
            if len(group[0])
        ]
        if len(groups) != 1 or len(groups[0][0]) != n:
            raise BoxcovError(
                f"{type(point.linearized.shadow).__name__}.instances() must run boxes of one kind as one group: {len(groups)} of {n} boxes"
            )
        run = model.router.instances.run(*groups[0])
        part = model.router.instances.covariance(run, is_traced=seen is None)
        out = torch.where((kind == number)[:, None, None], part, out)
        if seen is not None:
            if n > 1 and run.uses:
                check_items(run, type(point.linearized.shadow).__name__)
            layers = [
                block.layer
                for block in model.posterior.blocks.values()
                if block.layer.weight in run.uses
            ]
            seen |= {
                name for layer in layers for name in (layer.weight, layer.bias) if name is not None
            }
    return out
