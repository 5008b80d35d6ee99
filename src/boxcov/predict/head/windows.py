"""Products of the first stage of a head with the windows that boxes see of tangents."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from boxcov.predict.head.cells import Plan
from boxcov.predict.head.weights import StageWeights


def convolve_windows(stage: StageWeights, plan: Plan, tangents: Tensor) -> Tensor:
    """Tangents (k, m, T, n_out) of the stage's outputs, of own cells, without a bias.

    tangents: (k, batch, C, height, width) of the feature map. Each cell of a window is read once,
    not once per tap of the kernel.
    """
    k, _, C = tangents.shape[:3]
    assert plan.inside is not None
    m = len(plan.stages[0].box_rows)
    side, taps = round((len(plan.map_cells) / m) ** 0.5), 2 * stage.reach + 1
    rows = tangents.permute(0, 1, 3, 4, 2).reshape(k, -1, C)  # no copy if channels are last
    W = stage.W[0, 0][: taps * taps * C].view(taps, taps, C, -1).permute(3, 2, 0, 1)
    W = W.to(tangents.dtype).contiguous(memory_format=torch.channels_last)
    outside, parts = ~plan.inside[:-1], []
    starts = plan.chunks(k, len(plan.map_cells) * C, tangents)
    for i in starts:
        inputs = rows[i : i + starts.step].index_select(1, plan.map_cells)
        inputs = inputs.masked_fill_(outside, 0).view(-1, side, side, C)
        out = F.conv2d(inputs.permute(0, 3, 1, 2), W)  # (k m, n_out, side', side')
        parts.append(out.permute(0, 2, 3, 1).flatten(1, 2).unflatten(0, (-1, m)))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
