"""A detector of bright cells: sure boxes, far from each other."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import boxcov
from boxcov import Selection
from boxcov.detectors.boxes import iou
from boxcov.static_selection import StaticLimits, StaticSelection, best_rows, static_nms

SIZE, REACH = 24, 4.0  # cells; from a cell's centre to the sides of its box


class Spots(nn.Module):
    """Bright cells are objects of two classes: sure ones, far from each other."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.sides = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 4, 1)
        with torch.no_grad():
            self.score.weight.copy_(8 * torch.eye(2)[:, :, None, None])
            self.score.bias.fill_(-4.0)
            self.sides.weight.mul_(0.1)
            self.sides.bias.fill_(REACH)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        return {"score": self.score(image), "sides": self.sides(image)}


def candidates(raw: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Scores (n,), labels (n,) and boxes (n, 4) of all cells of both classes."""
    index = torch.arange(2 * SIZE * SIZE)
    where = (0 * index, index % SIZE**2)
    found = Selection(where[0], raw["score"][0].flatten().sigmoid(), index // SIZE**2, where)
    return found.scores, found.labels, decode(None, raw, found)


def decode(model: Any, raw: dict[str, Tensor], selection: Selection) -> Tensor:
    frame, cell = selection.where
    left, top, right, bottom = raw["sides"].flatten(2)[frame, :, cell].abs().unbind(1)
    x, y = cell % SIZE, cell // SIZE
    return torch.stack([x - left, y - top, x + right, y + bottom], 1)


def select(model: Any, raw: dict[str, Tensor]) -> Selection:
    scores, labels, boxes = candidates(raw)
    rows: list[int] = []
    for row in scores.argsort(descending=True).tolist():
        same = [i for i in rows if labels[i] == labels[row]]
        if scores[row] > 0.2 and not bool((iou(boxes[row], boxes[same]) > 0.5).any()):
            rows.append(row)
    kept = torch.tensor(rows, dtype=torch.long)
    return Selection(0 * kept, scores[kept], labels[kept], where=(0 * kept, kept % SIZE**2))


def select_static(
    model: Any,
    raw: dict[str, Tensor],
    limits: StaticLimits,
    *,
    threshold: float = 0.2,
    overlap: float = 0.5,
    per_class: bool = True,
) -> StaticSelection:
    scores, labels, boxes = candidates(raw)
    best, count, beyond = best_rows(scores, scores > threshold, limits.candidates)
    valid = torch.arange(len(best)) < count
    close = (iou(boxes[best, None], boxes[best]) > overlap) & valid & valid[:, None]
    if per_class:
        close = close & (labels[best, None] == labels[best])
    kept, enough = static_nms(close.triu(1)[None].float())
    rows, count, excess = best_rows(scores[best], kept[0] & valid, limits.boxes)
    row = best[rows]
    found = Selection(0 * row, scores[row], labels[row], where=(0 * row, row % SIZE**2))
    return StaticSelection(found, count, beyond + excess + (~enough).long())


def loss(model: Any, raw: dict[str, Tensor], targets: Any, *, background: int = 0) -> Tensor:
    """The sum over cells, one value per frame; ``background`` classes come before the others."""
    wanted = torch.zeros_like(raw["score"])
    for frame, target in enumerate(targets or []):
        centre = (target["boxes"][:, :2] + target["boxes"][:, 2:]) / 2
        column, row = centre.round().long().clamp(0, SIZE - 1).unbind(1)
        wanted[frame, (target["labels"] + background) % 2, row, column] = 1.0
    score = F.binary_cross_entropy_with_logits(raw["score"], wanted, reduction="none")
    return score.sum((1, 2, 3)) + raw["sides"].square().mean((1, 2, 3))


def spots(background: int = 0, **rules: Any) -> tuple[boxcov.Detector, Tensor]:
    """A detector and an image of three bright cells."""
    image = 0.02 * torch.rand(1, 2, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    for label, row, column in ((0, 3, 4), (1, 4, 19), (0, 19, 12)):
        image[0, label, row, column] = 1.0 - 0.01 * row
    detector = boxcov.wrap(
        Spots().eval(),
        select=select,
        decode=decode,
        loss=partial(loss, background=background),
        select_static=partial(select_static, **rules),
        parts={"head": ("score", "sides")},
        box_fields=("x1", "y1", "x2", "y2"),
        classes=("disk", "square"),
    )
    return detector, image
