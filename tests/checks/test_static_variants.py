"""A select_static() with other rules than select() is found, also if the frame does not show it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import boxcov
from boxcov import Selection, check
from boxcov.checks import Finding
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


def spots(**rules: Any) -> tuple[boxcov.Detector, Tensor]:
    """A detector and an image of three bright cells."""
    image = 0.02 * torch.rand(1, 2, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    for label, row, column in ((0, 3, 4), (1, 4, 19), (0, 19, 12)):
        image[0, label, row, column] = 1.0 - 0.01 * row
    detector = boxcov.wrap(
        Spots().eval(),
        select=select,
        decode=decode,
        loss=lambda model, raw, targets: sum(one.square().sum((1, 2, 3)) for one in raw.values()),
        select_static=partial(select_static, **rules),
        parts={"head": ("score", "sides")},
        box_fields=("x1", "y1", "x2", "y2"),
        classes=("disk", "square"),
    )
    return detector, image


def finding(**rules: Any) -> Finding:
    detector, image = spots(**rules)
    return check(detector, (image, None))["select_static"]


def test_the_same_rules_are_not_refused() -> None:
    found = finding()
    assert found.passed, found.seen
    assert "in this frame and 1" in found.seen  # at least ten variants are within the limits


@pytest.mark.parametrize(
    "rules",
    [{"threshold": 0.3}, {"threshold": 0.1}, {"overlap": 0.6}, {"per_class": False}],
    ids=str,
)
def test_other_rules_than_those_of_select_are_named(rules: dict[str, Any]) -> None:
    found = finding(**rules)
    assert found.passed is False, found.seen
    assert "This is so for other raw outputs than this frame's" in found.seen
    assert "threshold, NMS overlap, classes" in found.seen


@pytest.mark.parametrize("rules", [{}, {"threshold": 0.3}, {"overlap": 0.6}], ids=str)
def test_an_export_refuses_other_rules(tmp_path, rules: dict[str, Any]) -> None:
    onnx = pytest.importorskip("boxcov.export.onnx")
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    detector, image = spots(**rules)
    posterior = boxcov.fit(detector, [(image, None)], prior_precision=1.0)
    path, limits = tmp_path / "spots.onnx", StaticLimits(boxes=5, candidates=20)
    if not rules:
        onnx.export(detector, posterior, path, image, 2, limits=limits)
        return
    with pytest.raises(boxcov.BoxcovError, match=r"select_static\(\).*other raw outputs than this"):
        onnx.export(detector, posterior, path, image, 2, limits=limits)
    assert not path.exists()
