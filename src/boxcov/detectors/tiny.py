"""TinyCenter: a small centre-based detector for tests and examples.

It has what large ones have: dict output, focal and L1 loss, strided, grouped, dilated depthwise and
transposed convolutions, BatchNorm, a head with receptive fields of 7x7 cells. It is trained on
``boxcov.data.shapes`` in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import pi
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from boxcov._torch.process_state import at_least_float32, seeded
from boxcov.data.shapes import CLASSES, METRES
from boxcov.detector import Detector, Selection, flatten_configuration
from boxcov.detectors.objects import objects_of
from boxcov.detectors.signals import class_margin, finite, of_class, window, window_signals
from boxcov.head_stages import HeadStages, LogitBranch, Stage
from boxcov.static_selection import StaticLimits, StaticSelection, best_rows, check_one_frame

_BRANCHES = {"heatmap": len(CLASSES), "offset": 2, "size": 2, "rot": 2}
_RAW_NAMES = ("reg x", "reg y", "dim w", "dim l", "rot sin", "rot cos")
_FIELDS = ("x", "y", "w", "l", "sin", "cos")
Raw = dict[str, Tensor]


@dataclass(frozen=True)
class MapTargets:
    """The targets of a batch on the head's map."""

    heat: Tensor  # (B, classes, h, w)
    mask: Tensor  # (B, h, w) 1 for cells with the centre of an object
    values: Tensor  # (B, 6, h, w) offset, log size, sin and cos of the yaw of that object


class Head(nn.Module):
    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.shared = _block(nn.Conv2d(channels, width, 3, padding=1, bias=False))
        self.branches = nn.ModuleDict()
        for name, n in _BRANCHES.items():
            hidden = _block(nn.Conv2d(width, width, 3, padding=1, bias=False))
            self.branches[name] = nn.Sequential(*hidden, nn.Conv2d(width, n, 3, padding=1))

    def forward(self, features: Tensor) -> Raw:
        x = self.shared(features)
        return {name: branch(x) for name, branch in self.branches.items()}


class TinyCenter(Detector):
    """Boxes x y w l yaw of two classes from images (B, 1, height, width) of 0.5 m pixels.

    >>> detector = TinyCenter(seed=0).eval()
    >>> raw = detector(torch.zeros(1, 1, 64, 64))
    >>> raw["heatmap"].shape
    torch.Size([1, 2, 32, 32])
    """

    box_fields = ("x", "y", "w", "l", "yaw")
    classes = CLASSES

    def __init__(
        self, seed: int = 0, threshold: float = 0.1, most: int = 100, width: int = 16
    ) -> None:
        super().__init__()
        self.threshold, self.most = threshold, most
        self.cell = 2 * METRES / 64  # metres per cell of the head's map
        with seeded(seed):
            w = width
            self.backbone = nn.Sequential(
                _block(nn.Conv2d(1, w, 3, stride=2, padding=1, bias=False)),
                _block(nn.Conv2d(w, 2 * w, 3, padding=1, groups=2, bias=False)),
            )
            self.deep = nn.Sequential(
                _block(nn.Conv2d(2 * w, 2 * w, 3, stride=2, padding=1, bias=False)),
                _block(nn.Conv2d(2 * w, 2 * w, 3, padding=2, dilation=2, groups=2 * w, bias=False)),
                _block(nn.Conv2d(2 * w, 2 * w, 1, bias=False)),
            )
            self.lateral = _block(nn.Conv2d(2 * w, w, 1))
            self.up = _block(nn.ConvTranspose2d(2 * w, w, 2, stride=2))
            self.head = Head(2 * w, w)
            heat = self.head.branches["heatmap"][-1]  # type: ignore[index]
            nn.init.constant_(heat.bias, -2.19)  # rare objects: start from a probability of 0.1

    def forward(self, inputs: Tensor) -> Raw:
        x = self.backbone(inputs)
        features = torch.cat([self.lateral(x), self.up(self.deep(x))], 1)
        return {"features": features, **self.head(features)}

    def parts(self) -> dict[str, nn.Module | tuple[nn.Module, ...]]:
        return {
            "head": self.head,
            "neck": (self.lateral, self.up),
            "backbone": (self.backbone, self.deep),
        }

    def configuration(self) -> dict[str, str]:
        rules = {"threshold": self.threshold, "most": self.most}
        return {**super().configuration(), **flatten_configuration({"selection": rules})}

    # from raw outputs to boxes

    def select(self, raw: Raw) -> Selection:
        heat = raw["heatmap"].sigmoid()
        peaks = heat * (F.max_pool2d(heat, 3, stride=1, padding=1) == heat)
        frame, label, row, column = (peaks > self.threshold).nonzero(as_tuple=True)
        scores = heat[frame, label, row, column]
        keep = [(frame == b).nonzero()[:, 0] for b in range(len(heat))]
        keep = [rows[scores[rows].topk(min(self.most, len(rows))).indices] for rows in keep]
        order = torch.cat(keep) if keep else frame
        where = (frame[order], row[order], column[order])
        return Selection(frame[order], scores[order], label[order], where)

    def static_inputs(self, inputs: Tensor) -> Tensor:
        return inputs

    def select_static(self, raw: Raw, limits: StaticLimits) -> StaticSelection:
        check_one_frame(len(raw["heatmap"]))
        heat = raw["heatmap"].sigmoid()
        peaks = (heat * (F.max_pool2d(heat, 3, stride=1, padding=1) == heat))[0].flatten()
        index, count, more = best_rows(peaks, peaks > self.threshold, min(limits.boxes, self.most))
        height, width = heat.shape[2:]
        where = (torch.zeros_like(index), index % (height * width) // width, index % width)
        # the detector itself reports no more than self.most
        more = more.clamp(max=max(self.most - limits.boxes, 0))
        selection = Selection(where[0], peaks[index], index // (height * width), where)
        return StaticSelection(selection, count, more)

    def decode(self, raw: Raw, selection: Selection) -> Tensor:
        frame, row, column = selection.where
        values = [raw[name][frame, :, row, column] for name in ("offset", "size", "rot")]
        return self._boxes(torch.cat(values, 1), row, column)

    def logits(self, raw: Raw, selection: Selection) -> Tensor:
        frame, row, column = selection.where
        return raw["heatmap"][frame, selection.labels, row, column]

    def signals(self, raw: Raw, selection: Selection) -> dict[str, Tensor]:
        frame, row, column = selection.where
        rows, columns, inside = window(row, column, *raw["heatmap"].shape[2:])  # (m, 9) each
        heat, *values = (
            at_least_float32(raw[name][frame[:, None], :, rows, columns]) for name in _BRANCHES
        )
        around = torch.cat(values, 2)  # (m, 9, 6)
        centre = (around[:, :, :2] + torch.stack([columns, rows], 2)) * self.cell
        compared = torch.cat([centre, around[:, :, 2:]], 2)
        return finite(
            {
                **window_signals(of_class(heat, selection.labels), compared, inside, _FIELDS),
                **dict(zip(_RAW_NAMES, around[:, 4].unbind(1))),
                "class margin": class_margin(heat[:, 4], selection.labels),
            }
        )

    def stages(self, raw: Raw, selection: Selection) -> HeadStages:
        frame, row, column = selection.where
        chains: list[Any] = [self.head.branches[name] for name in ("offset", "size", "rot")]
        heat: Any = self.head.branches["heatmap"]
        return HeadStages(
            raw["features"],
            *(frame, row, column),
            kind=torch.zeros_like(row),
            stem=(_stage([self.head.shared]),),
            branches=(_stage(chains), Stage((tuple(chain[3] for chain in chains),))),
            decode=self._boxes,
            logit=LogitBranch((_stage([heat]), Stage(((heat[3],),))), channel=selection.labels),
        )

    def _boxes(self, values: Tensor, row: Tensor, column: Tensor) -> Tensor:
        """Return boxes (m, 5) from the outputs (m, 6) of the branches at m cells."""
        offset, size, rot = values.split(2, 1)
        centre = (torch.stack([column, row], 1) + offset) * self.cell
        yaw = torch.atan2(rot[:, 0], rot[:, 1])
        return torch.cat([centre, size.exp(), yaw.unsqueeze(1)], 1)

    # the training loss

    def augment(
        self, inputs: Tensor, targets: Sequence[dict[str, Tensor]], generator: torch.Generator
    ) -> tuple[Tensor, list[dict[str, Tensor]]]:
        """Return the images mirrored at random, left to right and top to bottom."""
        across, down = (torch.rand(2, generator=generator) < 0.5).tolist()
        inputs = inputs.flip([axis for axis, is_on in ((3, across), (2, down)) if is_on])
        mirrored = []
        for target in targets:
            x, y, w, l, yaw = torch.as_tensor(target["boxes"]).unbind(1)  # or numpy's
            x, yaw = (METRES - x, pi - yaw) if across else (x, yaw)
            y, yaw = (METRES - y, -yaw) if down else (y, yaw)
            mirrored.append({**target, "boxes": torch.stack([x, y, w, l, yaw], 1)})
        return inputs, mirrored

    def loss(self, raw: Raw, targets: Sequence[dict[str, Tensor]] | MapTargets) -> Tensor:
        """Return the focal loss plus 0.25 times the L1 loss at the objects' cells (B,)."""
        if not isinstance(targets, MapTargets):
            targets = self.encode(targets, raw["heatmap"])
        positives = targets.mask.sum((1, 2)).clamp(min=1)
        p = raw["heatmap"].sigmoid().clamp(1e-4, 1 - 1e-4)
        at, away = -p.log() * (1 - p) ** 2, -(1 - p).log() * p**2 * (1 - targets.heat) ** 4
        focal = torch.where(targets.heat == 1, at, away)
        values = torch.cat([raw["offset"], raw["size"], raw["rot"]], 1)
        l1 = (values - targets.values).abs() * targets.mask.unsqueeze(1)
        return (focal.sum((1, 2, 3)) + 0.25 * l1.sum((1, 2, 3))) / positives

    def encode(self, targets: Sequence[dict[str, Tensor]], like: Tensor) -> MapTargets:
        """Return the targets on the grid of ``like`` (B, classes, h, w)."""
        batch, _, height, width = like.shape
        objects = objects_of(targets, TinyCenter.box_fields, len(CLASSES), like)
        heat, values = torch.zeros_like(like), like.new_zeros(batch, 6, height, width)
        mask = like.new_zeros(batch, height, width)
        rows = torch.arange(height, device=like.device)[:, None]
        columns = torch.arange(width, device=like.device)[None]
        for b, (boxes, labels) in enumerate(objects):
            for box, label in zip(boxes, labels.tolist()):
                x, y = (box[:2] / self.cell).tolist()
                row, column = int(y), int(x)
                if not (0 <= x < width and 0 <= y < height):
                    continue  # off the map
                sigma = max(0.7, float(box[2:4].mean()) / self.cell / 4)
                splat = torch.exp(-((rows - row) ** 2 + (columns - column) ** 2) / (2 * sigma**2))
                heat[b, label] = torch.maximum(heat[b, label], splat.to(like))
                mask[b, row, column] = 1
                offset = box[:2] / self.cell - torch.tensor([column, row]).to(like)
                numbers = (offset, box[2:4].log(), box[4:].sin(), box[4:].cos())
                values[b, :, row, column] = torch.cat(numbers)
        return MapTargets(heat, mask, values)

    def sample_targets(self, raw: Raw, generator: torch.Generator) -> MapTargets:
        """Return targets drawn from the prediction: objects by score, values with noise.

        The gradient of the L1 loss depends only on the side of the prediction on which a value
        lies, so the width of the noise does not matter.
        """
        p = raw["heatmap"].sigmoid()
        heat = torch.bernoulli(p, generator=generator)
        values = torch.cat([raw["offset"], raw["size"], raw["rot"]], 1)
        noise = torch.empty_like(values).normal_(generator=generator)
        return MapTargets(heat, heat.amax(1), values + noise)


def train(
    detector: TinyCenter,
    frames: Sequence[Any],
    epochs: int = 6,
    batch: int = 8,
    rate: float = 4e-3,
    seed: int = 0,
) -> TinyCenter:
    """Train in place, with Adam and a one-cycle rate, and return the detector in eval mode.

    >>> from boxcov.data import shapes
    >>> detector = train(TinyCenter(), shapes.frames(count=8), epochs=1)
    >>> detector.training
    False
    """
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(detector.parameters(), rate)
    items = [(x, detector.encode(targets, torch.zeros(1, 2, 32, 32))) for x, targets in frames]
    images = torch.cat([inputs for inputs, _ in items])
    encoded = [torch.cat([getattr(e, n) for _, e in items]) for n in ("heat", "mask", "values")]
    steps = epochs * -(-len(images) // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=steps)
    detector.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(images), generator=generator).split(batch):
            targets = MapTargets(*(e[rows] for e in encoded))
            loss = detector.loss(detector(images[rows]), targets).mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    return detector.eval()


def _stage(chains: list[Any]) -> Stage:
    """Return the stage of the first convolution of each chain, with its norm and ReLU."""
    return Stage((tuple(c[0] for c in chains),), (tuple(c[1] for c in chains),), torch.relu)


def _block(convolution: nn.Module) -> nn.Sequential:
    out = convolution.out_channels
    assert isinstance(out, int)
    return nn.Sequential(convolution, nn.BatchNorm2d(out), nn.ReLU(inplace=True))
