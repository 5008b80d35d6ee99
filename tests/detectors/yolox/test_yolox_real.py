"""The trained nano network on real images."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from boxcov import MCGLM, ExactGLM, fit
from boxcov.data import coco
from boxcov.detectors.yolox import YOLOX, load
from helpers.coco_cases import average_precisions
from helpers.data_roots import real
from helpers.yolox_cases import nano


@pytest.fixture(scope="module")
def detector() -> YOLOX:
    return load(nano() / "yolox_nano_folded.safetensors", threshold=0.3)


def test_it_finds_things_and_boxes_are_unchanged_bit_for_bit(
    detector: YOLOX, tmp_path: Path
) -> None:
    frames = coco.frames(real("coco"), "val2017")[:6]
    posterior = fit(
        detector, coco.frames(real("coco"), "train2017")[:4], n_data=206, prior_precision=1.0
    )
    head, deep = ExactGLM(detector, posterior), MCGLM(detector, posterior, samples=2)
    plain = [detector.detect(inputs) for inputs, _ in frames]
    assert sum(map(len, plain)) > 20
    kept = []
    for number, ((inputs, _), expected) in enumerate(zip(frames, plain)):
        found = head(inputs)
        for other in [found, deep(inputs)] if number == 0 else [found]:
            assert all(
                torch.equal(getattr(other, name), getattr(expected, name))
                for name in ("boxes", "scores", "labels", "frame")
            )
        kept.append(found)
    annotations = json.loads((real("coco") / "annotations" / "instances_val2017.json").read_text())
    annotations["images"] = [
        image for image in annotations["images"] if image["id"] in frames.image_ids
    ]
    annotations["annotations"] = [
        thing for thing in annotations["annotations"] if thing["image_id"] in frames.image_ids
    ]
    (tmp_path / "annotations.json").write_text(json.dumps({"info": {}, **annotations}))
    coco.write_results(tmp_path / "plain.json", frames, plain)
    coco.write_results(
        tmp_path / "found.json", frames, [replace(f, meta=kept[0].meta) for f in kept]
    )
    numbers = [
        average_precisions(tmp_path / "annotations.json", tmp_path / name)
        for name in ("plain.json", "found.json")
    ]
    assert numbers[0] == numbers[1]
    assert numbers[0][1] > 0.3
