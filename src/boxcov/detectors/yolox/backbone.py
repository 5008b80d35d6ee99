"""CSPDarknet, and the pyramid (PAFPN) over its last three maps, top-down and bottom-up."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from boxcov.detectors.yolox.config import Config
from boxcov.detectors.yolox.layers import CSPLayer, Focus, SPPBottleneck, conv


class CSPDarknet(nn.Module):
    """Images (B, 3, h, w) to maps of strides 8, 16 and 32."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        w, n = config.width, config.depth
        self.stem = Focus(config, w)

        def stage(n_in: int, blocks: int) -> nn.Sequential:
            halved = conv(config, n_in, 2 * n_in, 3, stride=2)
            return nn.Sequential(halved, CSPLayer(config, 2 * n_in, 2 * n_in, blocks))

        self.dark2 = stage(w, n)
        self.dark3 = stage(2 * w, 3 * n)
        self.dark4 = stage(4 * w, 3 * n)
        self.dark5 = nn.Sequential(
            conv(config, 8 * w, 16 * w, 3, 2),
            SPPBottleneck(config, 16 * w),
            CSPLayer(config, 16 * w, 16 * w, n, shortcut=False),
        )

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        fine = self.dark3(self.dark2(self.stem(images)))
        middle = self.dark4(fine)
        return fine, middle, self.dark5(middle)


class PAFPN(nn.Module):
    """Images (B, 3, h, w) to maps of strides 8, 16 and 32, with 4, 8 and 16 widths of channels."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        a, b, c = (k * config.width for k in (4, 8, 16))

        def csp(n_in: int, n_out: int) -> CSPLayer:
            return CSPLayer(config, n_in, n_out, config.depth, shortcut=False)

        self.backbone = CSPDarknet(config)
        self.lateral_conv0 = conv(config, c, b, 1)
        self.C3_p4 = csp(2 * b, b)
        self.reduce_conv1 = conv(config, b, a, 1)
        self.C3_p3 = csp(2 * a, a)
        self.bu_conv2 = conv(config, a, a, 3, 2)
        self.C3_n3 = csp(2 * a, b)
        self.bu_conv1 = conv(config, b, b, 3, 2)
        self.C3_n4 = csp(2 * b, c)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        fine, middle, coarse = self.backbone(images)
        down0 = self.lateral_conv0(coarse)
        middle = self.C3_p4(torch.cat([_upsample(down0), middle], 1))
        down1 = self.reduce_conv1(middle)
        out0 = self.C3_p3(torch.cat([_upsample(down1), fine], 1))
        out1 = self.C3_n3(torch.cat([self.bu_conv2(out0), down1], 1))
        out2 = self.C3_n4(torch.cat([self.bu_conv1(out1), down0], 1))
        return out0, out1, out2

    def neck(self) -> tuple[nn.Module, ...]:
        """Return the modules of the pyramid, without the backbone."""
        return tuple(module for name, module in self.named_children() if name != "backbone")


def _upsample(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode="nearest")
