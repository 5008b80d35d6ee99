"""Preprocessing of images by transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Images(nn.Module):
    """Run the processor on images (B, 3, h, w), BGR, 0 to 255.

    Return ``pixel_values`` and, if the processor makes one, ``pixel_mask``. It is a module so that
    its output is cached with the rest of the trunk.
    """

    def __init__(self, processor: Any) -> None:
        super().__init__()
        self.processor = processor

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        rgb = images.flip(1).round().clamp(0, 255).to("cpu", torch.uint8).permute(0, 2, 3, 1)
        given = self.processor(
            images=list(rgb.numpy()), return_tensors="pt", input_data_format="channels_last"
        )
        prepared = {"pixel_values": given["pixel_values"].to(images)}
        if "pixel_mask" in given:
            prepared["pixel_mask"] = given["pixel_mask"].to(images.device)
        return prepared
