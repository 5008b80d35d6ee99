"""Running a convolutional head one instance at a time: on the crop of the feature map that its box can see."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def crop(
    features: Tensor, frame: Tensor, row: Tensor, column: Tensor, radius: int
) -> tuple[Tensor, Tensor]:
    """Crops (m, C, s, s), s = 2 radius + 1, around m cells of maps (B, C, height, width), and which of their cells are on the map (m, 1, s, s).

    >>> crops, inside = crop(torch.ones(1, 4, 8, 8), *torch.tensor([[0], [0], [7]]), radius=1)
    >>> crops.shape, int(inside.sum())
    (torch.Size([1, 4, 3, 3]), 4)
    """
    around = torch.arange(-radius, radius + 1, device=features.device)
    rows = (row[:, None] + around)[:, :, None]  # (m, s, 1)
    columns = (column[:, None] + around)[:, None, :]  # (m, 1, s)
    height, width = features.shape[2:]
    inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)  # (m, s, s)
    picked = features.movedim(1, 3)[
        frame[:, None, None], rows.clamp(0, height - 1), columns.clamp(0, width - 1)
    ]  # (m, s, s, C)
    mask = inside.unsqueeze(1).to(features.dtype)
    return picked.movedim(3, 1) * mask, mask


def run_on_crops(layers: nn.Module, x: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
    """The layers of a module on crops (m, C, s, s), every 3x3 convolution taking a cell from each side.

    The module is a convolution, or runs its children one after another, and so do they theirs. Gives what they give, and the mask that belongs
    to it. On the whole map a convolution reads zeros beyond the border, so whatever a layer before it gave there is set to zero.

    >>> layers = nn.Sequential(nn.Conv2d(4, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 1, 3, padding=1))
    >>> maps = torch.randn(1, 4, 8, 8)
    >>> crops, inside = crop(maps, *torch.tensor([[0], [0], [7]]), radius=2)
    >>> torch.allclose(run_on_crops(layers, crops, inside)[0][0, :, 0, 0], layers(maps)[0, :, 0, 7], atol=1e-6)
    True
    """
    for layer in [layers] if isinstance(layers, nn.Conv2d) else layers.children():
        if isinstance(layer, nn.Conv2d):
            cut = layer.dilation[0] * (layer.kernel_size[0] - 1) // 2
            x = F.conv2d(
                x * inside, layer.weight, layer.bias, dilation=layer.dilation, groups=layer.groups
            )
            inside = inside[:, :, cut : inside.shape[2] - cut, cut : inside.shape[3] - cut]
        elif next(layer.children(), None) is not None:
            x, inside = run_on_crops(layer, x, inside)
        else:
            x = layer(x)
    return x, inside
