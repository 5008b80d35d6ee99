"""A head as stages, for ``ExactGLM``: what a detector says of its head so that all boxes go through it in a handful of products.

The head of a centre- or anchor-based detector is a stem that all boxes share and, behind it, short chains of convolutions, the branches, each
of which gives a few numbers of a box. Which weights the branches have may depend on the kind of the box: its task in CenterPoint, its level in a
pyramid. Every box sees a small window of the feature map.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Stage:
    """One convolution of stride 1 that keeps the map's size, and what follows it: norm in eval mode, then a pointwise function.

    ``layers[kind][branch]``: one row for each kind of box. A stage of the stem has one row of one layer, for all boxes.

    >>> Stage(((nn.Conv2d(4, 2, 3, padding=1),),)).reach
    1
    """

    layers: tuple[tuple[nn.Conv2d, ...], ...]
    norms: tuple[tuple[nn.BatchNorm2d, ...], ...] | None = None
    activation: Callable[[Tensor], Tensor] | None = None

    @property
    def reach(self) -> int:
        """Cells that it looks to each side."""
        return int(self.layers[0][0].kernel_size[0]) // 2

    def fits(self) -> bool:
        """Whether its layers are what a stage can be: odd square kernels of one size, stride 1, zero padding to the same size, no groups."""
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
class HeadStages:
    """The head over the boxes of a selection."""

    features: Tensor  # (B, C, height, width) what the stem reads
    frame: Tensor  # (m,) the cells that the boxes stand on
    row: Tensor  # (m,)
    column: Tensor  # (m,)
    kind: Tensor  # (m,) which row of ``Stage.layers`` a box has
    stem: tuple[Stage, ...]  # at least one
    branches: tuple[Stage, ...]  # at least one; the last one gives the numbers
    decode: Callable[
        [Tensor, Tensor, Tensor], Tensor
    ]  # ``decode(numbers, row, column)``: (m, R), branch after branch, to boxes (m, D), row by row
