"""CenterPoint as det3d, mmdetection3d and OpenPCDet build it, independent of boxcov.

The module trees follow the frameworks', so that the state dicts have their names and shapes. Sparse
convolutions are dense ones here, masked to the active sites.
"""

from __future__ import annotations

from dataclasses import replace
from math import pi

import torch
from torch import nn
from torch.nn import functional as F

from boxcov.detectors.centerpoint.config import Pillars
from boxcov.detectors.centerpoint.voxels import voxelise
from helpers.centerpoint_cases import slow_pillars

LAYOUTS = {
    "spconv1": (1, 2, 3, 4, 0),
    "spconv2": (0, 1, 2, 3, 4),
    "third": (1, 2, 3, 0, 4),
}  # of (out, kz, ky, kx, in)


class Sparse(nn.Module):
    def __init__(
        self,
        n_in,
        n_out,
        kernel=(3, 3, 3),
        stride=(1, 1, 1),
        padding=(1, 1, 1),
        bias=False,
        layout="spconv1",
    ):
        super().__init__()
        self.stride, self.padding, self.order = stride, padding, LAYOUTS[layout]
        weight = torch.randn(n_out, *kernel, n_in) / (n_in * 9) ** 0.5
        self.weight = nn.Parameter(weight.permute(self.order).contiguous())
        if bias:
            self.bias = nn.Parameter(torch.randn(n_out))

    def forward(self, given):
        x, mask = given
        back = [self.order.index(i) for i in range(5)]
        kernel = self.weight.permute(back).permute(0, 4, 1, 2, 3)
        if self.stride != (1, 1, 1):
            mask = (
                F.conv3d(
                    mask,
                    mask.new_ones(1, 1, *kernel.shape[2:]),
                    stride=self.stride,
                    padding=self.padding,
                )
                > 0
            ).to(x)
        out = F.conv3d(
            x, kernel, getattr(self, "bias", None), stride=self.stride, padding=self.padding
        )
        return out * mask, mask


class SparseNorm(nn.BatchNorm1d):
    def __init__(self, width):
        super().__init__(width, eps=1e-3)

    def forward(self, given):
        x, mask = given
        return F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
        ) * mask, mask


class SparseReLU(nn.Module):
    def forward(self, given):
        return given[0].relu(), given[1]


class KroneckerBlock(nn.Module):
    def __init__(self, width, bias, layout):
        super().__init__()
        self.conv1, self.bn1 = Sparse(width, width, bias=bias, layout=layout), SparseNorm(width)
        self.conv2, self.bn2 = Sparse(width, width, bias=bias, layout=layout), SparseNorm(width)

    def forward(self, given):
        x, mask = self.bn1(self.conv1(given))
        x, _ = self.bn2(self.conv2((x.relu(), mask)))
        return (x + given[0]).relu(), mask


def sparse_encoder(config, framework, layout):
    a, b, c, d = config.encoder.widths
    bias = framework != "mmdet3d"

    def conv(n_in, n_out, **form):
        return [Sparse(n_in, n_out, layout=layout, **form), SparseNorm(n_out), SparseReLU()]

    def blocks(width):
        return [KroneckerBlock(width, bias, layout), KroneckerBlock(width, bias, layout)]

    first = nn.Sequential(*conv(5, a))
    down = [
        conv(a, b, stride=(2, 2, 2)),
        conv(b, c, stride=(2, 2, 2)),
        conv(c, d, stride=(2, 2, 2), padding=(0, 1, 1)),
    ]
    last = nn.Sequential(*conv(d, d, kernel=(3, 1, 1), stride=(2, 1, 1), padding=(0, 0, 0)))
    tree = nn.Module()
    tree.conv_input = first
    if framework == "mmdet3d":
        tree.encoder_layers = nn.ModuleDict(
            {
                f"encoder_layer{i + 1}": nn.Sequential(
                    *blocks(width), *([nn.Sequential(*down[i])] if i < 3 else [])
                )
                for i, width in enumerate((a, b, c, d))
            }
        )
        steps = list(tree.encoder_layers.values())
    else:
        steps = [nn.Sequential(*blocks(a))]
        for i, width in enumerate((b, c, d)):
            into = down[i] if framework == "det3d" else [nn.Sequential(*down[i])]
            steps.append(nn.Sequential(*into, *blocks(width)))
        for i, step in enumerate(steps):
            setattr(tree, f"conv{i + 1}", step)
    setattr(tree, "extra_conv" if framework == "det3d" else "conv_out", last)
    tree.run = lambda given: _chain([first, *steps, last], given)
    return tree


def _chain(steps, x):
    for step in steps:
        x = step(x)
    return x


class PFN(nn.Module):
    def __init__(self, n_in, n_out, last):
        super().__init__()
        self.linear, self.norm, self.last = (
            nn.Linear(n_in, n_out, bias=False),
            nn.BatchNorm1d(n_out, eps=1e-3),
            last,
        )


def pillar_encoder(config):
    widths = config.encoder.widths
    sizes = [
        (n_in, w if i == len(widths) - 1 else w // 2)
        for i, (n_in, w) in enumerate(zip((config.encoder.point_features, *widths), widths))
    ]
    tree = nn.Module()
    tree.pfn_layers = nn.ModuleList(
        PFN(n_in, n_out, i == len(widths) - 1) for i, (n_in, n_out) in enumerate(sizes)
    )
    return tree


def rpn(config, channels, framework):
    dense, blocks, deblocks = config.dense, [], []
    for width, count, stride in zip(dense.widths, dense.layers, dense.strides):
        pad = framework != "mmdet3d"
        steps = [nn.ZeroPad2d(1)] if pad else []
        steps += [
            nn.Conv2d(channels, width, 3, stride, 0 if pad else 1, bias=False),
            nn.BatchNorm2d(width, eps=1e-3),
            nn.ReLU(),
        ]
        for _ in range(count):
            steps += [
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width, eps=1e-3),
                nn.ReLU(),
            ]
        blocks.append(nn.Sequential(*steps))
        channels = width
    for n_in, width, stride in zip(dense.widths, dense.up_widths, dense.up_strides):
        if stride > 1 or (stride == 1 and framework == "openpcdet"):
            conv = nn.ConvTranspose2d(n_in, width, int(stride), int(stride), bias=False)
        else:
            conv = nn.Conv2d(n_in, width, round(1 / stride), round(1 / stride), bias=False)
        deblocks.append(nn.Sequential(conv, nn.BatchNorm2d(width, eps=1e-3), nn.ReLU()))
    return nn.ModuleList(blocks), nn.ModuleList(deblocks)


class ConvModule(nn.Module):
    """mmcv's convolution module, whose layers have names."""

    def __init__(self, n_in, n_out):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(n_in, n_out, 3, padding=1, bias=False), nn.BatchNorm2d(n_out)

    def forward(self, x):
        return self.bn(self.conv(x)).relu()


def conv_block(n_in, n_out, framework):
    if framework == "mmdet3d":
        return ConvModule(n_in, n_out)
    return nn.Sequential(nn.Conv2d(n_in, n_out, 3, padding=1), nn.BatchNorm2d(n_out), nn.ReLU())


def head(config, framework):
    dense = config.dense
    new = {
        "openpcdet": {"reg": "center", "height": "center_z", "heatmap": "hm"},
        "det3d": {"heatmap": "hm"},
    }.get(framework, {})
    tree = nn.Module()
    tree.shared_conv = conv_block(dense.neck, dense.shared, framework)
    tasks = nn.ModuleList()
    for names in config.tasks:
        task = nn.ModuleDict()
        for branch, n in {**config.branches, "heatmap": len(names)}.items():
            first, last = (
                conv_block(dense.shared, dense.branch, framework),
                nn.Conv2d(dense.branch, n, 3, padding=1),
            )
            task[new.get(branch, branch)] = (
                nn.Sequential(*first, last) if framework == "det3d" else nn.Sequential(first, last)
            )
        tasks.append(task)
    setattr(
        tree,
        {"mmdet3d": "task_heads", "det3d": "tasks", "openpcdet": "heads_list"}[framework],
        tasks,
    )
    tree.list = lambda: tasks
    return tree


class Foreign(nn.Module):
    """A whole network of a framework, with random weights and norms."""

    def __init__(self, config, framework, layout="spconv1", seed=0):
        super().__init__()
        self.config, self.framework = config, framework
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            pillars = isinstance(config.encoder, Pillars)
            encoder = (
                pillar_encoder(config) if pillars else sparse_encoder(config, framework, layout)
            )
            names = {
                "mmdet3d": ("pts_voxel_encoder", "pts_middle_encoder"),
                "det3d": ("reader", "backbone"),
                "openpcdet": ("vfe", "backbone_3d"),
            }
            setattr(self, names[framework][0 if pillars else 1], encoder)
            blocks, deblocks = rpn(config, config.bev_channels, framework)
            if framework == "mmdet3d":
                self.pts_backbone, self.pts_neck = nn.Module(), nn.Module()
                self.pts_backbone.blocks, self.pts_neck.deblocks = blocks, deblocks
            else:
                both = nn.Module()
                both.blocks, both.deblocks = blocks, deblocks
                setattr(self, "neck" if framework == "det3d" else "backbone_2d", both)
            last = head(config, framework)
            setattr(
                self,
                {"mmdet3d": "pts_bbox_head", "det3d": "bbox_head", "openpcdet": "dense_head"}[
                    framework
                ],
                last,
            )
            self.steps = lambda: (encoder, blocks, deblocks, last)
            for module in self.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    nn.init.normal_(module.running_mean, std=0.1)
                    nn.init.uniform_(module.running_var, 0.5, 1.5)
                    nn.init.uniform_(module.weight, 0.8, 1.2)
                    nn.init.uniform_(module.bias, 0.2, 0.5)
        self.eval()

    def forward(self, clouds):
        encoder, blocks, deblocks, last = self.steps()
        x = self._bev(encoder, clouds)
        maps = []
        for block, deblock in zip(blocks, deblocks):
            x = block(x)
            maps.append(deblock(x))
        x = last.shared_conv(torch.cat(maps, 1))
        return [{name: branch(x) for name, branch in task.items()} for task in last.list()]

    def _bev(self, encoder, clouds):
        config = self.config
        if isinstance(config.encoder, Pillars):
            return slow_pillars(config, encoder.pfn_layers, clouds)
        cells = voxelise(clouds, replace(config.voxel_grid(training=False), max_cells=None))
        mean = torch.stack(
            [cells.points[cells.cell == i].mean(0) for i in range(len(cells.counts))]
        )
        nx, ny, nz = config.grid
        x = mean.new_zeros(len(clouds), 5, nz + 1, ny, nx)
        mask = mean.new_zeros(len(clouds), 1, nz + 1, ny, nx)
        b, z, y, column = cells.position.T
        x[b, :, z, y, column], mask[b, :, z, y, column] = mean, mean.new_ones(len(mean), 1)
        out, _ = encoder.run((x, mask))
        return out.reshape(len(clouds), -1, *out.shape[3:])

    def boxes(self, maps):
        """Boxes (cells, 9) of a task by the framework's decoding, as x y z w l h yaw vx vy."""
        centre, height = (
            ("center", "center_z") if self.framework == "openpcdet" else ("reg", "height")
        )
        flat = {name: m[0].flatten(1).T for name, m in maps.items()}
        rows, columns = maps[centre].shape[2:]
        row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        xy = torch.stack([column.flatten(), row.flatten()], 1) + flat[centre]
        xy = xy * torch.tensor(self.config.cell) + torch.tensor(self.config.point_range[:2])
        size = flat["dim"].exp()
        if self.framework == "det3d":
            yaw = -torch.atan2(flat["rot"][:, 0], flat["rot"][:, 1]) - pi / 2
        else:
            size = size[:, [1, 0, 2]]
            sin, cos = (0, 1) if self.framework == "mmdet3d" else (1, 0)
            yaw = torch.atan2(flat["rot"][:, sin], flat["rot"][:, cos])
        return torch.cat([xy, flat[height], size, yaw.unsqueeze(1), flat["vel"]], 1)
