"""Random detectors: networks of many layer types, with one head over levels of a pyramid."""

from __future__ import annotations

from random import Random
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from boxcov import Detector, Selection

_ACTIVATIONS = (nn.ReLU(), nn.ReLU(inplace=True), nn.SiLU(), nn.Tanh(), nn.Softplus())


class Levels(Detector):
    """Boxes from random cells of one to three levels, some cells more than once."""

    box_fields = ("p", "q", "r")
    classes = ("thing",)
    periods: ClassVar = {}

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        random = self.random = Random(seed)
        body, width = _block(random, 2)
        head, last = _block(random, width)
        self.body = body
        self.head = nn.Sequential(head, nn.Conv2d(last, 3, random.choice([1, 3]), padding=1))
        self.levels, self.seed = random.choice([1, 2, 3]), seed

    def forward(self, inputs: Tensor) -> Any:
        x = self.body(inputs)
        smaller = F.avg_pool2d(x, 2, ceil_mode=True), x[:, :, :3, :3].flip(2)
        maps = [self.head(level) for level in (x, *smaller)[: self.levels]]
        return {"maps": tuple(maps)} if self.seed % 2 else maps

    def cells(self, raw: Any) -> Tensor:
        maps = raw["maps"] if isinstance(raw, dict) else raw
        return torch.cat([each.flatten(2) for each in maps], 2).transpose(1, 2)  # (B, N, 3)

    def select(self, raw: Any) -> Selection:
        batch, count, _ = self.cells(raw).shape
        generator = torch.Generator().manual_seed(self.seed)
        cell = torch.randint(count, (batch, 4), generator=generator)
        cell[:, 0], cell[:, -1] = 0, count - 1  # the borders
        frame = torch.arange(batch).repeat_interleave(4)
        order = torch.randperm(len(frame), generator=generator)
        where = frame[order], cell.flatten()[order]
        return Selection(where[0], torch.ones(len(order)), torch.zeros_like(where[0]), where)

    def decode(self, raw: Any, selection: Selection) -> Tensor:
        cells = self.cells(raw)
        v, around = cells[selection.where], cells.mean(1)[selection.frame]
        bins = torch.arange(3, dtype=v.dtype)
        expected = (v.softmax(1) * bins).sum(1) * around[:, 0]
        return torch.stack([v[:, 0].exp(), torch.atan2(v[:, 1], v[:, 2]), expected], 1)

    def loss(self, raw: Any, targets: Tensor) -> Tensor:
        return (self.cells(raw) - targets[:, None, None]).square().sum((1, 2))

    def parts(self) -> dict[str, nn.Module | tuple[nn.Module, ...]]:
        return {"head": self.head, "backbone": self.body}


class Residual(nn.Module):
    """The same convolution twice, and the sum in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv(self.conv(x).tanh())
        out += x
        return out


class Attention(nn.Module):
    """Attention between cells, and a gate of the whole map."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x.flatten(2).transpose(1, 2)).chunk(3, -1)  # (B, T, C)
        mixed = self.out(F.scaled_dot_product_attention(q, k, v)).transpose(1, 2).reshape(x.shape)
        return (x + mixed) * self.gate(x.mean((2, 3))).sigmoid()[:, :, None, None]


def _convolution(random: Random, width: int) -> nn.Module:
    bias, out = random.random() < 0.6, random.choice([2, 3, 4])
    mode = random.choice(["reflect", "circular", "replicate"])
    kinds = (
        lambda: nn.Conv2d(width, out, 3, stride=random.choice([1, 2]), padding=1, bias=bias),
        lambda: nn.Conv2d(width, out, 3, dilation=2, padding=2, bias=bias),
        lambda: nn.Conv2d(width, 2 * width, 3, padding=1, groups=width, bias=bias),
        lambda: nn.Conv2d(width, out, (1, 3), padding=(0, 1), padding_mode=mode, bias=bias),
        lambda: nn.Conv2d(width, out, (2, 3), padding="same", bias=bias),
        lambda: nn.ConvTranspose2d(width, out, 3, stride=2, output_padding=1, bias=bias),
        lambda: nn.ConvTranspose2d(width, 2 * width, 2, groups=width, bias=bias),
        lambda: nn.Sequential(nn.ZeroPad2d((1, 0, 0, 2)), nn.Conv2d(width, out, 3, bias=bias)),
    )
    return random.choice(kinds)()


def _norm(random: Random, width: int) -> nn.Module:
    batch = nn.BatchNorm2d(width)
    nn.init.normal_(batch.running_mean, 0, 0.3)
    group = nn.GroupNorm(1, width)
    return random.choice([nn.Identity(), batch, group, nn.InstanceNorm2d(width, affine=True)])


def _block(random: Random, width: int) -> tuple[nn.Module, int]:
    """Return a random block, and how many channels it gives."""
    odd = random.choice([nn.Identity, Residual, Attention])
    first: nn.Module = nn.Identity() if odd is nn.Identity else odd(width)
    conv = _convolution(random, width)
    width = conv(torch.zeros(1, width, 5, 5)).shape[1]
    return nn.Sequential(first, conv, _norm(random, width), random.choice(_ACTIVATIONS)), width
