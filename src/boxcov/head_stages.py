"""A convolutional head as stages, from which ``ExactGLM`` computes all boxes at once.

The head of a centre- or anchor-based detector is a stem that all boxes share, followed by branches:
short chains of convolutions, each of which gives a few numbers per box. The weights of the branches
may depend on the kind of the box: its task in CenterPoint, its level in a pyramid. Each box sees a
small window of the feature map.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Stage:
    """A convolution, then optionally a norm in eval mode and a pointwise function.

    The convolution has stride 1 and keeps the size of the map. ``layers[kind][branch]`` has one row
    per kind of box; a stage of the stem has one row with one layer.

    >>> Stage(((nn.Conv2d(4, 2, 3, padding=1),),)).reach
    1
    """

    layers: tuple[tuple[nn.Conv2d, ...], ...]
    norms: tuple[tuple[nn.BatchNorm2d, ...], ...] | None = None
    activation: Callable[[Tensor], Tensor] | None = None

    @property
    def reach(self) -> int:
        """Number of cells that the convolution sees to each side."""
        return int(self.layers[0][0].kernel_size[0]) // 2

    def fits(self) -> bool:
        """Return whether all layers have the same odd kernel, stride 1, one group, zero padding."""
        k = self.layers[0][0].kernel_size[0]
        return all(
            layer.kernel_size == (k, k)
            and k % 2
            and layer.stride == (1, 1)
            and layer.dilation == (1, 1)
            and layer.groups == 1
            and layer.padding == (k // 2, k // 2)
            and layer.padding_mode == "zeros"
            for row in self.layers
            for layer in row
        )


@dataclass(frozen=True)
class LogitBranch:
    """The branch behind the stem that gives the score logits."""

    stages: tuple[Stage, ...]  # one layer per kind; the last stage gives one logit per class
    channel: Tensor  # (m,) the output of the last stage that is the logit of each box


@dataclass(frozen=True)
class HeadStages:
    """The head for the m boxes of a selection."""

    features: Tensor  # (B, C, height, width) what the stem reads
    frame: Tensor  # (m,) frame of the batch that each box is in
    row: Tensor  # (m,) row of its cell on the map
    column: Tensor  # (m,) column of its cell
    kind: Tensor  # (m,) the row of ``Stage.layers`` that a box uses
    stem: tuple[Stage, ...]  # at least one
    branches: tuple[Stage, ...]  # at least one; the last one gives the numbers
    # decode(numbers, row, column): numbers (m, R), branch by branch, to boxes (m, D), row by row
    decode: Callable[[Tensor, Tensor, Tensor], Tensor]
    logit: LogitBranch | None = None  # for ``Detector.instances(with_logit=True)``

    @property
    def radius(self) -> int:
        """Number of cells that a box sees to each side of its own."""
        ends = (self.branches, () if self.logit is None else self.logit.stages)
        stem = sum(stage.reach for stage in self.stem)
        return stem + max(sum(stage.reach for stage in chain) for chain in ends)
