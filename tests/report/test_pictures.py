from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from boxcov.data import coco
from boxcov.errors import BoxcovError
from boxcov.report.pictures import write_images
from helpers.coco_cases import coco_root, found_in


def test_boxes_and_objects_are_drawn_where_they_are(tmp_path: Path) -> None:
    frames = coco.frames(coco_root(tmp_path / "set"), size=96)
    found = found_in(frames)
    shown = [
        (image[0].numpy(), boxes, targets[0]["boxes"].numpy())
        for (image, targets), boxes in zip(frames, found)
    ]
    write_images(tmp_path / "three.png", shown, ["one", "two", "three"])
    write_images(
        tmp_path / "plain.png",
        [(image, boxes[:0], truth[:0]) for image, boxes, truth in shown],
        ["one", "two", "three"],
    )
    drawn, plain = (
        np.asarray(Image.open(tmp_path / f"{name}.png").convert("RGB")).astype(int)
        for name in ("three", "plain")
    )
    assert drawn.shape == plain.shape
    changed = np.abs(drawn - plain).sum(2) > 60
    red = changed & (drawn[:, :, 0] > 180) & (drawn[:, :, 1] < 90)
    green = changed & (drawn[:, :, 1] > 130) & (drawn[:, :, 0] < 90)
    assert int(red.sum()) > 300
    third = drawn.shape[1] // 3
    assert (
        int(green[:, :third].sum()) > 50
    )  # objects in the first and the last image, none in the one between
    assert int(green[:, third + 8 : 2 * third - 8].sum()) == 0


def test_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(BoxcovError, match=r"x\.png: there are no frames to draw"):
        write_images(tmp_path / "x.png", [])
