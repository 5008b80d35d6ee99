"""Small random transformers models with images and objects. The import takes seconds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from boxcov.detectors.transformers import QueryDetector, wrap

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

NAMES = {0: "N/A", 1: "cat", 2: "cow", 3: "dog"}  # the classes of coco_cases


def detr(auxiliary_loss: bool = False) -> nn.Module:
    resnet = transformers.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 12, 16, 16],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage4"],
    )
    config = transformers.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone_config=resnet,
        d_model=16,
        encoder_layers=1,
        decoder_layers=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        num_queries=12,
        id2label=NAMES,
        auxiliary_loss=auxiliary_loss,
    )
    return _random(transformers.DetrForObjectDetection, config)


def yolos() -> nn.Module:
    config = transformers.YolosConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        image_size=[64, 96],
        patch_size=16,
        num_detection_tokens=12,
        id2label=NAMES,
    )
    return _random(transformers.YolosForObjectDetection, config)


def rt_detr(version: int = 1, layers: int = 3) -> nn.Module:
    resnet = transformers.RTDetrResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 12, 16, 16],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )
    kind = "RTDetr" if version == 1 else "RTDetrV2"
    config = getattr(transformers, f"{kind}Config")(
        backbone_config=resnet,
        encoder_hidden_dim=16,
        encoder_in_channels=[12, 16, 16],
        encoder_ffn_dim=24,
        encoder_attention_heads=2,
        decoder_in_channels=[16, 16, 16],
        d_model=16,
        num_queries=12,
        decoder_ffn_dim=24,
        decoder_layers=layers,
        decoder_attention_heads=2,
        decoder_n_points=2,
        num_denoising=4,
        id2label=NAMES,
    )
    return _random(getattr(transformers, f"{kind}ForObjectDetection"), config)


MODELS = {"detr": detr, "yolos": yolos, "rt_detr": rt_detr}


THRESHOLD = {"detr": 0.3, "yolos": 0.3, "rt_detr": 0.15}
PROCESSORS = {
    "detr": "DetrImageProcessorPil",
    "yolos": "YolosImageProcessorPil",
    "rt_detr": "RTDetrImageProcessorPil",
}


def made(name: str) -> QueryDetector:
    return wrap(MODELS[name](), threshold=THRESHOLD[name])


def _random(kind: Any, config: Any) -> nn.Module:
    """Set weights that make queries differ, and nontrivial norms."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            scale = (
                0.3
                if p.dim() < 2
                else (2 / p[0].numel()) ** 0.5
                if p.dim() < 3 or p.shape[0] > 1
                else 1.0
            )
            p.add_(scale * torch.randn(p.shape, generator=generator))
        for name, buffer in model.named_buffers():
            if name.endswith("running_var"):
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
        for head in [
            layer
            for name, layer in model.named_modules()
            if name.startswith("class_labels_classifier")
        ]:
            if isinstance(head, nn.Linear) and head.out_features == len(NAMES) + 1:
                head.bias.copy_(torch.tensor([-5.0, 0, 0, 0, -2]))  # objects are common
    return model.eval()


def pixels(count: int = 1, seed: int = 0, height: int = 64, width: int = 96) -> Tensor:
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(seed))


def objects(count: int, seed: int = 0, height: int = 64, width: int = 96) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    low = torch.rand(count, 2, generator=generator) * torch.tensor([width - 20.0, height - 20.0])
    boxes = torch.cat([low, low + 4 + 16 * torch.rand(count, 2, generator=generator)], 1)
    return {"boxes": boxes, "labels": torch.randint(3, (count,), generator=generator)}
