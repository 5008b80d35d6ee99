"""What static graphs need of a detector: fixed shapes, and a selection padded to one size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from boxcov.errors import BoxcovError, check_whole, join_names

if TYPE_CHECKING:
    from boxcov.detector import Detector, Selection

# The longest chain of boxes, each suppressing the next, that ``static_nms`` resolves.
NMS_ROUNDS = 16
_TOLERANCE = 1e-3  # relative difference of a number of ``select_static`` and of ``select``
_TIE = 1e-5  # relative difference of scores that rounding may reverse


@dataclass(frozen=True)
class StaticLimits:
    """The sizes of a static graph; ``StaticSelection.left_off`` counts what exceeds them.

    >>> StaticLimits(boxes=50).candidates
    256
    """

    boxes: int = 100  # reported boxes, by descending score
    candidates: int = 256  # before NMS: per task of a CenterPoint, per image of a YOLOX
    pairs: int = 8192  # near candidates whose rotated overlap is computed

    def __post_init__(self) -> None:
        for name in ("boxes", "candidates", "pairs"):
            check_whole(name, getattr(self, name))


@dataclass(frozen=True)
class StaticSelection:
    """The instances of ``Detector.select``, in its order, in the first ``count`` of n rows.

    ``kind`` and ``of_kind`` serve exact covariances if ``instances()`` returns several groups, for
    example one per level of a pyramid: each kind is then computed for all rows.

    >>> from dataclasses import replace
    >>> from boxcov import Selection
    >>> cell = torch.tensor([4, 2, 0])  # 0 to 3 on the fine level, 4 on the coarse one
    >>> own = Selection(0 * cell, torch.tensor([0.9, 0.6, 0.0]), 0 * cell, where=cell)
    >>> of_kind = tuple(replace(own, where=cell.clamp(*cells)) for cells in ((0, 3), (4, 4)))
    >>> static = StaticSelection(own, torch.tensor(2), torch.tensor(0), (cell > 3).long(), of_kind)
    >>> static.kind, [selection.where.tolist() for selection in static.of_kind]
    (tensor([1, 0, 0]), [[3, 2, 0], [4, 4, 4]])
    >>> static.valid
    tensor([ True,  True, False])
    """

    selection: Selection  # n rows; those from ``count`` on are padding, at arbitrary cells
    count: Tensor  # () number of boxes
    left_off: Tensor  # () candidates, pairs and boxes beyond the limits; 0: the boxes are complete
    kind: Tensor | None = None  # (n,) the group of each row, if instances() has several groups
    of_kind: tuple[Selection, ...] = ()  # for each kind, the same rows as if all were of that kind

    @property
    def valid(self) -> Tensor:
        """Whether each row is a box (n,)."""
        return torch.arange(len(self.selection), device=self.count.device) < self.count


class FusedNetwork(Protocol):
    """A network for deployment, equal to the detector's up to rounding."""

    def pack(self, inputs: Any) -> tuple[Tensor, ...] | None:
        """Return inputs as tensors of fixed shapes; None if they are beyond the limits."""

    def __call__(self, *packed: Tensor) -> tuple[Any, Tensor]:
        """Return the raw outputs, and a count () that is 0 if nothing was left off."""

    def signal_inputs(self, *packed: Tensor) -> Tensor:
        """Return what ``Detector.signal_inputs`` does."""


def static_nms(suppresses: Tensor) -> tuple[Tensor, Tensor]:
    """Return which boxes greedy NMS keeps (G, k), and whether ``NMS_ROUNDS`` rounds were enough ().

    suppresses: (G, k, k) is 1 where the row's box suppresses the column's, boxes by descending
    score. The result is that of ``greedy_nms``, but no shape or branch depends on the data.

    >>> from boxcov.detectors.boxes import iou
    >>> boxes = torch.tensor([[0.0, 0.0, 4.0, 4.0], [2.0, 0.0, 6.0, 4.0], [4.0, 0.0, 8.0, 4.0]])
    >>> suppresses = (iou(boxes[:, None], boxes) > 0.3).triu(1)  # by descending score
    >>> static_nms(suppresses[None].float())  # a removed box removes no other
    (tensor([[ True, False,  True]]), tensor(True))
    """
    kept = ones = torch.ones_like(suppresses[:, :1])  # (G, 1, k)
    before = kept
    for _ in range(NMS_ROUNDS):
        before, kept = kept, torch.baddbmm(ones, kept, suppresses, alpha=-1).relu()
    return kept[:, 0] > 0.5, (kept == before).all()


def best_rows(scores: Tensor, kept: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the indices of the n best ``kept`` scores (k,), and two counts.

    The counts are the number of valid indices, and of kept scores that did not fit into n rows.

    >>> best_rows(torch.tensor([0.2, 0.9, 0.5]), torch.tensor([True, False, True]), 1)
    (tensor([2]), tensor(1), tensor(1))
    """
    n, k = min(n, len(scores)), len(scores)
    key = torch.where(kept, scores, -1.0)
    total = kept.long().sum()
    counts = total.clamp(max=n), (total - n).clamp(min=0)
    if k > 8 * n:  # pairs of all scores would be too many
        best = key.topk(n).indices.sort().values
        return best[best_rows(key[best], kept[best], n)[0]], *counts
    place = torch.arange(k, device=scores.device)
    # equal scores keep their order, as in ``Detector.select``; ONNX has no stable sort
    is_ahead = (key.unsqueeze(0) > key.unsqueeze(1)) | (
        (key.unsqueeze(0) == key.unsqueeze(1)) & (place.unsqueeze(0) < place.unsqueeze(1))
    )
    rank = is_ahead.long().sum(1)
    index = torch.zeros_like(place).scatter(0, rank, place)[:n]
    return index, *counts


def first_rows(scores: Tensor, kept: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return what ``best_rows`` returns, with the valid indices in ascending order.

    >>> first_rows(torch.tensor([0.2, 0.9, 0.5]), torch.tensor([True, False, True]), 2)
    (tensor([0, 2]), tensor(2), tensor(0))
    """
    index, count, excess = best_rows(scores, kept, n)
    row = torch.arange(len(index), device=index.device)
    order = torch.where(row < count, index, len(scores) + row).argsort()
    return index[order], count, excess


def check_static_selection(detector: Detector, raw: Any, static: StaticSelection) -> None:
    """Raise if a static selection of one frame has other boxes, scores or labels than ``select``.

    Their order does not matter. A frame beyond the limits is not compared.
    """
    if int(static.left_off):
        return
    name, own = f"{type(detector).__name__}.select_static()", static.selection
    plain, boxes = detector.select(raw), detector.decode(raw, own)
    expected = box_rows(detector.decode(raw, plain), plain.scores, plain.labels)
    found = box_rows(boxes, own.scores, own.labels)[: int(static.count)]
    hint = tie_hint(own.scores[: len(found)])
    if len(found) != len(expected):
        counts = f"{len(found)} boxes, and select() {len(expected)}"
        raise BoxcovError(f"{name} reports {counts}: correct it{hint}")
    # products would lose the digits that tell near boxes apart
    exact = "donot_use_mm_for_euclid_dist"
    if len(found):
        found = found[torch.cdist(expected, found, compute_mode=exact).argmin(1)]
    differs = _differs(found, expected)
    columns = {"boxes": differs[:, :-2], "scores": differs[:, -2], "labels": differs[:, -1]}
    if wrong := join_names([what for what, column in columns.items() if bool(column.any())]):
        raise BoxcovError(f"{name}: its {wrong} are not those of select(): correct it{hint}")
    for kind, selection in enumerate(static.of_kind):
        rows = (static.kind == kind) & static.valid
        if bool(_differs(detector.decode(raw, selection)[rows], boxes[rows]).any()):
            raise BoxcovError(
                f"{name}: the boxes of of_kind[{kind}] are not those of the selection in the rows "
                f"whose kind is {kind}: correct it"
            )


def _differs(found: Tensor, expected: Tensor) -> Tensor:
    return ~((found - expected).abs() <= _TOLERANCE * (1 + expected.abs()))


def box_rows(boxes: Tensor, scores: Tensor, labels: Tensor) -> Tensor:
    """Return boxes, scores and labels side by side (m, D + 2)."""
    return torch.cat([boxes.double(), scores[:, None].double(), labels[:, None].double()], 1)


def tie_hint(scores: Tensor) -> str:
    """Return the advice for a frame in which equal scores leave the choice of boxes undefined."""
    ties = int((scores.diff().abs() <= _TIE * scores[1:]).sum())
    if not ties:
        return ""
    return (
        f". {ties} boxes of the example have the score of another box, so that rounding decides "
        "which of them are reported: take a real frame as the example"
    )


def check_one_frame(batch: int) -> None:
    """Raise unless there is one frame: the rows of a static selection are those of one."""
    if batch != 1:
        raise BoxcovError(f"a static selection takes one image, got a batch of {batch}")
