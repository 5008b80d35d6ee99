"""A convolutional head: described as stages, and run on crops.

The head of a centre- or anchor-based detector is a stem that all boxes share, followed by branches:
short chains of convolutions, each of which gives a few numbers per box. The weights of the branches
may depend on the kind of the box: its task in CenterPoint, its level in a pyramid. From the stages
``ExactGLM`` computes all boxes at once.

Each box sees a small window of the feature map, so a head also runs on crops: one batch item per
instance, cut to its receptive field. Zero padding makes the border of the map special: a
convolution reads zeros beyond it, whatever the layers before would have given there. Every crop
therefore has a mask of its cells on the map, and each convolution masks its input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from boxcov._torch.layers import parse
from boxcov.errors import BoxcovError

if TYPE_CHECKING:
    from boxcov.detector import InstanceGroup


@dataclass(frozen=True)
class Stage:
    """A convolution, then optionally a norm in eval mode and a pointwise function.

    The convolution has stride 1 and keeps the size of the map. ``layers[kind][branch]`` has one row
    per kind of box; a stage of the stem has one row with one layer.
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
        names = ("kernel_size", "stride", "dilation", "groups", "padding", "padding_mode")
        needed = (k, k), (1, 1), (1, 1), 1, (k // 2, k // 2), "zeros"
        layers = [layer for row in self.layers for layer in row]
        return k % 2 == 1 and all(attrgetter(*names)(layer) == needed for layer in layers)


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
        logit = () if self.logit is None else self.logit.stages
        stem, *ends = (
            sum(stage.reach for stage in chain) for chain in (self.stem, self.branches, logit)
        )
        return stem + max(ends)


def crop(
    features: Tensor, frame: Tensor, row: Tensor, column: Tensor, radius: int
) -> tuple[Tensor, Tensor]:
    """Return crops around m cells of maps (B, C, height, width), and their masks.

    The crops are (m, C, s, s), s = 2 radius + 1. The mask (m, 1, s, s) is 1 for cells on the map
    and 0 beyond the border, where the crop is zero.

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


def run_on_crops(module: nn.Module, x: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
    """Run a module on crops x (m, C, s, s); return its output and the mask of the output.

    The module runs as it is, except that its convolutions are not padded: a 3x3 convolution removes
    one cell from each side. Convolutions must have stride 1 and keep the size of the map;
    everything else must be pointwise.

    >>> layers = nn.Sequential(nn.Conv2d(4, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 1, 1))
    >>> maps = torch.randn(1, 4, 8, 8)
    >>> crops, inside = crop(maps, *torch.tensor([[0], [0], [7]]), radius=1)
    >>> out, _ = run_on_crops(layers, crops, inside)
    >>> torch.allclose(out[0, :, 0, 0], layers(maps)[0, :, 0, 7], atol=1e-6)
    True
    """
    with _UnpaddedConvolutions(inside):
        out: Tensor = module(x)
    return out, _centre(inside, out)


class _UnpaddedConvolutions(TorchFunctionMode):
    """While active, convolutions mask their input and do not pad it."""

    def __init__(self, inside: Tensor) -> None:
        super().__init__()
        self.inside = inside

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call = parse(func, args, kwargs) if func is torch.conv2d else None
        if call is None:
            return func(*args, **kwargs)
        form = call.geometry
        same = tuple((reach // 2, reach // 2) for reach in form.reach)
        if form.padding != same or form.stride != (1, 1) or any(k % 2 == 0 for k in form.kernel):
            raise BoxcovError(
                "a convolution on crops must keep the size of the map: an odd kernel, stride 1 and "
                f"zero padding, got kernel {form.kernel}, stride {form.stride}, padding "
                f"{form.padding}, dilation {form.dilation}"
            )
        x = call.x * _centre(self.inside, call.x)
        return torch.conv2d(x, call.weight, call.bias, dilation=form.dilation, groups=form.groups)


def _centre(inside: Tensor, like: Tensor) -> Tensor:
    """Return the mask of the central cells that ``like`` (m, C, s, s) still has."""
    cut = (inside.shape[2] - like.shape[2]) // 2, (inside.shape[3] - like.shape[3]) // 2
    return inside[:, :, cut[0] : inside.shape[2] - cut[0], cut[1] : inside.shape[3] - cut[1]]


def stage_instances(stages: HeadStages, with_logit: bool = False) -> list[InstanceGroup] | None:
    """Return the instance groups of a head given as stages, one group per kind of box.

    The result is None if a stage does not fit, or if ``with_logit`` and the stages have no logit.
    The detector's own modules run on crops: autograd then checks the closed form of ``ExactGLM``.
    """
    if with_logit and stages.logit is None:
        return None
    logit = stages.logit if with_logit else None
    chains = (*stages.stem, *stages.branches, *(() if logit is None else logit.stages))
    if not all(stage.fits() for stage in chains):
        return None
    kinds = len(stages.branches[0].layers)
    everything = torch.arange(len(stages.kind), device=stages.kind.device)
    if kinds == 1:
        return [_group(stages, everything, 0, logit)]
    return [_group(stages, everything[stages.kind == k], k, logit) for k in range(kinds)]


def _group(
    stages: HeadStages, index: Tensor, kind: int, logit: LogitBranch | None
) -> InstanceGroup:
    frame, row, column = (t[index] for t in (stages.frame, stages.row, stages.column))

    def run() -> Tensor:
        x, inside = crop(stages.features, frame, row, column, stages.radius)
        x, inside = _run_chain(stages.stem, 0, 0, x, inside)

        def at_cell(chain: tuple[Stage, ...], branch: int) -> Tensor:
            out, _ = _run_chain(chain, kind, branch, x, inside)
            return out[:, :, out.shape[2] // 2, out.shape[3] // 2]

        branches = range(len(stages.branches[0].layers[kind]))
        numbers = torch.cat([at_cell(stages.branches, branch) for branch in branches], 1)
        boxes = stages.decode(numbers, row, column)
        if logit is None:
            return boxes
        of_class = logit.channel[index].unsqueeze(1)
        return torch.cat([boxes, at_cell(logit.stages, 0).gather(1, of_class)], 1)

    return index, run


def _run_chain(
    chain: tuple[Stage, ...], kind: int, branch: int, x: Tensor, inside: Tensor
) -> tuple[Tensor, Tensor]:
    """Run one branch of consecutive stages on crops; return its output and the output's mask."""
    for stage in chain:
        x, inside = run_on_crops(stage.layers[kind][branch], x, inside)
        x = x if stage.norms is None else stage.norms[kind][branch](x)
        x = x if stage.activation is None else stage.activation(x)
    return x, inside
