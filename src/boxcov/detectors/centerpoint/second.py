"""SECOND and SECONDFPN: the 2-D backbone and the neck that brings its maps to one size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from boxcov.detectors.centerpoint.config import Dense

_EPS, _MOMENTUM = 1e-3, 0.01  # of the norms here; the head has PyTorch's defaults


class Second(nn.Module):
    """Blocks of 3x3 convolutions, the first of each strided; returns the map of every block."""

    def __init__(self, channels: int, dense: Dense) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        for width, layers, stride in zip(dense.widths, dense.layers, dense.strides):
            steps = [(channels, stride), *[(width, 1)] * layers]
            modules = (module for n_in, s in steps for module in _convolution(n_in, width, s))
            self.blocks.append(nn.Sequential(*modules))
            channels = width

    def forward(self, x: Tensor) -> list[Tensor]:
        maps = []
        for block in self.blocks:
            x = block(x)
            maps.append(x)
        return maps


class SecondFPN(nn.Module):
    """The maps of the blocks, resampled to one size and concatenated."""

    def __init__(self, dense: Dense) -> None:
        super().__init__()
        self.deblocks = nn.ModuleList(
            nn.Sequential(_resampling(n_in, width, stride), _norm(width), nn.ReLU(inplace=True))
            for n_in, width, stride in zip(dense.widths, dense.up_widths, dense.up_strides)
        )

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        return torch.cat([deblock(x) for deblock, x in zip(self.deblocks, maps)], 1)


def _convolution(n_in: int, width: int, stride: int) -> tuple[nn.Module, ...]:
    conv = nn.Conv2d(n_in, width, 3, stride, padding=1, bias=False)
    return conv, _norm(width), nn.ReLU(inplace=True)


def _norm(width: int) -> nn.Module:
    return nn.BatchNorm2d(width, eps=_EPS, momentum=_MOMENTUM)


def _resampling(n_in: int, width: int, stride: float) -> nn.Module:
    if stride > 1:
        return nn.ConvTranspose2d(n_in, width, int(stride), int(stride), bias=False)
    step = round(1 / stride)
    return nn.Conv2d(n_in, width, step, step, bias=False)
