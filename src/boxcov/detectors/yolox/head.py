"""The head of YOLOX: per level a stem and two branches, for the classes and for the box."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from boxcov.detectors.yolox.config import STRIDES, Config
from boxcov.detectors.yolox.layers import BaseConv, conv
from boxcov.head_stages import run_on_crops

REACH = 2  # cells that a box sees to each side: two 3x3 convolutions


class Head(nn.Module):
    """The pyramid's maps to values (B, N, 5 + classes): box, objectness logit, class logits."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        w, levels = 4 * config.width, range(len(STRIDES))

        def branch() -> nn.Sequential:
            return nn.Sequential(conv(config, w, w, 3), conv(config, w, w, 3))

        self.stems = nn.ModuleList(BaseConv(w * 2**i, w, 1, norm=config.norm) for i in levels)
        self.cls_convs = nn.ModuleList(branch() for _ in levels)
        self.reg_convs = nn.ModuleList(branch() for _ in levels)
        self.cls_preds = nn.ModuleList(nn.Conv2d(w, len(config.classes), 1) for _ in levels)
        self.reg_preds = nn.ModuleList(nn.Conv2d(w, 4, 1) for _ in levels)
        self.obj_preds = nn.ModuleList(nn.Conv2d(w, 1, 1) for _ in levels)
        for layer in (*self.cls_preds, *self.obj_preds):
            assert isinstance(layer, nn.Conv2d)
            assert layer.bias is not None
            nn.init.constant_(layer.bias, -4.6)  # rare objects: start from a probability of 0.01

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        values = []
        for level, x in enumerate(features):
            x = self.stems[level](x)
            box = self.reg_convs[level](x)
            parts = (
                self.reg_preds[level](box),
                self.obj_preds[level](box),
                self.cls_preds[level](self.cls_convs[level](x)),
            )
            values.append(torch.cat(parts, 1).flatten(2))
        return torch.cat(values, 2).transpose(1, 2)

    def on_crops(self, crops: Tensor, inside: Tensor, level: int, classes: bool) -> Tensor:
        """Return the values at the centre of crops (m, C, 5, 5) of a level.

        They are (m, 4), or (m, 5 + classes) with ``classes``. inside: (m, 1, 5, 5) the mask of the
        cells on the map.
        """
        x, inside = run_on_crops(self.stems[level], crops, inside)
        box, _ = run_on_crops(self.reg_convs[level], x, inside)
        parts = [self.reg_preds[level](box)]
        if classes:
            named, _ = run_on_crops(self.cls_convs[level], x, inside)
            parts += [self.obj_preds[level](box), self.cls_preds[level](named)]
        return torch.cat(parts, 1)[:, :, 0, 0]
