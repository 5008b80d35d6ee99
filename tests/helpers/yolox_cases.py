"""Small YOLOX networks and images for the tests."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from boxcov.detectors.yolox import YOLOX, Config

SMALL = Config(
    width=4, depth=1, depthwise=True, classes=("cat", "dog", "cow"), threshold=0.25, max_boxes=6
)


def small(seed: int = 0, **changes: Any) -> YOLOX:
    """Return a float64 network with nontrivial norms and scores around 0.5."""
    detector = YOLOX(replace(SMALL, **changes), seed).double().eval()
    generator = torch.Generator().manual_seed(seed)
    for module in detector.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor, low in (
                (module.running_mean, -0.3),
                (module.running_var, 0.5),
                (module.weight, 0.5),
                (module.bias, -0.3),
            ):
                tensor.data.uniform_(low, low + 1, generator=generator)
    for layer in (*detector.head.cls_preds, *detector.head.obj_preds):
        layer.bias.data.fill_(0.3)
    return detector


def images(count: int = 1, height: int = 64, width: int = 96, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 255 * torch.rand(count, 3, height, width, generator=generator, dtype=torch.float64)


def objects(count: int, height: int = 64, width: int = 96, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    low = (
        torch.rand(count, 2, generator=generator, dtype=torch.float64)
        * torch.tensor([width - 20.0, height - 20.0]).double()
    )
    size = 8 + 40 * torch.rand(count, 2, generator=generator, dtype=torch.float64)
    return {
        "boxes": torch.cat([low, low + size], 1),
        "labels": torch.randint(0, 3, (count,), generator=generator),
    }


def nano() -> Path:
    """Return the folder of the trained nano network, or skip the test."""
    shared = Path(os.environ.get("BOXCOV_DATA", Path(__file__).parents[2] / "../shared/data"))
    if not (shared / "yolox_nano").is_dir():
        pytest.skip(f"no weights at {shared / 'yolox_nano'}: set BOXCOV_DATA")
    return shared / "yolox_nano"
