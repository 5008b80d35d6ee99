"""Small random models of torchvision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

try:
    import torchvision
    from torchvision.models import detection
    from torchvision.models.detection.anchor_utils import AnchorGenerator, DefaultBoxGenerator
    from torchvision.ops import MultiScaleRoIAlign, boxes

    boxes.nms(
        torch.zeros(1, 4), torch.zeros(1), 0.5
    )  # its compiled part may be missing though it imports
except Exception as error:  # built for another torch, it fails in many ways
    pytest.skip(
        f"torchvision cannot be used here: {type(error).__name__}: {str(error)[:80]}",
        allow_module_level=True,
    )

__all__ = ["MODELS", "NAMES", "images", "objects", "torchvision"]
NAMES = ["__background__", "cat", "cow", "dog"]


class Pyramid(nn.Module):
    """Two levels, of strides 8 and 16."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.out_channels = width
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 5, 4, 2),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 12, 3, 2, 1),
            nn.ReLU(),
        )
        self.fpn = nn.ModuleDict(
            {"fine": nn.Conv2d(12, width, 1), "coarse": nn.Conv2d(12, width, 3, 2, 1)}
        )

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.body(x)
        return {"0": self.fpn["fine"](x), "1": self.fpn["coarse"](x)}


def retinanet() -> nn.Module:
    anchors = AnchorGenerator(((16, 24), (32, 48)), ((0.5, 1.0),) * 2)
    return _random(
        lambda: detection.RetinaNet(
            Pyramid(8), 4, 64, 96, anchor_generator=anchors, score_thresh=0.3, detections_per_img=9
        )
    )


def retinanet_normed() -> nn.Module:
    from torchvision.models.detection.retinanet import RetinaNetHead

    anchors = AnchorGenerator(((16, 24), (32, 48)), ((0.5, 1.0),) * 2)
    head = RetinaNetHead(8, 4, 4, norm_layer=lambda channels: nn.GroupNorm(4, channels))
    options: dict[str, Any] = {
        "anchor_generator": anchors,
        "head": head,
        "score_thresh": 0.3,
        "detections_per_img": 5,
    }
    return _random(lambda: detection.RetinaNet(Pyramid(8), 4, 64, 96, **options))


def fcos() -> nn.Module:
    anchors = AnchorGenerator(((8,), (16,)), ((1.0,),) * 2)
    return _random(
        lambda: detection.FCOS(
            Pyramid(), 4, 64, 96, anchor_generator=anchors, score_thresh=0.3, detections_per_img=5
        )
    )


def ssd() -> nn.Module:
    backbone = Pyramid(8)
    backbone.out_channels = [8, 8]  # type: ignore[assignment]
    anchors = DefaultBoxGenerator([[2], [2, 3]], scales=[0.2, 0.4, 0.8], steps=[8, 16])
    return _random(
        lambda: detection.ssd.SSD(
            backbone, anchors, (96, 64), 4, score_thresh=0.3, detections_per_img=9
        )
    )


def faster_rcnn() -> nn.Module:
    anchors = AnchorGenerator(((16, 24), (32, 48)), ((0.5, 1.0),) * 2)
    pool = MultiScaleRoIAlign(["0", "1"], output_size=3, sampling_ratio=2)
    options: dict[str, Any] = {
        "rpn_anchor_generator": anchors,
        "box_roi_pool": pool,
        "box_score_thresh": 0.25,
    }
    options |= {
        "box_detections_per_img": 9,
        "rpn_post_nms_top_n_test": 40,
        "box_batch_size_per_image": 16,
    }
    head = detection.faster_rcnn.TwoMLPHead(8 * 9, 12)
    predictor = detection.faster_rcnn.FastRCNNPredictor(12, 4)
    return _random(
        lambda: detection.FasterRCNN(
            Pyramid(8), None, 64, 96, box_head=head, box_predictor=predictor, **options
        )
    )


MODELS = {"retinanet": retinanet, "fcos": fcos, "ssd": ssd, "faster_rcnn": faster_rcnn}


def _random(make: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make().eval()
        with torch.no_grad():
            for name, p in model.named_parameters():
                scale = (2 / p[0].numel()) ** 0.5 if p.dim() > 1 else 0.1
                scale *= 0.5 if "bbox" in name else 2.0 if "cls" in name else 1.0
                norm = p.dim() == 1 and name.endswith("weight")
                p.copy_(scale * torch.randn(p.shape) + norm)
    return model


def images(count: int = 1, seed: int = 0) -> list[Tensor]:
    """Return images of different sizes, none of them the network's."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(3, 50 + 7 * b, 80 - 5 * b, generator=generator) for b in range(count)]


def objects(count: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    low = torch.rand(count, 2, generator=generator) * torch.tensor([40.0, 20.0])
    found = torch.cat([low, low + 8 + 20 * torch.rand(count, 2, generator=generator)], 1)
    return {"boxes": found, "labels": torch.randint(3, (count,), generator=generator)}
