"""CenterHead: one convolution that all share, then six small branches for each task."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from boxcov.detectors.centerpoint.config import Config
from boxcov.detectors.crops import run_on_crops
from boxcov.head_stages import Stage

REACH = 3  # cells that a box sees to each side: three 3x3 convolutions
TaskMaps = dict[str, Tensor]


class CenterHead(nn.Module):
    """The neck's map (B, C, h, w) to one dict of maps a task: reg, height, dim, rot, vel and heatmap.

    dim is log (l, w, h), rot is (sin, cos) of the yaw.

    >>> maps = CenterHead(Config.small()).eval()(torch.zeros(1, 192, 8, 8))
    >>> len(maps), maps[1]["heatmap"].shape
    (6, torch.Size([1, 2, 8, 8]))
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        dense = config.dense
        self.shared = nn.Sequential(*_block(dense.neck, dense.shared))
        self.tasks = nn.ModuleList(
            nn.ModuleDict(
                {
                    name: nn.Sequential(
                        *_block(dense.shared, dense.branch),
                        nn.Conv2d(dense.branch, n, 3, padding=1),
                    )
                    for name, n in {**config.branches, "heatmap": len(classes)}.items()
                }
            )
            for classes in config.tasks
        )
        self._stages: dict[
            tuple[str, ...], tuple[tuple[Stage, ...], tuple[Stage, ...]]
        ] = {}  # asked for at every frame
        for task in self.branches():
            heat = cast(nn.Conv2d, cast(nn.Sequential, task["heatmap"])[-1])
            assert heat.bias is not None
            nn.init.constant_(heat.bias, -2.19)  # rare objects: start from a probability of 0.1

    def branches(self) -> list[nn.ModuleDict]:
        return [cast(nn.ModuleDict, task) for task in self.tasks]

    def forward(self, features: Tensor) -> list[TaskMaps]:
        x = self.shared(features)
        return [
            {name: _single(branch(x)) for name, branch in task.items()} for task in self.branches()
        ]

    def on_crops(
        self, crops: Tensor, inside: Tensor, task: int, names: tuple[str, ...]
    ) -> dict[str, Tensor]:
        """The outputs (m, n) of the branches ``names`` of one task at the centre of crops (m, C, 7, 7).

        ``inside`` (m, 1, 7, 7) tells which of their cells are on the map.

        >>> head = CenterHead(Config.small()).eval()
        >>> head.on_crops(torch.zeros(5, 192, 7, 7), torch.ones(5, 1, 7, 7), 0, ("reg",))["reg"].shape
        torch.Size([5, 2])
        """
        x, inside = run_on_crops(self.shared, crops, inside)
        branches = self.branches()[task]
        return {
            name: _single(run_on_crops(branches[name], x, inside)[0][:, :, 0, 0]) for name in names
        }

    def stages(self, names: tuple[str, ...]) -> tuple[tuple[Stage, ...], tuple[Stage, ...]]:
        """The stem, and the branches ``names`` of all tasks, as stages.

        >>> stem, branches = CenterHead(Config.small()).stages(("reg", "dim"))
        >>> [[len(stage.layers), len(stage.layers[0])] for stage in (*stem, *branches)]
        [[1, 1], [6, 2], [6, 2]]
        """
        if names not in self._stages:
            chains = [
                [cast(nn.Sequential, task[name]) for name in names] for task in self.branches()
            ]
            self._stages[names] = (
                (_stage([[self.shared]], 0, True),),
                (_stage(chains, 0, True), _stage(chains, 3, False)),
            )
        return self._stages[names]


def _stage(chains: list[list[nn.Sequential]], number: int, block: bool) -> Stage:
    """The convolution ``number`` of each chain; in a block, with the norm and the activation behind it."""
    layers = tuple(tuple(cast(nn.Conv2d, chain[number]) for chain in row) for row in chains)
    norms = (
        tuple(tuple(cast(nn.BatchNorm2d, chain[number + 1]) for chain in row) for row in chains)
        if block
        else None
    )
    return Stage(layers, norms, torch.relu if block else None)


def _single(x: Tensor) -> Tensor:
    """What comes out is at least in single precision: in half, a cell 50 m away is off by centimetres, and 1 - 1e-4 is 1."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _block(n_in: int, width: int) -> tuple[nn.Module, ...]:
    return (
        nn.Conv2d(n_in, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
    )
