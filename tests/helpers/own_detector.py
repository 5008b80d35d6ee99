"""A detector that boxcov has never seen, as a user would write it by the guide.

An anchor-free image detector in the manner of FCOS: two levels, side distributions, a learned scale
per level, an activation that is used twice, a dict as input and a float in the raw outputs that
decode() does not differentiate. The weights lie beside this file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import boxcov
from boxcov import Selection
from boxcov.detectors.boxes import iou
from boxcov.static_selection import StaticLimits, StaticSelection, best_rows, static_nms

CLASSES = ("disk", "square", "bar")
SIZE, STRIDES, BINS = 64, (4, 8), 6  # pixels; of a cell; of the distribution of a side
WEIGHTS = Path(__file__).with_name("own_detector.pt")


class Pyramid(nn.Module):
    """Backbone, a neck of two levels, and a head that both levels share."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 12, 3, 2, 1), nn.LeakyReLU(0.1))
        self.second = nn.Sequential(nn.Conv2d(12, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.third = nn.Sequential(nn.Conv2d(16, 24, 3, 2, 1), nn.BatchNorm2d(24), nn.ReLU())
        self.lateral = nn.ModuleList([nn.Conv2d(16, 16, 1), nn.Conv2d(24, 16, 1)])
        act = nn.ReLU()
        self.tower = nn.Sequential(
            nn.Conv2d(16, 16, 3, padding=1), act, nn.Conv2d(16, 16, 3, padding=1), act
        )
        self.score = nn.Conv2d(16, len(CLASSES), 3, padding=1)
        self.sides = nn.Conv2d(16, 4 * BINS, 3, padding=1)
        self.scale = nn.Parameter(torch.ones(len(STRIDES)))

    def forward(self, batch: dict[str, Tensor]) -> dict[str, object]:
        fine = self.second(self.first(batch["image"]))
        coarse = self.lateral[1](self.third(fine))
        fine = self.lateral[0](fine) + F.interpolate(coarse, scale_factor=2, mode="bilinear")
        towers = [self.tower(x) for x in (fine, coarse)]
        return {
            "score": [self.score(x) for x in towers],  # per level (B, C, H, W)
            "sides": [self.sides(x) * s for x, s in zip(towers, self.scale)],
            "size": batch["size"],  # (B, 2) height and width before padding
        }


def build(**other: Any) -> boxcov.Detector:
    """The detector with its trained weights."""
    model = Pyramid()
    model.load_state_dict(torch.load(WEIGHTS, weights_only=True))
    return boxcov.wrap(
        model.eval(),
        select=select,
        decode=other.pop("decode", decode),
        loss=loss,
        logits=logits,
        signals=signals,
        parts={
            "head": ("tower", "score", "sides"),
            "neck": "lateral",
            "backbone": ("first", "second", "third"),
        },
        box_fields=("x1", "y1", "x2", "y2"),
        classes=CLASSES,
        **other,
    )


def build_static() -> boxcov.Detector:
    """The same detector with what a file of fixed shapes needs."""
    return build(decode=decode_tensors, select_static=select_static)


def cells(like: Tensor, level: int) -> tuple[Tensor, Tensor]:
    """x and y of the centres of a level's cells, row by row."""
    rows, columns = like.shape[2:]
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return ((v.flatten() + 0.5).to(like.device) * STRIDES[level] for v in (x, y))


def distances(logits: Tensor, stride: Tensor | float) -> Tensor:
    """Mean of each side's distribution: (..., 4 * BINS) to (..., 4) pixels."""
    p = logits.unflatten(-1, (4, BINS)).softmax(-1)
    return (p * torch.arange(BINS).to(p)).sum(-1) * stride


def boxes_at(sides: Tensor, x: Tensor, y: Tensor, stride: Tensor) -> Tensor:
    """Boxes x1 y1 x2 y2 (n, 4) around cells."""
    left, top, right, bottom = distances(sides, stride[:, None]).unbind(1)
    return torch.stack([x - left, y - top, x + right, y + bottom], 1)


def flat(maps: list[Tensor]) -> Tensor:
    """All cells of all levels: (B, n, channels)."""
    return torch.cat([m.flatten(2) for m in maps], 2).transpose(1, 2)


def places(raw: dict) -> tuple[Tensor, Tensor, Tensor]:
    """x, y and stride of all cells of all levels, each (n,)."""
    found = [(*cells(m, i), STRIDES[i]) for i, m in enumerate(raw["score"])]
    x, y = (torch.cat([level[i] for level in found]) for i in (0, 1))
    return x, y, torch.cat([torch.full_like(level[0], level[2]) for level in found])


def nms(boxes: Tensor, scores: Tensor, overlap: float) -> Tensor:
    """Rows that are kept, by falling score."""
    low, high = boxes[:, None, :2].maximum(boxes[:, :2]), boxes[:, None, 2:].minimum(boxes[:, 2:])
    both, area = (high - low).clamp(min=0).prod(2), (boxes[:, 2:] - boxes[:, :2]).prod(1)
    close = both > overlap * (area[:, None] + area - both)
    kept: list[int] = []
    for row in scores.argsort(descending=True).tolist():
        if not any(close[row, other] for other in kept):
            kept.append(row)
    return torch.tensor(kept, dtype=torch.long)


def select(model: Pyramid, raw: dict, threshold: float = 0.3) -> Selection:
    scores = flat(raw["score"]).sigmoid()  # (B, n, C)
    sides, (x, y, stride) = flat(raw["sides"]), places(raw)
    frame, cell, label = (scores > threshold).nonzero(as_tuple=True)
    score = scores[frame, cell, label]
    boxes = boxes_at(sides[frame, cell], x[cell], y[cell], stride[cell])
    apart = boxes + 1e3 * (frame * len(CLASSES) + label)[:, None]  # per frame and class
    kept = nms(apart, score, 0.5)
    frame, cell, label = frame[kept], cell[kept], label[kept]
    return Selection(frame, score[kept], label, where=(frame, cell))


def decode(model: Pyramid, raw: dict, selection: Selection) -> Tensor:
    frame, cell = selection.where
    x, y, stride = places(raw)
    boxes = boxes_at(flat(raw["sides"])[frame, cell], x[cell], y[cell], stride[cell])
    sizes = torch.tensor([[w, h, w, h] for h, w in raw["size"].tolist()])
    return torch.minimum(boxes.clamp(min=0), sizes.to(boxes)[frame])


def decode_tensors(model: Pyramid, raw: dict, selection: Selection) -> Tensor:
    """``decode`` that reads no value."""
    frame, cell = selection.where
    x, y, stride = places(raw)
    boxes = boxes_at(flat(raw["sides"])[frame, cell], x[cell], y[cell], stride[cell])
    return torch.minimum(boxes.clamp(min=0), raw["size"].flip(1).repeat(1, 2)[frame])


def select_static(model: Pyramid, raw: dict, limits: StaticLimits) -> StaticSelection:
    scores, sides = flat(raw["score"])[0].sigmoid().flatten(), flat(raw["sides"])[0]
    best, count, beyond = best_rows(scores, scores > 0.3, limits.candidates)
    cell, label, (x, y, stride) = best // len(CLASSES), best % len(CLASSES), places(raw)
    boxes, valid = boxes_at(sides[cell], x[cell], y[cell], stride[cell]), torch.arange(len(best))
    valid = valid < count
    close = (iou(boxes[:, None], boxes) > 0.5) & (label[:, None] == label)
    kept, enough = static_nms((close & valid & valid[:, None]).triu(1)[None].float())
    rows, count, excess = best_rows(scores[best], kept[0] & valid, limits.boxes)
    frame = torch.zeros_like(rows)
    found = Selection(frame, scores[best[rows]], label[rows], where=(frame, cell[rows]))
    return StaticSelection(found, count, beyond + excess + (~enough).long())


def logits(model: Pyramid, raw: dict, selection: Selection) -> Tensor:
    frame, cell = selection.where
    return flat(raw["score"])[frame, cell, selection.labels]


def signals(model: Pyramid, raw: dict, selection: Selection) -> dict[str, Tensor]:
    frame, cell = selection.where
    p = flat(raw["sides"])[frame, cell].unflatten(-1, (4, BINS)).softmax(-1)
    k = torch.arange(BINS).to(p)
    spread = (p * (k - (p * k).sum(-1, keepdim=True)) ** 2).sum(-1)  # (m, 4) variances
    named = {f"spread {side}": spread[:, i] for i, side in enumerate(("x1", "y1", "x2", "y2"))}
    return {name: (v + 1e-6).log() for name, v in named.items()}


def loss(model: Pyramid, raw: dict, targets: list[dict[str, Tensor]]) -> Tensor:
    x, y, stride = places(raw)
    scores, sides = flat(raw["score"]), flat(raw["sides"])
    losses = []
    for b, target in enumerate(targets):
        boxes, hot = target["boxes"].to(x), torch.zeros_like(scores[b])
        centre = (boxes[:, :2] + boxes[:, 2:]) / 2  # (k, 2)
        extent = (boxes[:, 2:] - boxes[:, :2]).amax(1)
        level = torch.tensor(STRIDES).to(x)[(extent > 24).long()]  # large ones on the coarse level
        near = ((x - centre[:, :1]).abs() <= level[:, None]) & (
            (y - centre[:, 1:]).abs() <= level[:, None]
        )
        owner, cell = (near & (stride == level[:, None])).nonzero(as_tuple=True)
        hot[cell, target["labels"][owner]] = 1
        of_score = F.binary_cross_entropy_with_logits(scores[b], hot, 1 + 4 * hot, reduction="sum")
        found = boxes_at(sides[b, cell], x[cell], y[cell], stride[cell])
        of_box = F.smooth_l1_loss(found, boxes[owner], reduction="sum")
        losses.append((of_score + of_box) / max(len(cell), 1))
    return torch.stack(losses)


# frames: preprocessing is done here, outside of the model


class Pictures:
    """Pictures with up to four objects, drawn from a seed: (inputs, targets)."""

    def __init__(self, seed: int, count: int) -> None:
        self.seed, self.count = seed, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        g = torch.Generator().manual_seed(1_000_003 * self.seed + index)
        image = 0.25 * torch.rand(3, SIZE, SIZE, generator=g)
        v, u = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
        labels, boxes = [], []
        for _ in range(int(torch.randint(1, 5, (), generator=g))):
            label = int(torch.randint(len(CLASSES), (), generator=g))
            w = float(8 + 24 * torch.rand((), generator=g))
            h = w * (0.4 if label == 2 else 1.0)
            x, y = (SIZE * torch.rand(2, generator=g)).tolist()
            inside = ((u - x).abs() <= w / 2) & ((v - y).abs() <= h / 2)
            if label == 0:
                inside = (u - x) ** 2 + (v - y) ** 2 <= w * w / 4
            colour = 0.4 + 0.6 * torch.rand(3, 1, 1, generator=g)
            image = torch.where(inside, colour, image)
            box = torch.tensor([x - w / 2, y - h / 2, x + w / 2, y + h / 2]).clamp(0, SIZE)
            if bool((box[2:] - box[:2] > 4).all()):
                labels.append(label)
                boxes.append(box)
        target = {
            "boxes": torch.stack(boxes) if boxes else torch.zeros(0, 4),
            "labels": torch.tensor(labels, dtype=torch.long),
        }
        return inputs_of(image + 0.1 * torch.randn(image.shape, generator=g)), [target]


def inputs_of(image: Tensor) -> dict[str, Tensor]:
    """An image (3, H, W) as the model reads it."""
    size = torch.tensor([image.shape[1:]], dtype=torch.float32)
    return {"image": (image[None] - 0.3) / 0.3, "size": size}


def frames(split: str) -> Pictures:
    """The frames of a split."""
    return Pictures({"train": 0, "val": 1, "test": 2}[split], {"train": 256}.get(split, 60))


def read(path: Path) -> dict[str, Tensor]:
    """The inputs of one file."""
    return inputs_of(torch.load(path, weights_only=True))


def train(path: Path, steps: int = 120, count: int = 256) -> None:
    """Train the detector on ``count`` pictures and write its weights."""
    from boxcov.data import batched

    torch.manual_seed(0)
    model, batches = Pyramid(), [*batched(Pictures(0, count), 8)]
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for step in range(steps):
        inputs, targets = batches[step % len(batches)]
        optimizer.zero_grad()
        loss(model, model(inputs), targets).mean().backward()
        optimizer.step()
    torch.save(model.state_dict(), path)
