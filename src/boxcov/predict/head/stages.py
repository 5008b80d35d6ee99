"""Engine: covariances and directional derivatives of a head that is given as stages.

It computes from ``Detector.stages`` and caches what does not depend on the frame. Whether its
result is used is decided in ``predict/route/``. The mathematics is in ``covariance.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from boxcov._torch.process_state import AT_ONCE, SideStream, matrix_precision
from boxcov.head_stages import HeadStages
from boxcov.posterior.posterior import Posterior
from boxcov.predict.cuda.static_graph import Graphs, Many
from boxcov.predict.engine_options import EngineOptions
from boxcov.predict.head.branches import differentiate_branches, plus, run_branches
from boxcov.predict.head.cells import (
    Cells,
    Plan,
    backpropagate,
    group_by_kind,
    plan_own_cells,
    plan_shared_cells,
    window_tables,
)
from boxcov.predict.head.covariance import (
    added_by_stem,
    derivatives_below,
    products_of_inputs,
    run_stem_stage,
)
from boxcov.predict.head.weight_stacks import build_head_weights
from boxcov.predict.head.weights import HeadWeights
from boxcov.predict.linearize import LinearizationPoint, field_gradients


@dataclass(frozen=True)
class StagedResult:
    """What the stages give for the boxes of a frame."""

    head: Tensor  # of the head's layers: covariance (m, D, D), or derivatives (m, D, k)
    boxes: Tensor  # (m, D) by the stages
    derivatives_below: Tensor | None  # (m, D, k) below the head, if the features have tangents
    kind: Tensor  # (m,)
    n_kinds: int
    layers: tuple[int, ...]  # ids of the layers of all stages


@dataclass(frozen=True)
class PaddedSize:
    """On a GPU: tables that depend on the padded number of boxes alone."""

    windows: tuple[Cells, ...]
    padding: Tensor  # (4, size) frame, row, column and kind of boxes that fill up
    kinds: Tensor  # (G,)

    @staticmethod
    def of(size: int, head: HeadWeights, kind: Tensor) -> PaddedSize:
        padding = kind.new_zeros(4, size)
        padding[3] = head.n_kinds  # a kind that no box has
        kinds = torch.arange(head.n_kinds, device=kind.device)
        # a GPU's fast products need sizes that are multiples of four
        return PaddedSize(window_tables(size, head, fill=4), padding, kinds)


class StagedHead:
    """The exact covariance of a staged head; with directions ``etas``, derivatives along them."""

    def __init__(self, posterior: Posterior, options: EngineOptions) -> None:
        self.posterior, self.options = posterior, options
        self.weights: HeadWeights | None = None  # of the stages of the last frame
        self.first_layer: frozenset[int] = frozenset()  # ids of the weights that read the features
        self._graphs: Graphs | None = None
        self._layers: tuple[int, ...] = ()
        self._sizes: dict[int, PaddedSize] = {}
        self._side = AT_ONCE

    @property
    def parameters(self) -> set[str]:
        """Parameters of the posterior that the stages account for."""
        return set() if self.weights is None else self.weights.parameters

    def run(
        self, point: LinearizationPoint, etas: Mapping[str, Tensor] | None = None
    ) -> StagedResult | None:
        """The head's part for all boxes; None if the detector has no stages of a supported form.

        etas: the same directions (k, *shape) by parameter name in every call.
        A head in half precision is not supported: its oracle is not precise enough.
        """
        on_autocast = torch.is_autocast_enabled(point.boxes.device.type)
        if point.boxes.dtype not in (torch.float32, torch.float64) or on_autocast:
            return None
        staged = point.linearized.shadow.stages(point.raw, point.selection)
        if staged is None or staged.features.dtype != point.boxes.dtype:
            return None
        self._prepare(staged, point.linearized.names, etas)
        if self.weights is None or not self.weights.parameters:
            return None
        own = point.tangents
        found = own.stored(staged.features) if own is not None and own.ends else None
        compute = self._on_cpu if staged.features.device.type == "cpu" else self._on_gpu
        with matrix_precision(self.options.precision):
            head, boxes, *rest = compute(self.weights, staged, None if found is None else found.t)
        below = rest[0] if rest else None
        if below is not None and found is not None and found.scale is not None:
            below = below * found.scale
        return StagedResult(head, boxes, below, staged.kind, self.weights.n_kinds, self._layers)

    def _on_cpu(self, head: HeadWeights, staged: HeadStages, tangents: Tensor | None) -> Many:
        """On a CPU boxes that see the same cells share them, and kinds follow one another."""
        order = staged.kind.argsort()
        frame, row, column = staged.frame[order], staged.row[order], staged.column[order]
        own = replace(staged, frame=frame, row=row, column=column, kind=staged.kind[order])
        rows, plan = plan_shared_cells(own, head)
        back = order.argsort()
        return tuple(part[back] for part in head_covariance(head, plan, rows, own, tangents))

    def _on_gpu(self, head: HeadWeights, staged: HeadStages, tangents: Tensor | None) -> Many:
        """On a GPU the number of boxes is rounded up, and each size becomes a CUDA graph."""
        m = len(staged.kind)
        size = _round_up(m, 32)
        if size not in self._sizes:
            self._sizes[size] = PaddedSize.of(size, head, staged.kind)
        padded = self._sizes[size]
        per_kind = (staged.kind.unsqueeze(1) == padded.kinds).sum(0)
        most = _round_up(int(per_kind.amax()), 8)  # one synchronisation with the device
        packed, side = padded.padding.clone(), self._side
        torch.stack([staged.frame, staged.row, staged.column, staged.kind], out=packed[:, :m])

        def run(features: Tensor, packed: Tensor, tangents: Tensor | None = None) -> Many:
            frame, row, column, kind = packed
            own = replace(staged, features=features, frame=frame, row=row, column=column, kind=kind)
            with side.beside():
                group = group_by_kind(kind, head, most)
            rows, plan = plan_own_cells(own, head, group, padded.windows)
            return head_covariance(head, plan, rows, own, tangents, side)

        given = (staged.features, packed, *(() if tangents is None else (tangents,)))
        if self.options.cuda_graphs and self._graphs is None:
            self._graphs = Graphs()
        made = run(*given) if self._graphs is None else self._graphs(most, run, *given)
        return tuple(tensor[:m].clone() for tensor in made)  # the next replay writes over them

    def _prepare(
        self, staged: HeadStages, names: Mapping[int, str], etas: Mapping[str, Tensor] | None
    ) -> None:
        """Arrange the weights for the stages of this frame, if they are new."""
        stages = (*staged.stem, *staged.branches)
        layers = tuple(id(layer) for stage in stages for row in stage.layers for layer in row)
        if layers == self._layers:
            return
        self.weights = build_head_weights(
            staged, self.posterior, names, etas, self.options.tolerance
        )
        self._layers, self._side = layers, SideStream(staged.features.device)
        self._graphs = None  # a captured graph holds the old weights
        self._sizes.clear()
        first = staged.stem[0].layers if staged.stem else ()
        self.first_layer = frozenset(id(layer.weight) for row in first for layer in row)


def _round_up(count: int, step: int) -> int:
    """``count`` rounded up to a multiple of ``step``, of larger steps for large counts."""
    while count > 8 * step:
        step *= 2
    return -(-count // step) * step


def head_covariance(
    head: HeadWeights,
    plan: Plan,
    rows: Tensor,
    staged: HeadStages,
    tangents: Tensor | None = None,
    side: SideStream = AT_ONCE,
) -> Many:
    """Covariance (m, D, D) of the boxes by the head, and the boxes (m, D) by the head.

    With directions, derivatives (m, D, k) in place of the covariance.

    rows: features (P + 1, C) of the cells that the boxes depend on, from the function that made
        ``plan``.
    tangents: (k, batch, C, height, width) of the feature map, if it depends on posterior weights; a
        third result is then the derivatives (m, D, k) along them.
    side: where ``plan.groups`` are made. What the longest chain does not wait for runs there, too:
        the Gram matrices of the stem with the largest product, and the Jacobian.
    """
    stem = []
    for stage, cells in zip(head.stem, plan.stages):
        stem.append(run_stem_stage(stage, cells, rows))
        rows = stem[-1].outputs
    side.join()
    with side.beside():
        products = [products_of_inputs(done, plan) for done in stem]
    branches = run_branches(head, plan, rows)
    with side.beside():
        boxes, J = _decode(staged, branches.outputs)
    total, d = differentiate_branches(head, plan, branches)
    side.join()
    for done, of_stage in zip(reversed(stem), reversed(products)):
        d = d * done.cells.per_box(done.slope)  # (R, m, T, n_out)
        if of_stage is not None:
            total = plus(total, added_by_stem(done, of_stage, d, plan))
        if done is not stem[0]:
            d = backpropagate(d, done.stage.W[0, 0], done.stage)
    assert total is not None
    J = J.to(total.dtype)
    of_boxes = J @ total if head.has_directions else J @ total @ J.transpose(1, 2)
    if tangents is None:
        return of_boxes, boxes
    return of_boxes, boxes, J @ derivatives_below(head.stem[0], plan, d, tangents)


def _decode(staged: HeadStages, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Step 3: the boxes (m, D) and their Jacobian (m, D, R) in the raw outputs (m, R)."""
    with torch.enable_grad():
        outputs = outputs.detach().requires_grad_()
        boxes = staged.decode(outputs, staged.row, staged.column)
    (J,) = field_gradients(boxes, [outputs])  # (D, m, R)
    assert J is not None
    return boxes.detach(), J.transpose(0, 1)
