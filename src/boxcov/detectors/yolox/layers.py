"""The layers of YOLOX, with the module names of upstream, so that its checkpoints fit."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from boxcov.detectors.yolox.config import Config


class BaseConv(nn.Module):
    """Convolution, BatchNorm (unless folded into the convolution), SiLU."""

    def __init__(
        self,
        n_in: int,
        n_out: int,
        kernel: int,
        stride: int = 1,
        groups: int = 1,
        norm: bool = True,
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

    def __init__(
        self, n_in: int, n_out: int, kernel: int, stride: int = 1, norm: bool = True
    ) -> None:
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
