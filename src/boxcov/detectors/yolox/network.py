"""The network of YOLOX: CSPDarknet, the pyramid (PAFPN) over its last maps, and the head.

Modules have the names of upstream, so that its checkpoints fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from boxcov.detectors.yolox.config import STRIDES, Config
from boxcov.head_stages import run_on_crops

REACH = 2  # cells that a box sees to each side: two 3x3 convolutions


class BaseConv(nn.Module):
    """Convolution, BatchNorm (unless folded into the convolution), SiLU."""

    def __init__(
        self, n_in: int, n_out: int, kernel: int, stride: int = 1, groups: int = 1, *, norm: bool
    ) -> None:
        super().__init__()
        padding = kernel // 2
        self.conv = nn.Conv2d(n_in, n_out, kernel, stride, padding, groups=groups, bias=not norm)
        self.bn = nn.BatchNorm2d(n_out, eps=1e-3, momentum=0.03) if norm else nn.Identity()
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))


class DWConv(nn.Module):
    """A depthwise convolution followed by a 1x1 convolution."""

    def __init__(self, n_in: int, n_out: int, kernel: int, stride: int, norm: bool) -> None:
        super().__init__()
        self.dconv = BaseConv(n_in, n_in, kernel, stride, groups=n_in, norm=norm)
        self.pconv = BaseConv(n_in, n_out, 1, norm=norm)

    def forward(self, x: Tensor) -> Tensor:
        return self.pconv(self.dconv(x))


def conv(config: Config, n_in: int, n_out: int, kernel: int, stride: int = 1) -> BaseConv | DWConv:
    """Return a convolution, depthwise for kernels above 1x1 if ``config.depthwise``."""
    if config.depthwise and kernel > 1:
        return DWConv(n_in, n_out, kernel, stride, config.norm)
    return BaseConv(n_in, n_out, kernel, stride, norm=config.norm)


class Bottleneck(nn.Module):
    """A 1x1 and a 3x3 convolution, with an optional shortcut."""

    def __init__(self, config: Config, channels: int, shortcut: bool) -> None:
        super().__init__()
        self.conv1 = conv(config, channels, channels, 1)
        self.conv2 = conv(config, channels, channels, 3)
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv2(self.conv1(x))
        return x + out if self.shortcut else out


class CSPLayer(nn.Module):
    """Half of the channels pass ``count`` bottlenecks, half bypass them; a convolution merges."""

    def __init__(
        self, config: Config, n_in: int, n_out: int, count: int, shortcut: bool = True
    ) -> None:
        super().__init__()
        half = n_out // 2
        self.conv1 = conv(config, n_in, half, 1)
        self.conv2 = conv(config, n_in, half, 1)
        self.conv3 = conv(config, 2 * half, n_out, 1)
        self.m = nn.Sequential(*(Bottleneck(config, half, shortcut) for _ in range(count)))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv3(torch.cat([self.m(self.conv1(x)), self.conv2(x)], 1))


class SPPBottleneck(nn.Module):
    """Concatenate the map with its maxima over windows of 5, 9 and 13 cells."""

    def __init__(self, config: Config, channels: int) -> None:
        super().__init__()
        self.conv1 = conv(config, channels, channels // 2, 1)
        self.conv2 = conv(config, 2 * channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        maxima = [F.max_pool2d(x, k, stride=1, padding=k // 2) for k in (5, 9, 13)]
        return self.conv2(torch.cat([x, *maxima], 1))


class Focus(nn.Module):
    """Rearrange 2x2 pixels into channels, then convolve."""

    def __init__(self, config: Config, n_out: int) -> None:
        super().__init__()
        self.conv = BaseConv(12, n_out, 3, norm=config.norm)

    def forward(self, x: Tensor) -> Tensor:
        corners = [x[..., row::2, column::2] for column in (0, 1) for row in (0, 1)]
        return self.conv(torch.cat(corners, 1))


class CSPDarknet(nn.Module):
    """Images (B, 3, h, w) to maps of strides 8, 16 and 32."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        w, n = config.width, config.depth
        self.stem = Focus(config, w)

        def stage(n_in: int, blocks: int) -> nn.Sequential:
            halved = conv(config, n_in, 2 * n_in, 3, stride=2)
            return nn.Sequential(halved, CSPLayer(config, 2 * n_in, 2 * n_in, blocks))

        self.dark2 = stage(w, n)
        self.dark3 = stage(2 * w, 3 * n)
        self.dark4 = stage(4 * w, 3 * n)
        self.dark5 = nn.Sequential(
            conv(config, 8 * w, 16 * w, 3, 2),
            SPPBottleneck(config, 16 * w),
            CSPLayer(config, 16 * w, 16 * w, n, shortcut=False),
        )

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        fine = self.dark3(self.dark2(self.stem(images)))
        middle = self.dark4(fine)
        return fine, middle, self.dark5(middle)


class PAFPN(nn.Module):
    """Images (B, 3, h, w) to maps of strides 8, 16 and 32, with 4, 8 and 16 widths of channels."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        a, b, c = (k * config.width for k in (4, 8, 16))

        def csp(n_in: int, n_out: int) -> CSPLayer:
            return CSPLayer(config, n_in, n_out, config.depth, shortcut=False)

        self.backbone = CSPDarknet(config)
        self.lateral_conv0 = conv(config, c, b, 1)
        self.C3_p4 = csp(2 * b, b)
        self.reduce_conv1 = conv(config, b, a, 1)
        self.C3_p3 = csp(2 * a, a)
        self.bu_conv2 = conv(config, a, a, 3, 2)
        self.C3_n3 = csp(2 * a, b)
        self.bu_conv1 = conv(config, b, b, 3, 2)
        self.C3_n4 = csp(2 * b, c)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        fine, middle, coarse = self.backbone(images)
        down0 = self.lateral_conv0(coarse)
        middle = self.C3_p4(torch.cat([_upsample(down0), middle], 1))
        down1 = self.reduce_conv1(middle)
        out0 = self.C3_p3(torch.cat([_upsample(down1), fine], 1))
        out1 = self.C3_n3(torch.cat([self.bu_conv2(out0), down1], 1))
        out2 = self.C3_n4(torch.cat([self.bu_conv1(out1), down0], 1))
        return out0, out1, out2

    def neck(self) -> tuple[nn.Module, ...]:
        """Return the modules of the pyramid, without the backbone."""
        return tuple(module for name, module in self.named_children() if name != "backbone")


def _upsample(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode="nearest")


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
            bias = cast(Tensor, layer.bias)
            nn.init.constant_(bias, -4.6)  # rare objects: start from a probability of 0.01

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        values = []
        for level, x in enumerate(features):
            x = self.stems[level](x)
            box, named = self.reg_convs[level](x), self.cls_convs[level](x)
            parts = [self.reg_preds[level](box), self.obj_preds[level](box)]
            values.append(torch.cat([*parts, self.cls_preds[level](named)], 1).flatten(2))
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
