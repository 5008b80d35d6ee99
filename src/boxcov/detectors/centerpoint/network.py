"""The network on the bird's-eye view: SECOND, SECONDFPN and CenterHead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from boxcov._torch.process_state import at_least_float32
from boxcov.detectors.centerpoint.config import Config, Dense
from boxcov.head_stages import Stage

TaskMaps = dict[str, Tensor]
Stages = tuple[Stage, ...]


class Second(nn.Module):
    """Blocks of 3x3 convolutions, the first of each strided; returns the map of every block."""

    def __init__(self, channels: int, dense: Dense) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        for width, layers, stride in zip(dense.widths, dense.layers, dense.strides):
            steps = [(channels, stride), *[(width, 1)] * layers]
            modules = (module for n_in, s in steps for module in _block(n_in, _norm(width), s))
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


class StackedMaps(list[TaskMaps]):
    """The maps of all tasks as views of one tensor, which is faster to read from.

    Its outputs are in the order of ``CenterHead``, the heat maps last; a class that a task does not
    have has a score of 0.
    """

    def __init__(self, stacked: Tensor, sizes: Sequence[dict[str, int]]) -> None:
        self.stacked = stacked  # (B, tasks, outputs, h, w)
        super().__init__(
            dict(zip(named, maps[:, : sum(named.values())].split(list(named.values()), 1)))
            for named, maps in zip(sizes, stacked.unbind(1))
        )


class CenterHead(nn.Module):
    """The neck's map (B, C, h, w) to one dict of maps per task.

    The maps are reg, height, dim, rot, vel and heatmap; dim is log (l, w, h), rot is (sin, cos) of
    the yaw.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        dense = config.dense
        self.shared = nn.Sequential(*_block(dense.neck, nn.BatchNorm2d(dense.shared)))
        outputs = [{**config.branches, "heatmap": len(classes)} for classes in config.tasks]
        self.tasks = nn.ModuleList(
            nn.ModuleDict({name: _branch(dense, n) for name, n in task.items()}) for task in outputs
        )
        self._stages: tuple[Stages, Stages, Stages] | None = None
        for task in self.branches():
            heat: Any = task["heatmap"]
            nn.init.constant_(heat[-1].bias, -2.19)  # rare objects: start from a probability of 0.1

    def branches(self) -> list[nn.ModuleDict]:
        return [cast(nn.ModuleDict, task) for task in self.tasks]

    def forward(self, features: Tensor) -> list[TaskMaps]:
        x = self.shared(features)
        # in half precision boxes at 50 m would be off by centimetres
        return [
            {name: at_least_float32(branch(x)) for name, branch in task.items()}
            for task in self.branches()
        ]

    def stages(self) -> tuple[Stages, Stages, Stages]:
        """Return stem, regression branches and heat-map branch of all tasks, as stages."""
        # needed for every frame, so built once; a copy of the head has other modules
        if self._stages is None or self._stages[0][0].layers[0][0] is not self.shared[0]:
            stem = (_stage([[self.shared]], 0, block=True),)
            names = [name for name in self.branches()[0] if name != "heatmap"]
            self._stages = (stem, self._chains(names), self._chains(["heatmap"]))
        return self._stages

    def _chains(self, names: list[str]) -> Stages:
        chains = [[cast(nn.Sequential, task[name]) for name in names] for task in self.branches()]
        return _stage(chains, 0, block=True), _stage(chains, 3, block=False)


def _stage(chains: list[list[nn.Sequential]], number: int, block: bool) -> Stage:
    """Return the stage of convolution ``number`` of each chain; block: with norm and ReLU."""
    layers = tuple(tuple(cast(nn.Conv2d, chain[number]) for chain in row) for row in chains)
    if not block:
        return Stage(layers)
    norms = tuple(tuple(cast(nn.BatchNorm2d, chain[number + 1]) for chain in row) for row in chains)
    return Stage(layers, norms, torch.relu)


def _branch(dense: Dense, n: int) -> nn.Sequential:
    hidden = _block(dense.shared, nn.BatchNorm2d(dense.branch))
    return nn.Sequential(*hidden, nn.Conv2d(dense.branch, n, 3, padding=1))


def _block(n_in: int, norm: nn.BatchNorm2d, stride: int = 1) -> tuple[nn.Module, ...]:
    conv = nn.Conv2d(n_in, norm.num_features, 3, stride, padding=1, bias=False)
    return conv, norm, nn.ReLU(inplace=True)


def _norm(width: int) -> nn.BatchNorm2d:
    """Return a norm of SECOND or SECONDFPN; the head has PyTorch's defaults."""
    return nn.BatchNorm2d(width, eps=1e-3, momentum=0.01)


def _resampling(n_in: int, width: int, stride: float) -> nn.Module:
    if stride > 1:
        return nn.ConvTranspose2d(n_in, width, int(stride), int(stride), bias=False)
    step = round(1 / stride)
    return nn.Conv2d(n_in, width, step, step, bias=False)
