from __future__ import annotations

import pytest
import torch
from torch import nn

from boxcov import BoxcovError
from boxcov.head_stages import HeadStages, LogitBranch, Stage, crop, run_on_crops, stage_instances

CELLS = torch.tensor([[0, 1, 0, 1, 0], [0, 7, 3, 4, 6], [0, 9, 5, 0, 9]])  # corners, edges, middle


def conv(n_in: int, n_out: int, kernel: int = 3, **other: int) -> nn.Conv2d:
    return nn.Conv2d(n_in, n_out, kernel, padding=kernel // 2 * other.get("dilation", 1), **other)


class Twice(nn.Module):
    """One activation and one convolution, each used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act = conv(4, 4), nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.conv(self.act(self.conv(x))))


def shared() -> nn.Sequential:
    act = nn.Tanh()
    return nn.Sequential(conv(4, 6), act, conv(6, 4, 1), act)


@pytest.mark.parametrize(
    "layers",
    [
        Twice(),
        shared(),
        nn.Sequential(nn.Sequential(conv(4, 4, groups=4), nn.ReLU(inplace=True)), conv(4, 2, 1)),
        nn.Sequential(conv(4, 3, dilation=2), nn.Sigmoid(), nn.Conv2d(3, 2, 5, padding="same")),
    ],
    ids=["twice", "shared activation", "depthwise", "dilated"],
)
def test_crops_give_what_the_whole_map_gives(layers: nn.Module) -> None:
    maps, radius = torch.randn(2, 4, 8, 10, dtype=torch.float64), 5
    layers.double()
    frame, row, column = CELLS
    out, inside = run_on_crops(layers, *crop(maps, frame, row, column, radius))
    middle = out.shape[2] // 2
    expected = layers(maps)[frame, :, row, column]
    torch.testing.assert_close(out[:, :, middle, middle], expected)
    assert inside.shape[2:] == out.shape[2:]


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 2, 3, stride=2, padding=1),
        nn.Conv2d(4, 2, 3),
        nn.Conv2d(4, 2, 2),
        nn.Conv2d(4, 2, 3, padding=1, padding_mode="circular"),
    ],
)
def test_a_convolution_that_changes_the_map_is_refused(layer: nn.Module) -> None:
    crops, inside = crop(torch.ones(1, 4, 8, 8), *torch.tensor([[0], [3], [3]]), radius=3)
    with pytest.raises(BoxcovError, match="must keep the size of the map"):
        run_on_crops(layer, crops, inside)


def head_stages(kinds: int = 2) -> tuple[HeadStages, nn.ModuleList]:
    stem, norm = conv(4, 5), nn.BatchNorm2d(5)
    norm.running_mean.uniform_()
    branches = [[conv(5, 2), conv(5, 1)] for _ in range(kinds)]
    heat = [[conv(5, 3, 1)] for _ in range(kinds)]
    modules = nn.ModuleList([stem, norm, *(m for row in (*branches, *heat) for m in row)])
    modules.double().eval()
    frame, row, column = CELLS
    return HeadStages(
        torch.randn(2, 4, 8, 10, dtype=torch.float64),
        frame,
        row,
        column,
        kind=torch.tensor([0, 1, 1, 0, 1]) % kinds,
        stem=(Stage(((stem,),), ((norm,),), torch.relu),),
        branches=(Stage(tuple(map(tuple, branches))),),
        decode=lambda numbers, row, column: numbers + row.unsqueeze(1),
        logit=LogitBranch((Stage(tuple(map(tuple, heat))),), torch.tensor([0, 1, 2, 1, 0])),
    ), modules


@pytest.mark.parametrize("kinds", [1, 2])
def test_instances_of_stages_are_the_head_at_each_cell(kinds: int) -> None:
    stages, _ = head_stages(kinds)
    x = stages.stem[0].norms[0][0](stages.stem[0].layers[0][0](stages.features)).relu()
    groups = stage_instances(stages, with_logit=True)
    assert len(groups) == kinds
    assert sorted(torch.cat([index for index, _ in groups]).tolist()) == list(range(5))
    for index, run in groups:
        for i, found in zip(index.tolist(), run()):
            frame, row, column = CELLS[:, i].tolist()
            reg = [layer(x) for layer in stages.branches[0].layers[stages.kind[i]]]
            heat = stages.logit.stages[0].layers[stages.kind[i]][0](x)
            numbers = torch.cat(reg, 1)[frame, :, row, column] + row
            logit = heat[frame, stages.logit.channel[i], row, column]
            torch.testing.assert_close(found, torch.cat([numbers, logit[None]]))


def test_stages_that_do_not_fit_or_have_no_logit() -> None:
    stages, _ = head_stages()
    odd = Stage(((nn.Conv2d(4, 5, 3, stride=2, padding=1),),))
    assert stage_instances(HeadStages(**{**stages.__dict__, "stem": (odd,)})) is None
    assert stage_instances(HeadStages(**{**stages.__dict__, "logit": None}), True) is None
