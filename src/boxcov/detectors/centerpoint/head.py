"""CenterHead: one shared convolution, then six small branches per task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from boxcov._torch.process_state import at_least_float32
from boxcov.detectors.centerpoint.config import Config, Dense
from boxcov.head_stages import Stage

TaskMaps = dict[str, Tensor]
Stages = tuple[Stage, ...]


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
        self.shared = nn.Sequential(*_block(dense.neck, dense.shared))
        outputs = [{**config.branches, "heatmap": len(classes)} for classes in config.tasks]
        self.tasks = nn.ModuleList(
            nn.ModuleDict({name: _branch(dense, n) for name, n in task.items()}) for task in outputs
        )
        self._stages: tuple[Stages, Stages, Stages] | None = None
        for task in self.branches():
            heat = cast(nn.Conv2d, cast(nn.Sequential, task["heatmap"])[-1])
            assert heat.bias is not None
            nn.init.constant_(heat.bias, -2.19)  # rare objects: start from a probability of 0.1

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
    hidden = _block(dense.shared, dense.branch)
    return nn.Sequential(*hidden, nn.Conv2d(dense.branch, n, 3, padding=1))


def _block(n_in: int, width: int) -> tuple[nn.Module, ...]:
    conv = nn.Conv2d(n_in, width, 3, padding=1, bias=False)
    return conv, nn.BatchNorm2d(width), nn.ReLU(inplace=True)
