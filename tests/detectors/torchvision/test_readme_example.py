"""The README's example with a torchvision model: an image folder in, a picture with risk out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from boxcov.data import coco
from helpers.torchvision_cases import MODELS, NAMES

ROOT = Path(__file__).parents[3]
COLOURS = {"cat": (220, 60, 40), "cow": (60, 200, 80), "dog": (60, 90, 230)}
FIT, COUNT = 20, 60  # images to fit with, and all


def draw_photo(rng: np.random.Generator, size: int = 96) -> tuple[Any, list[dict[str, Any]]]:
    """Return an image of one to three coloured rectangles on noise, and its annotations."""
    pixels = rng.integers(90, 130, (size, size, 3), dtype=np.uint8)
    objects = []
    for number in rng.choice(3, int(rng.integers(1, 4)), replace=False):
        width, height = (int(v) for v in rng.integers(18, 44, 2))
        x, y = (int(rng.integers(0, size - side)) for side in (width, height))
        pixels[y : y + height, x : x + width] = list(COLOURS.values())[number]
        objects.append({"category_id": int(number) + 1, "bbox": [x, y, width, height]})
    return Image.fromarray(pixels), objects


def make_photos(root: Path, count: int) -> None:
    """Write a folder in COCO's layout, split val."""
    (root / "val").mkdir(parents=True)
    (root / "annotations").mkdir()
    rng, images, things = np.random.default_rng(0), [], []
    for number in range(count):
        picture, objects = draw_photo(rng)
        picture.save(root / "val" / f"{number}.png")
        images.append({"id": number, "file_name": f"{number}.png", "width": 96, "height": 96})
        things += [{**one, "image_id": number, "iscrowd": 0} for one in objects]
    annotations = [
        {"id": i, "area": one["bbox"][2] * one["bbox"][3], **one} for i, one in enumerate(things)
    ]
    categories = [{"id": i + 1, "name": name} for i, name in enumerate(COLOURS)]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (root / "annotations" / "instances_val.json").write_text(json.dumps(content))


def train(model: Any, frames: Any, steps: int) -> Any:
    """Train a torchvision model on frames of boxcov, as one's own script would."""
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    model.train()
    for step in range(steps):
        picked = [frames[(8 * step + k) % len(frames)] for k in range(8)]
        images = [image[0].flip(0) / 255 for image, _ in picked]
        targets = [
            {"boxes": target["boxes"], "labels": target["labels"] + 1} for _, (target,) in picked
        ]
        losses = model(images, targets)
        optimizer.zero_grad()
        sum(losses.values()).backward()
        optimizer.step()
    return model.eval()


@pytest.mark.filterwarnings("ignore::boxcov.errors.BoxcovWarning")
def test_the_example_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.models import detection

    monkeypatch.chdir(tmp_path)
    make_photos(Path("photos"), COUNT)
    Image.open("photos/val/7.png").convert("RGB").save("street.jpg")
    frames = coco.frames("photos", split="val", size=None)
    own = train(MODELS["fcos"](), frames, steps=150)
    weights = SimpleNamespace(DEFAULT=SimpleNamespace(meta={"categories": NAMES}))
    monkeypatch.setattr(detection, "FCOS_ResNet50_FPN_Weights", weights)
    monkeypatch.setattr(detection, "fcos_resnet50_fpn", lambda weights: own)
    (code,) = re.findall(r"```py\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    assert "[cli,coco,torchvision]" in (ROOT / "README.md").read_text()  # what it imports
    scope: dict[str, Any] = {}
    exec(code.replace("[:100]", f"[:{FIT}]").replace("[100:]", f"[{FIT}:]"), scope)
    found = scope["model"](scope["image"])
    assert len(found) > 0
    assert found.risk.shape == (len(found),)
    assert found.region(0.9).shape == (len(found), 4)
    assert Image.open("street.png").size[0] > 300
