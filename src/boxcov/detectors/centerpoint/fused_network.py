"""CenterPoint's network for deployment: fixed shapes from the points on, and few launches.

Batch norms are folded into the convolutions before them, the branches of a task run side by side,
and no step waits for the device, so that a whole frame can be one CUDA graph. The raw outputs are
those of the detector up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval

from boxcov._torch.layers import at_least_float32
from boxcov._torch.modules import shadow
from boxcov._torch.process_state import allows_tf32
from boxcov.detectors.centerpoint.head import CenterHead, StackedMaps
from boxcov.detectors.centerpoint.pillar_encoder import FusedPillars
from boxcov.detectors.centerpoint.point_signals import point_maps
from boxcov.detectors.centerpoint.voxel_encoder import VoxelEncoder
from boxcov.detectors.centerpoint.voxels import concatenate, voxelise, voxelise_padded

if TYPE_CHECKING:
    from boxcov.detectors.centerpoint.detector import CenterPoint

_ROOM = 1.3  # for more points, cells and sites than in the example
_FAR = 1e9  # metres: outside every range


class FusedCenterPoint:
    """``network(*network.pack(inputs))`` returns raw outputs, and what is beyond the limits ().

    example: its number of frames is fixed, and its points set the limits of later inputs.
    """

    def __init__(self, detector: CenterPoint, example: Sequence[Tensor]) -> None:
        detector = shadow(detector)  # in eval mode
        encoder = detector.encoder
        self._config, self._frames = detector.config, len(example)
        self._grid = detector.config.voxel_grid(training=False)
        self._points = int(_ROOM * sum(len(cloud) for cloud in example)) + 1
        # at the height of different rows: many threads would wait to write to the same cell
        self._padding = example[0].new_full((self._points, 5), _FAR)
        low, high = detector.config.point_range[1::3]
        self._padding[:, 1] = torch.linspace(low, high, self._points, device=example[0].device)
        cells = voxelise(example, self._grid)
        self._most_cells = int(_ROOM * len(cells.counts)) + 1
        self._most_sites: list[int] = []  # of each strided stage
        self._encoder = encoder if isinstance(encoder, VoxelEncoder) else FusedPillars(encoder)
        if isinstance(encoder, VoxelEncoder):
            counts = encoder.encode(cells, self._frames)[1]
            self._most_sites = [int(_ROOM * int(count)) + 1 for count in counts]
        # tensor cores read channels side by side; without them cuDNN is faster map by map
        uses_tensor_cores = allows_tf32()[1] or cells.points.dtype == torch.float16
        self._format = torch.channels_last if uses_tensor_cores else torch.contiguous_format
        self._blocks = [fold_norms(block, self._format) for block in detector.backbone.blocks]
        self._deblocks = [fold_norms(block, self._format) for block in detector.neck.deblocks]
        self.head = FusedHead(detector.head)

    def pack(self, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
        """Return points (N, 5), padded with points far away, and the frame (N,) of each.

        None if there are too many points, or another number of frames.
        """
        points, frame = concatenate(inputs, self._grid.shuffled)
        missing = self._points - len(points)
        if len(inputs) != self._frames or missing < 0:
            return None
        padded = torch.cat([points, self._padding[:missing]])
        return padded, F.pad(frame, (0, missing), value=self._frames - 1)

    def __call__(self, *packed: Tensor) -> tuple[dict[str, Any], Tensor]:
        bev, excess = self.encode(*packed)
        features = self.dense(bev)
        return {"features": features, "tasks": self.head(features)}, excess

    def signal_inputs(self, *packed: Tensor) -> Tensor:
        points, frame = packed
        return point_maps(points, frame, self._frames, self._config)

    def dense(self, bev: Tensor) -> Tensor:
        """Return the neck's map of a bird's-eye view."""
        x, maps = bev.contiguous(memory_format=self._format), []
        for block, deblock in zip(self._blocks, self._deblocks):
            x = block(x)
            maps.append(deblock(x))
        return torch.cat(maps, 1).contiguous(memory_format=torch.channels_last)

    def encode(self, points: Tensor, frame: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bird's-eye view, and how many cells and sites are beyond the limits ()."""
        cells, excess = voxelise_padded(points, frame, self._grid, self._frames, self._most_cells)
        if not isinstance(self._encoder, VoxelEncoder):
            return self._encoder(cells, self._frames), excess
        bev, counts = self._encoder.encode(cells, self._frames, self._most_sites)
        for count, most in zip(counts, self._most_sites):
            excess = excess + (count - most).clamp(min=0)
        return bev, excess


class FusedHead:
    """A CenterHead as three convolutions: all tasks and branches run side by side.

    The second one has a group per task, in which branches are blocks on the diagonal; tasks with
    fewer outputs are padded.
    """

    def __init__(self, head: CenterHead) -> None:
        self._shared = fold_norms(head.shared, torch.channels_last)
        tasks = [{name: cast(Any, chain) for name, chain in t.items()} for t in head.branches()]
        self._sizes: list[dict[str, int]] = [
            {name: chain[3].out_channels for name, chain in task.items()} for task in tasks
        ]
        fused = [_fuse(chain[0], chain[1]) for task in tasks for chain in task.values()]
        first = [(conv.weight, conv.bias) for conv in fused]
        last = [_block_diagonal([chain[3] for chain in task.values()]) for task in tasks]
        most = max(len(bias) for _, bias in last)
        # a class that is not there has a score of 0
        last = [(_pad_rows(W, most, 0), _pad_rows(b, most, -torch.inf)) for W, b in last]
        self._first, self._last = _side_by_side(first), _side_by_side(last)

    def __call__(self, features: Tensor) -> StackedMaps:
        groups = len(self._sizes)
        hidden = F.conv2d(self._shared(features), *self._first, padding=1).relu_()
        out = at_least_float32(F.conv2d(hidden, *self._last, padding=1, groups=groups))
        return StackedMaps(out.unflatten(1, (groups, -1)), self._sizes)


def _side_by_side(layers: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return weight and bias of one convolution that computes the outputs of all layers."""
    weights, biases = zip(*layers)
    return torch.cat(weights).contiguous(memory_format=torch.channels_last), torch.cat(biases)


def _pad_rows(x: Tensor, count: int, value: float) -> Tensor:
    return torch.cat([x, x.new_full((count - len(x), *x.shape[1:]), value)])


def _block_diagonal(layers: Sequence[nn.Conv2d]) -> tuple[Tensor, Tensor]:
    """Return weight and bias of layers side by side, each on its own input channels."""
    rows, columns = (sum(layer.weight.shape[i] for layer in layers) for i in (0, 1))
    weight = layers[0].weight.new_zeros(rows, columns, *layers[0].kernel_size)
    row = column = 0
    for layer in layers:
        n_out, n_in = layer.weight.shape[:2]
        weight[row : row + n_out, column : column + n_in] = layer.weight.detach()
        row, column = row + n_out, column + n_in
    return weight, torch.cat([cast(Tensor, layer.bias).detach() for layer in layers])


def fold_norms(
    block: nn.Module, memory_format: torch.memory_format = torch.contiguous_format
) -> nn.Sequential:
    """Return convolutions, batch norms and ReLUs as convolutions and ReLUs."""
    folded: list[nn.Module] = []
    for module in cast(nn.Sequential, block):
        if isinstance(module, nn.BatchNorm2d):
            folded.append(_fuse(folded.pop(), module).to(memory_format=memory_format))
        else:
            folded.append(module)
    return nn.Sequential(*folded).eval()


def _fuse(conv: Any, norm: nn.BatchNorm2d) -> Any:
    """Return a convolution that includes the norm behind it."""
    is_transposed = isinstance(conv, nn.ConvTranspose2d)
    return fuse_conv_bn_eval(conv, norm, is_transposed).requires_grad_(False)
