"""Run a convolutional head on crops: one batch item per instance, cut to its receptive field.

Zero padding makes the border of the map special: a convolution reads zeros beyond it, whatever the
layers before would have given there. Every crop therefore has a mask of its cells on the map, and
each convolution masks its input.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from boxcov.errors import BoxcovError
from boxcov.head_stages import HeadStages, Stage

if TYPE_CHECKING:
    from boxcov.detector import InstanceGroup


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
        return self._conv2d(*args, **kwargs) if func is torch.conv2d else func(*args, **kwargs)

    def _conv2d(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        kernel, dilations = weight.shape[2:], _pair(dilation)
        same = tuple(d * (k - 1) // 2 for d, k in zip(dilations, kernel))
        kept = padding == "same" or (not isinstance(padding, str) and _pair(padding) == same)
        if not kept or _pair(stride) != (1, 1) or any(k % 2 == 0 for k in kernel):
            raise BoxcovError(
                "a convolution on crops must keep the size of the map: an odd kernel, stride 1 and "
                f"zero padding, got kernel {tuple(kernel)}, stride {stride}, padding {padding}, "
                f"dilation {dilation}"
            )
        masked = input * _centre(self.inside, input)
        return torch.conv2d(masked, weight, bias, dilation=dilation, groups=groups)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


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
    logit = stages.logit.stages if with_logit and stages.logit is not None else ()
    if not all(stage.fits() for stage in (*stages.stem, *stages.branches, *logit)):
        return None
    kinds = len(stages.branches[0].layers)
    everything = torch.arange(len(stages.kind), device=stages.kind.device)
    return [
        _group(
            stages,
            everything if kinds == 1 else (stages.kind == kind).nonzero()[:, 0],
            kind,
            with_logit,
        )
        for kind in range(kinds)
    ]


def _group(stages: HeadStages, index: Tensor, kind: int, with_logit: bool) -> InstanceGroup:
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
        if stages.logit is None or not with_logit:
            return boxes
        logits = at_cell(stages.logit.stages, 0)
        return torch.cat([boxes, logits.gather(1, stages.logit.channel[index].unsqueeze(1))], 1)

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
