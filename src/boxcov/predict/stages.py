"""``ExactGLM``'s fast way through a staged head: prepared once, compared with the plain way on the first boxes of every kind."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from boxcov.curvature.posterior import Posterior
from boxcov.errors import BoxcovError
from boxcov.predict.graphs import Graphs, Precision, matrix_precision
from boxcov.predict.linearise import Point
from boxcov.predict.plan import Where, own_cells, shared_cells
from boxcov.predict.prepared import Prepared, prepared
from boxcov.predict.stacked import decoded, raw_covariance
from boxcov.staged import Staged

Decode = Callable[[Tensor, Tensor, Tensor], Tensor]
_SLACK = 1e-2
_OUTLIERS = 0.1  # share of the boxes


class Stages:
    """What is known of a detector's stages so far."""

    def __init__(self, posterior: Posterior, precision: Precision = "float32", graphs: bool = True) -> None:
        self.posterior, self.precision = posterior, precision
        self._graphs = Graphs() if graphs else None
        self.below: list[str] = []  # layers of the posterior that lie below the head
        self.trusted = False  # whether the boxes of the last frame were of kinds that have been compared
        self._compared: set[int] = set()
        self._kinds: list[int] = []
        self._prepared: Prepared | None = None
        self._layers: tuple[int, ...] = ()  # what was prepared, by id

    @property
    def suffice(self) -> bool:
        """Whether nothing else is needed for a frame: all kinds have been compared, and the posterior does not reach below the head."""
        return self.trusted and not self.below and self._prepared is not None and len(self._compared) == self._prepared.kinds

    def covariance(self, point: Point) -> Tensor | None:
        """What the head's layers add (m, D, D); None if the detector has no stages, or none that can be stacked."""
        linearised = point.linearised
        if point.boxes.dtype not in (torch.float32, torch.float64):
            return None
        staged = linearised.shadow.staged(point.raw, point.selection)
        if staged is None or staged.features.dtype != point.boxes.dtype:
            return None
        head = self._ready(staged, linearised.names)
        if head is None:
            return None
        if len(self._compared) < head.kinds:
            self._kinds = staged.kind.unique().tolist()
            self.trusted = self._compared.issuperset(self._kinds)
        where = Where(staged.frame, staged.row, staged.column, staged.kind)
        if staged.features.device.type == "cpu":
            pixels, plan = shared_cells(staged.features, where, head.radius, head.reaches)
            return decoded(*raw_covariance(head, plan, pixels), lambda numbers: staged.decode(numbers, where.row, where.column))
        with matrix_precision(self.precision):
            return self._on_device(head, staged.features, where, staged.decode)

    def _on_device(self, head: Prepared, features: Tensor, where: Where, decode: Decode) -> Tensor:
        """On a GPU: sizes are rounded up, and every size that was met is kept as a graph."""
        m = len(where.kind)
        most = _bucket(int(torch.bincount(where.kind, minlength=head.kinds).max()), 8)
        packed = torch.zeros(4, _bucket(m, 32), dtype=where.kind.dtype, device=where.kind.device)
        packed[3] = head.kinds  # boxes that fill up are of no kind
        torch.stack([where.frame, where.row, where.column, where.kind], out=packed[:, :m])

        def run(features: Tensor, packed: Tensor) -> Tensor:
            own = Where(*packed)
            pixels, plan = own_cells(features, own, head.radius, head.reaches, head.kinds, most)
            found = raw_covariance(head, plan, pixels, half=self.precision == "half")
            return decoded(*found, lambda values: decode(values, own.row, own.column))

        if self._graphs is None:
            return run(features, packed)[:m]
        return self._graphs((features.shape, packed.shape, most), run, features, packed)[:m]

    def _ready(self, staged: Staged, names: dict[int, str]) -> Prepared | None:
        layers = tuple(id(layer) for stage in (*staged.stem, *staged.branches) for row in stage.layers for layer in row)
        if layers != self._layers:
            self._prepared, self._layers = prepared(staged, self.posterior, names), layers
            self._compared.clear()
            self._graphs = None if self._graphs is None else Graphs()  # those at hand belong to other weights
            self.trusted = False
        return self._prepared

    def compare(self, fast: Tensor, plain: Tensor, below: list[str]) -> None:
        """Both ways must agree; if they do, the kinds seen are trusted from here on.

        A few boxes may be further apart: a heading whose sine and cosine are nearly zero magnifies any rounding.
        """
        off = (fast - plain).flatten(1).norm(dim=1) / plain.flatten(1).norm(dim=1).clamp(min=1e-30)
        if bool(off.median() > _SLACK) or bool((off > _SLACK).float().mean() > _OUTLIERS):
            row = int(off.argmax())
            raise BoxcovError(
                f"staged() contradicts instances(): box {row} has variances {fast[row].diagonal().tolist()} by stages, "
                f"{plain[row].diagonal().tolist()} by instances; is a stage missing, or its norm or activation another?"
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
