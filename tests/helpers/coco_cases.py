"""A small data set in COCO's layout with known content."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from boxcov import Detections
from boxcov.data import coco

CATEGORIES = [
    {"id": 3, "name": "cow"},
    {"id": 1, "name": "cat"},
    {"id": 7, "name": "dog"},
]  # in no order: classes go by their ids
SIZES = {11: (100, 50), 5: (40, 80), 8: (64, 64)}  # width and height


def coco_root(root: Path) -> Path:
    (root / "annotations").mkdir(parents=True)
    (root / "val2017").mkdir()
    rng = np.random.default_rng(0)
    for number, (width, height) in SIZES.items():
        pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / "val2017" / f"{number:012d}.png")
    things = [
        {"image_id": 11, "category_id": 1, "bbox": [10, 5, 20, 30], "iscrowd": 0},
        {
            "image_id": 11,
            "category_id": 7,
            "bbox": [90, 40, 30, 30],
        },  # beyond the border, and without the flag
        {"image_id": 11, "category_id": 3, "bbox": [0, 0, 60, 20], "iscrowd": 1},
        {"image_id": 11, "category_id": 3, "bbox": [10, 10, 0, 5], "iscrowd": 0},  # without area
        {"image_id": 8, "category_id": 3, "bbox": [4, 8, 16, 32], "iscrowd": 0},
    ]
    content = {
        "info": {},
        "images": [
            {"id": n, "file_name": f"{n:012d}.png", "width": w, "height": h}
            for n, (w, h) in SIZES.items()
        ],
        "annotations": [
            {"id": i + 1, "area": thing["bbox"][2] * thing["bbox"][3], **thing}
            for i, thing in enumerate(things)
        ],
        "categories": CATEGORIES,
    }
    (root / "annotations" / "instances_val2017.json").write_text(json.dumps(content))
    return root


def edited(root: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """The annotation file after a change of its content in place."""
    path = root / "annotations" / "instances_val2017.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return path


def found_in(
    frames: coco.Coco, covariance: bool = True, fields: tuple[str, ...] = ("x1", "y1", "x2", "y2")
) -> list[Detections]:
    """Detections near the objects of each frame and elsewhere, with random covariances."""
    generator = torch.Generator().manual_seed(0)
    out = []
    for _, (target,) in frames:
        n = len(target["labels"])
        low = torch.rand(2, 2, generator=generator) * 30
        boxes = torch.cat(
            [
                target["boxes"] + torch.randn(n, 4, generator=generator),
                torch.cat([low, low + 20], 1),
            ]
        )
        boxes = torch.cat([boxes, torch.zeros(n + 2, len(fields) - 4)], 1)
        A = torch.randn(n + 2, len(fields), len(fields), generator=generator)
        labels = torch.cat([target["labels"], torch.tensor([0, 1])])
        scores = torch.rand(n + 2, generator=generator)
        frame = torch.zeros(n + 2, dtype=torch.long)
        C = A @ A.transpose(1, 2) if covariance else None
        out.append(
            Detections(
                boxes,
                scores,
                labels,
                frame,
                fields,
                frames.classes,
                C,
                meta={"method": "exact"} if covariance else {},
            )
        )
    return out


def average_precisions(annotations: Path, results: Path) -> list[float]:
    """The twelve numbers of the official evaluation."""
    module = pytest.importorskip("pycocotools.coco", reason="pycocotools is not installed")
    from pycocotools.cocoeval import COCOeval

    with redirect_stdout(StringIO()):
        truth = module.COCO(annotations)
        evaluation = COCOeval(truth, truth.loadRes(str(results)), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    numbers: list[float] = evaluation.stats.tolist()
    return numbers
