"""Small detectors of every layer type: the case list of all comparisons with oracles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from boxcov import Detector, Selection


class NetDetector(Detector):
    """A network of maps (B, C, ...) as a detector; instances are locations, also at borders."""

    box_fields = ("p", "q", "r")
    classes = ("thing",)

    def __init__(self, net: nn.Module, boxes: int = 4) -> None:
        super().__init__()
        self.net, self.boxes = net, boxes

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        out = self.net(inputs)
        return {"map": out.flatten(2) if out.dim() > 2 else out.unsqueeze(2)}  # (B, C, T)

    def select(self, raw: dict[str, Tensor]) -> Selection:
        batch, _, locations = raw["map"].shape
        chosen = (
            torch.linspace(0, locations - 1, min(self.boxes, locations)).long().unique()
        )  # first and last: the borders
        frame = torch.arange(batch).repeat_interleave(len(chosen))
        where = (frame, chosen.repeat(batch))
        return Selection(
            frame, torch.ones(len(frame)), torch.zeros(len(frame), dtype=torch.long), where
        )

    def decode(self, raw: dict[str, Tensor], selection: Selection) -> Tensor:
        v = raw["map"][selection.where[0], :, selection.where[1]]  # (m, C)
        return torch.stack(
            [v.sum(1).exp() * 0.1, torch.atan2(v[:, 0], 1 + v[:, -1] ** 2), v.square().sum(1)], 1
        )

    def loss(self, raw: dict[str, Tensor], targets: Tensor) -> Tensor:
        off = raw["map"] - targets
        return off.square().flatten(1).sum(1) + off[:, 0].abs().sum(1)

    def parts(self) -> dict[str, nn.Module | tuple[nn.Module, ...]]:
        return {"head": self.net}


def two_convolutions() -> NetDetector:
    """Return a detector of two convolutions with fixed weights."""
    torch.manual_seed(0)
    return NetDetector(nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 2, 1)))


def random_item(count: int = 2) -> tuple[Tensor, Tensor]:
    """Return random inputs and targets of ``count`` frames for it."""
    return torch.randn(count, 2, 5, 5), torch.randn(count, 2, 25)


class Tokens(nn.Module):
    """Linear layers on (B, T, C), as in a transformer, seen as maps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh()).transpose(1, 2)


class Twice(nn.Module):
    """One module used twice, as the heads of a feature pyramid are."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.conv(x).tanh())


class Tied(nn.Module):
    """Two modules that share one weight and one bias, and a second name for one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=2, dilation=2)
        self.b.weight, self.b.bias = self.a.weight, self.a.bias
        self.alias = self.b

    def forward(self, x: Tensor) -> Tensor:
        return self.alias(self.a(x).tanh())


@dataclass(frozen=True)
class Case:
    name: str
    net: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of one frame

    def detector(self, seed: int = 0) -> NetDetector:
        torch.manual_seed(seed)
        detector = NetDetector(self.net()).double().eval()
        for module in detector.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean = torch.randn_like(module.running_mean)
                module.running_var = torch.rand_like(module.running_var) + 0.5
        return detector

    def frames(self, detector: NetDetector, count: int = 5, seed: int = 1) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(count, *self.shape, generator=generator, dtype=torch.float64)
        raw = detector(x)["map"]
        return x, torch.randn(raw.shape, generator=generator, dtype=torch.float64)


def _net(*layers: nn.Module) -> Callable[[], nn.Module]:
    import copy

    return lambda: nn.Sequential(*(_again(copy.deepcopy(layer)) for layer in layers))


def _again(layer: nn.Module) -> nn.Module:
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return layer


CASES = [
    Case("linear", _net(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), (4,)),
    Case(
        "linear without bias",
        _net(nn.Linear(4, 3, bias=False), nn.Tanh(), nn.Linear(3, 2, bias=False)),
        (4,),
    ),
    Case("linear on tokens", Tokens, (5, 3)),
    Case(
        "conv1d",
        _net(nn.Conv1d(2, 3, 3, stride=2, padding=1), nn.Tanh(), nn.Conv1d(3, 2, 2, dilation=2)),
        (2, 12),
    ),
    Case(
        "conv2d",
        _net(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 2, 3, padding=1, bias=False)),
        (2, 5, 6),
    ),
    Case(
        "conv2d strided",
        _net(
            nn.Conv2d(2, 3, 3, stride=2, padding=1),
            nn.Tanh(),
            nn.Conv2d(3, 2, (1, 3), stride=(1, 2)),
        ),
        (2, 7, 8),
    ),
    Case(
        "conv2d dilated",
        _net(
            nn.Conv2d(2, 3, 3, padding=2, dilation=2),
            nn.Tanh(),
            nn.Conv2d(3, 2, 3, dilation=(1, 2)),
        ),
        (2, 7, 9),
    ),
    Case(
        "conv2d grouped",
        _net(nn.Conv2d(4, 6, 3, padding=1, groups=2), nn.Tanh(), nn.Conv2d(6, 3, 1, groups=3)),
        (4, 5, 5),
    ),
    Case(
        "conv2d depthwise",
        _net(
            nn.Conv2d(4, 4, 3, padding=1, groups=4),
            nn.Tanh(),
            nn.Conv2d(4, 8, 3, groups=4, bias=False),
        ),
        (4, 5, 5),
    ),
    Case(
        "conv2d same padding",
        _net(nn.Conv2d(2, 3, 4, padding="same"), nn.Tanh(), nn.Conv2d(3, 2, 3, padding="valid")),
        (2, 6, 5),
    ),
    Case(
        "conv2d circular",
        _net(nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), nn.Tanh(), nn.Conv2d(3, 2, 1)),
        (2, 5, 5),
    ),
    Case(
        "conv3d",
        _net(
            nn.Conv3d(2, 2, 3, padding=1),
            nn.Tanh(),
            nn.Conv3d(2, 2, (1, 2, 3), stride=(1, 2, 1), groups=2),
        ),
        (2, 3, 4, 5),
    ),
    Case(
        "transposed",
        _net(
            nn.ConvTranspose2d(2, 3, 2, stride=2), nn.Tanh(), nn.ConvTranspose2d(3, 2, 3, padding=1)
        ),
        (2, 3, 4),
    ),
    Case(
        "transposed, all options",
        _net(
            nn.ConvTranspose2d(
                4, 6, 3, stride=2, padding=1, output_padding=1, groups=2, dilation=2, bias=False
            ),
            nn.Tanh(),
            nn.Conv2d(6, 2, 1),
        ),
        (4, 4, 3),
    ),
    Case(
        "transposed 1d",
        _net(nn.ConvTranspose1d(2, 3, 4, stride=2, padding=2), nn.Tanh(), nn.Conv1d(3, 2, 1)),
        (2, 6),
    ),
    Case("used twice", Twice, (2, 5, 5)),
    Case("tied", Tied, (2, 6, 6)),
    Case(
        "in place",
        _net(
            nn.Conv2d(2, 3, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(3, 2, 3, padding=1),
            nn.SiLU(inplace=True),
        ),
        (2, 5, 5),
    ),
    Case(
        "batch norm",
        _net(
            nn.Conv2d(2, 3, 3, bias=False),
            nn.BatchNorm2d(3),
            nn.ReLU(inplace=True),
            nn.Conv2d(3, 2, 1),
        ),
        (2, 6, 5),
    ),
]
