"""The fast way through a staged head: prepared once, compared with the plain way on the first boxes of every kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from boxcov.errors import BoxcovError
from boxcov.head_stages import HeadStages
from boxcov.posterior.posterior import Posterior
from boxcov.predict.cuda.graphs import Graphs, Many, matrix_precision
from boxcov.predict.head.cells import (
    BoxPositions,
    Cells,
    group_by_kind,
    plan_own_cells,
    plan_shared_cells,
    window_tables,
)
from boxcov.predict.head.covariance import decode_jacobian, head_covariance
from boxcov.predict.head.weights import HeadWeights, build_head_weights
from boxcov.predict.linearize import LinearizationPoint
from boxcov.predict.route import EngineOptions

Decode = Callable[[Tensor, Tensor, Tensor], Tensor]
_SLACK = 3e-2  # an activation that lies at its kink to rounding may fall to either side


@dataclass(frozen=True)
class Found:
    """What stages say of the boxes of a frame."""

    part: Tensor  # of the head's layers: covariance (m, D, D), or derivatives along directions (m, D, k)
    below: Tensor | None = (
        None  # derivatives (m, D, k) along what lies below, if the tangents of the stem's input are known
    )


@dataclass(frozen=True)
class Sized:
    """On a GPU: what follows from the number of boxes alone."""

    windows: tuple[Cells, ...]
    nowhere: (
        Tensor  # (4, size) frame, row, column and kind of boxes that fill up: they are of no kind
    )
    kinds: Tensor  # (G,)

    @staticmethod
    def of(size: int, head: HeadWeights, features: Tensor, kind: Tensor) -> Sized:
        nowhere = kind.new_zeros(4, size)
        nowhere[3] = head.n_kinds
        kinds = torch.arange(head.n_kinds, device=kind.device)
        # a GPU's fast products need sizes that are multiples of four
        return Sized(
            window_tables(size, head.radius, head.reaches, features, fill=4), nowhere, kinds
        )


class Stages:
    """What is known of a detector's stages so far."""

    def __init__(
        self,
        posterior: Posterior,
        engine: EngineOptions,
        etas: dict[str, Tensor] | None = None,
    ) -> None:
        self.posterior, self.precision, self.etas, self.tolerance = (
            posterior,
            engine.precision,
            etas,
            engine.tolerance,
        )
        self._graphs = Graphs() if engine.cuda_graphs else None
        self.below: list[str] = []  # layers of the posterior that lie below the head
        self.trusted = (
            False  # whether the boxes of the last frame were of kinds that have been compared
        )
        self._compared: set[int] = set()
        self._kinds: list[int] = []
        self._prepared: HeadWeights | None = None
        self._layers: tuple[int, ...] = ()  # what was prepared, by id
        self._stale = False  # whether it was prepared with other directions
        self._fixed: dict[int, Sized] = {}  # by the number of boxes
        self.ends: frozenset[int] = (
            frozenset()
        )  # the weights of the stem's first layer, by id: what reads the features

    @property
    def known(self) -> bool:
        """Whether the head's part of a frame can be had from here; a frame with boxes of a new kind is run once more, and compared."""
        return self.trusted and self._prepared is not None

    @property
    def suffice(self) -> bool:
        """Whether nothing else is needed for a frame: the posterior does not reach below the head, either."""
        return self.known and not self.below

    def found(self, point: LinearizationPoint) -> Found | None:
        """None if the detector has no stages, or none that can be stacked."""
        linearized = point.linearized
        if point.boxes.dtype not in (torch.float32, torch.float64) or torch.is_autocast_enabled(
            point.boxes.device.type
        ):
            return None  # a head in half precision is not what the stages would be compared with
        staged = linearized.shadow.stages(point.raw, point.selection)
        if staged is None or staged.features.dtype != point.boxes.dtype:
            return None
        head = self._ready(staged, linearized.names)
        if head is None or not head.parameters:
            return None  # the posterior holds nothing of it
        if len(self._compared) < head.n_kinds:
            self._kinds = staged.kind.unique().tolist()
            self.trusted = self._compared.issuperset(self._kinds)
        where = BoxPositions(staged.frame, staged.row, staged.column, staged.kind)
        tangents = (
            None
            if point.tangents is None or not point.tangents.ends
            else point.tangents.of(staged.features)
        )
        with matrix_precision(self.precision):
            if staged.features.device.type != "cpu":
                return Found(
                    *self._on_device(head, staged.features, where, staged.decode, tangents)
                )
            pixels, plan = plan_shared_cells(staged.features, where, head.radius, head.reaches)
            found = head_covariance(head, plan, pixels, tangents=tangents)
            return Found(
                *self._decoded(
                    *found, lambda numbers: staged.decode(numbers, where.row, where.column)
                )
            )

    def _on_device(
        self,
        head: HeadWeights,
        features: Tensor,
        where: BoxPositions,
        decode: Decode,
        tangents: Tensor | None,
    ) -> list[Tensor]:
        """On a GPU: sizes are rounded up, and every size that was met is kept as a graph."""
        m = len(where.kind)
        size = _bucket(m, 32)
        if size not in self._fixed:
            self._fixed[size] = Sized.of(size, head, features, where.kind)
        fixed = self._fixed[size]
        most = _bucket(
            int((where.kind.unsqueeze(1) == fixed.kinds).sum(0).amax()), 8
        )  # one look at the device
        packed = fixed.nowhere.clone()
        torch.stack([where.frame, where.row, where.column, where.kind], out=packed[:, :m])

        def run(features: Tensor, packed: Tensor, *tangents: Tensor) -> Many:
            own = BoxPositions(*packed)
            group = group_by_kind(own.kind, head.n_kinds, most)
            pixels, plan = plan_own_cells(
                features, own, head.radius, head.reaches, group, fixed.windows
            )
            found = head_covariance(head, plan, pixels, *tangents)
            return self._decoded(*found, lambda values: decode(values, own.row, own.column))

        given = (features, packed) if tangents is None else (features, packed, tangents)
        made = run(*given) if self._graphs is None else self._graphs(most, run, *given)
        return [tensor[:m].clone() for tensor in made]  # the next frame writes over the graph's

    def draw(self, etas: dict[str, Tensor]) -> None:
        """Other directions from here on; what has been compared stays so."""
        self.etas, self._stale, self._graphs = etas, True, None

    def _decoded(
        self,
        found: Tensor,
        numbers: Tensor,
        below: Tensor | None,
        decode: Callable[[Tensor], Tensor],
    ) -> Many:
        """Of the numbers' covariance, or derivatives, and of their derivatives along what lies below, those of the boxes."""
        J = decode_jacobian(numbers, decode).to(found.dtype)
        part = J @ found if self.etas is not None else J @ found @ J.transpose(1, 2)
        return (part,) if below is None else (part, J @ below)

    def _ready(self, staged: HeadStages, names: dict[int, str]) -> HeadWeights | None:
        layers = tuple(
            id(layer)
            for stage in (*staged.stem, *staged.branches)
            for row in stage.layers
            for layer in row
        )
        if layers != self._layers:
            self._prepared, self._layers = (
                build_head_weights(staged, self.posterior, names, self.etas, self.tolerance),
                layers,
            )
            self._compared.clear()
            self._fixed.clear()
            self._graphs = (
                None if self._graphs is None else Graphs()
            )  # those at hand belong to other weights
            self.trusted = False
            self.ends = (
                frozenset(id(layer.weight) for row in staged.stem[0].layers for layer in row)
                if staged.stem
                else frozenset()
            )
        elif self._stale:
            self._prepared = build_head_weights(
                staged, self.posterior, names, self.etas, self.tolerance
            )
        self._stale = False
        return self._prepared

    def parameters(self) -> set[str]:
        """Of the posterior, those that the stages account for."""
        return set() if self._prepared is None else self._prepared.parameters

    def compare(self, fast: Tensor, plain: Tensor, below: list[str]) -> None:
        """Both ways must agree on every box, in less than float32 on most; if they do, the kinds seen are trusted from here on."""
        off = (fast - plain).flatten(1).norm(dim=1) / plain.flatten(1).norm(dim=1).clamp(min=1e-30)
        allowed = 0 if self.precision == "float32" else len(off) // 4
        if not int((off <= _SLACK).sum()) >= len(off) - allowed:
            row = int(off.argmax())
            raise BoxcovError(
                f"stages() contradicts instances() or decode(): box {row} has {fast[row].diagonal().tolist()} by stages, "
                f"{plain[row].diagonal().tolist()} without; is a stage missing, or its norm or activation another?"
            )
        self._compared.update(self._kinds)
        self.below = below
        self.trusted = True


def _bucket(count: int, step: int) -> int:
    """Rounded up to a multiple of ``step``, of larger ones for large counts: no more than an eighth is added beyond 8 steps.

    >>> [_bucket(n, 32) for n in (1, 97, 300, 500)]
    [32, 128, 320, 512]
    """
    while count > 8 * step:
        step *= 2
    return -(-count // step) * step
