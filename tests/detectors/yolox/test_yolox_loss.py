"""SimOTA and the loss against plain loops over objects and cells."""

from __future__ import annotations

from math import exp, log

import pytest
import torch
from torch import Tensor

from boxcov.detectors.boxes import corners
from boxcov.detectors.yolox.loss import CellTargets
from boxcov.errors import BoxcovError
from helpers.yolox_cases import images, objects, small

CELLS = [
    (stride, row, column)
    for stride, rows, columns in ((8, 8, 12), (16, 4, 6), (32, 2, 3))
    for row in range(rows)
    for column in range(columns)
]


def sigmoid(x: float) -> float:
    return 1 / (1 + exp(-x))


def slow_iou(a: list[float], b: list[float]) -> float:
    w, h = (
        max(
            0.0,
            min(a[i] + a[i + 2] / 2, b[i] + b[i + 2] / 2)
            - max(a[i] - a[i + 2] / 2, b[i] - b[i + 2] / 2),
        )
        for i in (0, 1)
    )
    return w * h / (a[2] * a[3] + b[2] * b[3] - w * h)


def predicted(values: list[float], cell: int) -> list[float]:
    stride, row, column = CELLS[cell]
    return [
        (column + values[0]) * stride,
        (row + values[1]) * stride,
        exp(values[2]) * stride,
        exp(values[3]) * stride,
    ]


def slow_assignment(
    values: list[list[float]], boxes: list[list[float]], labels: list[int]
) -> dict[int, tuple[int, float]]:
    """For each cell that is to find something: which object, and their overlap."""
    reach = {}
    for cell, (stride, row, column) in enumerate(CELLS):
        x, y = (column + 0.5) * stride, (row + 0.5) * stride
        reach[cell] = [
            abs(x - box[0]) < 1.5 * stride and abs(y - box[1]) < 1.5 * stride for box in boxes
        ]
    cells = [cell for cell in reach if any(reach[cell])]
    iou = {
        (n, cell): slow_iou(box, predicted(values[cell], cell))
        for n, box in enumerate(boxes)
        for cell in cells
    }
    cost = {}
    for n, label in enumerate(labels):
        for cell in cells:
            entropy = 0.0
            for c in range(len(values[cell]) - 5):
                p = (sigmoid(values[cell][5 + c]) * sigmoid(values[cell][4])) ** 0.5
                entropy -= log(p) if c == label else log(1 - p)
            cost[n, cell] = entropy - 3 * log(iou[n, cell] + 1e-8) + (0 if reach[cell][n] else 1e6)
    wanted: dict[int, list[int]] = {}
    for n in range(len(boxes)):
        k = max(1, int(sum(sorted((iou[n, cell] for cell in cells), reverse=True)[:10])))
        for cell in sorted(cells, key=lambda cell: cost[n, cell])[:k]:
            wanted.setdefault(cell, []).append(n)
    chosen = {
        cell: ns[0] if len(ns) == 1 else min(range(len(boxes)), key=lambda n: cost[n, cell])
        for cell, ns in wanted.items()
    }
    return {cell: (n, iou[n, cell]) for cell, n in chosen.items()}


def slow_loss(values: list[list[float]], boxes: list[list[float]], labels: list[int]) -> float:
    found = slow_assignment(values, boxes, labels) if boxes else {}
    total = 0.0
    for cell, numbers in enumerate(values):
        total -= log(sigmoid(numbers[4] if cell in found else -numbers[4]))
    for cell, (n, iou) in found.items():
        stride, row, column = CELLS[cell]
        x, y, w, h = boxes[n]
        total += 5 * (1 - slow_iou(boxes[n], predicted(values[cell], cell)) ** 2)
        for value, target in zip(
            values[cell], (x / stride - column, y / stride - row, log(w / stride), log(h / stride))
        ):
            total += abs(value - target)
        for c, logit in enumerate(values[cell][5:]):
            share = iou if c == labels[n] else 0.0
            total -= share * log(sigmoid(logit)) + (1 - share) * log(sigmoid(-logit))
    return total / max(len(found), 1)


def centred(target: dict[str, Tensor]) -> list[list[float]]:
    low, high = target["boxes"][:, :2], target["boxes"][:, 2:]
    return torch.cat([(low + high) / 2, high - low], 1).tolist()


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 1), (1, 3), (2, 8), (3, 25), (4, 0)]
)  # 25 objects in 126 cells: many conflicts
def test_loss_is_that_of_the_loops(seed: int, count: int) -> None:
    detector, target = small(seed), objects(count, seed=seed)
    raw = detector(images(seed=seed))
    with torch.no_grad():
        raw["values"] += (
            torch.randn(
                raw["values"].shape,
                generator=torch.Generator().manual_seed(seed),
                dtype=torch.float64,
            )
            / 2
        )
    loss = detector.loss(raw, [target]).detach()
    assert loss.shape == (1,)
    assert float(loss) == pytest.approx(
        slow_loss(raw["values"][0].tolist(), centred(target), target["labels"].tolist())
    )


def test_each_image_has_its_own_loss() -> None:
    detector, batch = small(), images(3)
    targets = [objects(4, seed=1), objects(0), objects(2, seed=2)]
    together = detector.loss(detector(batch), targets)
    alone = [detector.loss(detector(batch[i : i + 1]), targets[i : i + 1]) for i in range(3)]
    torch.testing.assert_close(together, torch.cat(alone))


def test_an_object_out_of_reach_of_all_cells_is_not_found() -> None:
    detector = small()
    raw = detector(images())
    away = {"boxes": torch.tensor([[500.0, 500, 520, 520]]), "labels": torch.tensor([0])}
    torch.testing.assert_close(detector.loss(raw, [away]), detector.loss(raw, [objects(0)]))


def test_the_loss_has_a_gradient_for_every_weight() -> None:
    detector = small()
    detector.loss(detector(images()), [objects(25, seed=3)]).sum().backward()
    without = [
        name for name, p in detector.named_parameters() if p.grad is None or not bool(p.grad.any())
    ]
    assert without == []


def test_drawn_targets_look_like_the_predictions() -> None:
    detector = small()
    with torch.no_grad():
        raw = detector(images())
    generator = torch.Generator().manual_seed(0)
    draws = [detector.sample_targets(raw, generator)[0] for _ in range(300)]
    p = raw["values"][0, :, 4].sigmoid()
    often = torch.stack([torch.zeros(126).index_fill(0, draw.cell, 1) for draw in draws]).mean(0)
    assert float((often - p).abs().max()) < 6 * 0.5 / 300**0.5
    cell = int(often.argmax())
    boxes = torch.cat([draw.boxes[draw.cell == cell] for draw in draws])
    stride, _, column = CELLS[cell]
    noise = (
        torch.stack([boxes[:, 0] / stride - column, (boxes[:, 3] / stride).log()], 1)
        - raw["values"][0, cell, [0, 3]]
    )
    assert float((noise.abs().mean(0) - 1).abs().max()) < 0.35  # Laplace of width 1
    assert detector.loss(raw, [draws[0]]).isfinite().all()
    assert isinstance(draws[0], CellTargets)
    assert bool((corners(draws[0].boxes)[:, 2:] > corners(draws[0].boxes)[:, :2]).all())


@pytest.mark.parametrize(
    ("boxes", "labels", "message"),
    [
        (torch.zeros(1, 5), torch.zeros(1), r"shape \(n, 4\)"),
        (torch.tensor([[0.0, 0, 1, 1]]), torch.zeros(2), r"labels \(n,\), got \(1, 4\) and \(2,\)"),
        (torch.tensor([[0.0, 0, 1, 1]]), torch.tensor([3]), "labels from 3 to 3, but 3 classes"),
        (torch.tensor([[0.0, 0, 0, 1]]), torch.tensor([0]), "x1 < x2"),
        (torch.tensor([[0.0, 0, float("nan"), 1]]), torch.tensor([0]), "x1 < x2"),
    ],
)
def test_targets_that_make_no_sense(boxes: Tensor, labels: Tensor, message: str) -> None:
    detector = small()
    with pytest.raises(BoxcovError, match=f"targets of frame 0: .*{message}"):
        detector.loss(detector(images()), [{"boxes": boxes, "labels": labels}])


def test_as_many_targets_as_images() -> None:
    detector = small()
    with pytest.raises(BoxcovError, match="2 frames in the batch, but targets for 1"):
        detector.loss(detector(images(2)), [objects(1)])
    with pytest.raises(BoxcovError, match="frame 0: must be a dict with boxes and labels, got a s"):
        detector.loss(detector(images(2)), objects(1))
