"""A detector that is a convolutional head alone, with stages of any number and kernel size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import boxcov
from boxcov.detector import Selection
from boxcov.head_stages import HeadStages, Stage

KINDS, OUTPUTS = 3, (1, 2)


class Head(boxcov.Detector):
    """A convolutional head alone, which reports given cells."""

    box_fields = ("row", "column", "size")
    classes = ("thing",)

    def __init__(self, stem: list[int], branches: list[int], where: Sequence[Tensor]) -> None:
        super().__init__()
        self.stem = nn.ModuleList(layer(8, 8, k) for k in stem)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in stem)
        widths = [*(len(branches) - 1) * [(4, 4)], OUTPUTS]
        self.branches = nn.ModuleList(
            nn.ModuleList(
                nn.ModuleList(layer(4 if i else 8, n, k) for n in widths[i]) for _ in range(KINDS)
            )
            for i, k in enumerate(branches)
        )
        self.where = where

    def configuration(self) -> dict[str, str]:
        return {}

    def parts(self) -> dict[str, Any]:
        return {"head": (self.stem, self.branches)}

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = x
        for conv, norm in zip(self.stem, self.norms):
            y = norm(conv(y)).relu()
        kinds = [torch.cat([self._branch(y, kind, b) for b in (0, 1)], 1) for kind in range(KINDS)]
        return {"features": x, "numbers": torch.stack(kinds)}

    def _branch(self, y: Tensor, kind: int, branch: int) -> Tensor:
        for stage in self.branches[:-1]:
            y = nn.functional.silu(stage[kind][branch](y))
        return self.branches[-1][kind][branch](y)

    def select(self, raw: dict[str, Tensor]) -> Selection:
        frame, kind, row, column = (t.to(raw["features"].device) for t in self.where)
        where = frame, kind, row, column
        return Selection(frame, torch.ones(len(frame)).to(frame.device), 0 * frame, where)

    def decode(self, raw: dict[str, Tensor], selection: Selection) -> Tensor:
        frame, kind, row, column = selection.where
        return self._boxes(raw["numbers"][kind, frame, :, row, column], row, column)

    def _boxes(self, numbers: Tensor, row: Tensor, column: Tensor) -> Tensor:
        row, column = row + numbers[:, 0], column + numbers[:, 1]
        return torch.stack([row, column, numbers.prod(1)], 1)

    def loss(self, raw: dict[str, Tensor], targets: Any) -> Tensor:
        return raw["numbers"].square().mean((0, 2, 3, 4))

    def stages(self, raw: dict[str, Tensor], selection: Selection) -> HeadStages:
        frame, kind, row, column = selection.where
        stem = [
            Stage(((conv,),), ((norm,),), torch.relu) for conv, norm in zip(self.stem, self.norms)
        ]
        *inner, last = [tuple(map(tuple, stage)) for stage in self.branches]
        branches = [*(Stage(rows, None, nn.functional.silu) for rows in inner), Stage(last)]
        cells = frame, row, column, kind
        return HeadStages(raw["features"], *cells, tuple(stem), tuple(branches), self._boxes)


def head_on(size: tuple[int, int], stem: list[int], branches: list[int]) -> Head:
    """A head with given kernel sizes on a map of a given size, for batches of two frames."""
    torch.manual_seed(0)
    kind, frame = torch.randint(KINDS, (20,)), torch.arange(20) % 2
    row, column = torch.randint(size[0], (20,)), torch.randint(size[1], (20,))
    detector = Head(stem, branches, (frame, kind, row, column)).eval()
    for norm in detector.norms:
        norm.running_mean.normal_()  # what lies beyond the border is not zero
    return detector


def layer(n_in: int, n_out: int, k: int) -> nn.Conv2d:
    return nn.Conv2d(n_in, n_out, k, padding=k // 2)
