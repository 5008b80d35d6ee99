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

from boxcov._torch.modules import shadow
from boxcov._torch.process_state import allows_tf32, at_least_float32
from boxcov.detectors.centerpoint.network import CenterHead, StackedMaps
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
    """A CenterHead as three layers: all tasks and branches run side by side.

    The last one has few outputs, for which cuDNN has no fast convolution: a product computes what
    each cell adds to its neighbours, and a second step adds it up. Branches are blocks of a matrix
    per task; tasks with fewer outputs are padded.
    """

    def __init__(self, head: CenterHead) -> None:
        self._shared = fold_norms(head.shared, torch.channels_last)
        tasks = [{name: cast(Any, chain) for name, chain in t.items()} for t in head.branches()]
        self._sizes: list[dict[str, int]] = [
            {name: chain[3].out_channels for name, chain in task.items()} for task in tasks
        ]
        first = [fuse_conv_bn_eval(chain[0], chain[1]) for t in tasks for chain in t.values()]
        side_by_side = first[0]
        side_by_side.weight = nn.Parameter(torch.cat([conv.weight for conv in first]))
        side_by_side.bias = nn.Parameter(torch.cat([conv.bias for conv in first]))
        fused: Any = ConvReLU(side_by_side)
        self._first = fused.to(memory_format=torch.channels_last)
        last = [_block_diagonal([chain[3] for chain in task.values()]) for task in tasks]
        most = max(len(bias) for _, bias in last)
        self._kernel_size = last[0][0].shape[2]
        # what a cell adds to its neighbour on the right is what that has on its left: flipped
        steps = torch.stack([_pad_rows(W, most, 0) for W, _ in last]).flip(3, 4)  # (G, n, C, k, k)
        self._last = steps.permute(0, 1, 3, 4, 2).flatten(1, 3).contiguous()  # (G, n k k, C)
        # a class that is not there has a score of 0
        biases = torch.stack([_pad_rows(b, most, -torch.inf) for _, b in last])
        self._bias = at_least_float32(biases)[:, :, None, None]

    def __call__(self, features: Tensor) -> StackedMaps:
        hidden = self._first(self._shared(features))
        return StackedMaps(torch.stack([self._outputs(frame) for frame in hidden]), self._sizes)

    def _outputs(self, hidden: Tensor) -> Tensor:
        """Return the last layer's outputs (G, n, h, w) of a frame (G C, h, w)."""
        own = hidden.flatten(1).unflatten(0, (len(self._last), -1))  # (G, C, h w)
        added, k = at_least_float32(torch.bmm(self._last, own)), self._kernel_size
        size = hidden.shape[1], hidden.shape[2]
        return F.fold(added, size, kernel_size=k, padding=k // 2) + self._bias


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


class ConvReLU(nn.Module):
    """A convolution and a ReLU, with cuDNN as one kernel."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        conv = self.conv
        if not torch.backends.cudnn.is_acceptable(x):
            return F.relu_(conv(x))
        form: Any = (conv.stride, conv.padding, conv.dilation, conv.groups)
        return torch.cudnn_convolution_relu(x, conv.weight, conv.bias, *form)


def fold_norms(
    block: nn.Module, memory_format: torch.memory_format = torch.contiguous_format
) -> nn.Sequential:
    """Return convolutions, batch norms and ReLUs as convolutions with ReLUs."""
    folded: list[nn.Module] = []
    for module in cast(nn.Sequential, block):
        if isinstance(module, nn.BatchNorm2d):
            is_transposed = isinstance(folded[-1], nn.ConvTranspose2d)
            folded.append(fuse_conv_bn_eval(cast(Any, folded.pop()), module, is_transposed))
        elif isinstance(module, nn.ReLU) and type(folded[-1]) is nn.Conv2d:
            folded.append(ConvReLU(folded.pop()))  # type: ignore[arg-type]
        else:
            folded.append(module)
    chain: Any = nn.Sequential(*folded).eval().requires_grad_(False)
    return cast(nn.Sequential, chain.to(memory_format=memory_format))
