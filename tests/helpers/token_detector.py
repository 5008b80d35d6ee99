"""A second detector that boxcov has never seen, as a user would write it by the guide.

Set prediction with attention: the cells of a small map are tokens, one attention layer and one MLP
are used twice, and a Hungarian matching inside the loss keeps one token per object, so there is no
NMS. Inputs are a dict, boxes are rotated and in metres. The weights lie beside this file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn import functional as F

import boxcov
from boxcov import Selection
from boxcov.data import shapes
from boxcov.static_selection import StaticLimits, StaticSelection, best_rows

CLASSES = shapes.CLASSES
SIDE, THRESHOLD = 8, 0.3  # tokens per side of the map; score
PIXEL = 0.5  # metres
WEIGHTS = Path(__file__).with_name("token_detector.pt")


class TokenNet(nn.Module):
    """Convolutions, two rounds of the same attention, a linear score and an MLP for the box."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, 2, 1), nn.GELU()),
            *(nn.Conv2d(16, width, 3, 2, 1), nn.GELU()),
            *(nn.Conv2d(width, width, 3, 2, 1), nn.GELU()),
        )
        self.place = nn.Parameter(0.1 * torch.randn(1, SIDE * SIDE, width))
        self.attend = nn.MultiheadAttention(width, 4, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.score = nn.Linear(width, len(CLASSES))
        act = nn.ReLU()  # one module, used twice
        self.box = nn.Sequential(
            *(nn.Linear(width, width), act, nn.Linear(width, width), act, nn.Linear(width, 6)),
        )
        nn.init.constant_(self.score.bias, -2.0)

    def forward(self, image: Tensor, pixel: Tensor) -> dict[str, Tensor]:
        x = self.body(image).flatten(2).transpose(1, 2) + self.place  # (B, n, width)
        for _ in range(2):
            x = self.norm(x + self.attend(x, x, x, need_weights=False)[0])
            x = x + self.mlp(x)
        return {"token": x, "score": self.score(x), "box": self.box(x), "pixel": pixel}


def forward(model: TokenNet, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return model(inputs["image"], inputs["pixel"])


def select(model: TokenNet, raw: dict[str, Tensor]) -> Selection:
    scores, labels = raw["score"].sigmoid().max(2)
    frame, token = (scores > THRESHOLD).nonzero(as_tuple=True)
    return Selection(frame, scores[frame, token], labels[frame, token], (frame, token))


def select_static(model: TokenNet, raw: dict[str, Tensor], limits: StaticLimits) -> StaticSelection:
    scores, labels = raw["score"][0].sigmoid().max(1)
    index, count, left_off = best_rows(scores, scores > THRESHOLD, limits.boxes)
    frame = torch.zeros_like(index)
    selection = Selection(frame, scores[index], labels[index], (frame, index))
    return StaticSelection(selection, count, left_off)


def boxes_at(values: Tensor, token: Tensor, pixel: Tensor) -> Tensor:
    """x y w l yaw (m, 5) in metres from the values (m, 6) of tokens (m,)."""
    cell = torch.stack([token % SIDE, token // SIDE], 1)
    centre = (cell + 2 * values[:, :2].sigmoid() - 0.5) * (8 * pixel[:, None])
    yaw = torch.atan2(values[:, 4:5], values[:, 5:6])
    return torch.cat([centre, values[:, 2:4].exp(), yaw], 1)


def decode(model: TokenNet, raw: dict[str, Tensor], selection: Selection) -> Tensor:
    frame, token = selection.where
    return boxes_at(raw["box"][frame, token], token, raw["pixel"][frame])


def logits(model: TokenNet, raw: dict[str, Tensor], selection: Selection) -> Tensor:
    frame, token = selection.where
    return raw["score"][frame, token, selection.labels]


def instances(
    model: TokenNet, raw: dict[str, Tensor], selection: Selection, with_logit: bool = False
) -> list[Any]:
    frame, token = selection.where

    def run() -> Tensor:
        x = raw["token"][frame, token]  # a token is an instance
        boxes = boxes_at(model.box(x), token, raw["pixel"][frame])
        score = model.score(x).gather(1, selection.labels[:, None])
        return torch.cat([boxes, score], 1) if with_logit else boxes

    return [(torch.arange(len(selection)), run)]


def loss(model: TokenNet, raw: dict[str, Tensor], targets: list[dict[str, Tensor]]) -> Tensor:
    """Focal loss of the scores and L1 loss of the matched boxes, per frame."""
    every = torch.arange(SIDE * SIDE)
    losses = []
    for score, values, pixel, target in zip(raw["score"], raw["box"], raw["pixel"], targets):
        boxes, goal, labels = (
            boxes_at(values, every, pixel.expand(len(every))),
            target["boxes"],
            target["labels"],
        )
        with torch.no_grad():
            cost = torch.cdist(boxes[:, :2], goal[:, :2]) - score.sigmoid()[:, labels]
            rows, columns = linear_sum_assignment(cost.numpy())
        want = torch.zeros_like(score)
        want[rows, labels[columns]] = 1
        p = score.sigmoid()
        focal = F.binary_cross_entropy_with_logits(score, want, reduction="none")
        focal = focal * torch.where(want > 0, (1 - p) ** 2, p**2)
        near, there = boxes[rows], goal[columns]
        turn = values[rows, 4:] - torch.stack([there[:, 4].sin(), there[:, 4].cos()], 1)
        size = near[:, 2:4].log() - there[:, 2:4].log()
        apart = torch.cat([near[:, :2] - there[:, :2], size, turn], 1)
        losses.append(focal.sum() + apart.abs().sum())
    return torch.stack(losses)


def build() -> boxcov.Detector:
    model = TokenNet()
    model.load_state_dict(torch.load(WEIGHTS, weights_only=True))
    return boxcov.wrap(
        model.eval(),
        forward=forward,
        select=select,
        decode=decode,
        loss=loss,
        logits=logits,
        instances=instances,
        select_static=select_static,
        parts={"head": ("score", "box"), "neck": ("attend", "mlp"), "backbone": "body"},
        box_fields=("x", "y", "w", "l", "yaw"),
        classes=CLASSES,
        configuration={"pixel": PIXEL, "selection": {"threshold": THRESHOLD}},
    )


def as_inputs(image: Tensor) -> dict[str, Tensor]:
    return {"image": image, "pixel": torch.full((len(image),), PIXEL)}


def frames(split: str) -> list[Any]:
    seed, count = {"train": (0, 200), "val": (1, 80), "test": (2, 20)}[split]
    return [(as_inputs(image), targets) for image, targets in shapes.frames(count=count, seed=seed)]


def read(path: Path) -> dict[str, Tensor]:
    return as_inputs(torch.load(path, weights_only=True))


def train(path: Path, epochs: int = 8) -> None:
    """Write the weights after a few seconds of training."""
    torch.manual_seed(0)
    model, data = TokenNet(), frames("train")
    optimiser = torch.optim.AdamW(model.parameters(), 4e-3)
    for _ in range(epochs):
        for start in range(0, len(data), 20):
            items = data[start : start + 20]
            inputs = {k: torch.cat([i[0][k] for i in items]) for k in ("image", "pixel")}
            targets = [target for _, each in items for target in each]
            value = loss(model, forward(model, inputs), targets).mean()
            optimiser.zero_grad()
            value.backward()
            optimiser.step()
    torch.save(model.state_dict(), path)
